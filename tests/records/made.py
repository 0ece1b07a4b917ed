"""Records made up for tests: real plans and estimates, and runs that measured what a test says."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.records.readings import Failure, RankReading, Run, Versions
from memplan.records.record import Record, new_record
from memplan.report.json import to_json

MIB = 1 << 20
VERSIONS = Versions(memplan="0.1.0", python="3.11.7", torch="2.13.0+cu130", cuda="13.0", driver="590.48.01")
NAMES = {"h100-80gb": "NVIDIA H100 80GB HBM3", "a10g": "NVIDIA A10G", "b200": "NVIDIA B200"}
SINGLE = {"model": "gpt2", "gpu": "h100-80gb", "mbs": "2", "seq": "256"}
TWO_STAGES = {
    "model": "gpt2",
    "framework": "megatron",
    "gpu": "h100-80gb",
    "gpus": "4",
    "tp": "2",
    "pp": "2",
    "mbs": "1",
    "gbs": "4",
    "seq": "256",
}
SHARDED = {"model": "gpt2", "framework": "ddp", "gpu": "h100-80gb", "gpus": "2", "mbs": "1", "gbs": "2", "seq": "256"}


@lru_cache(maxsize=32)
def _estimate(flags: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return to_json(estimate(read_plan(None, dict(flags)).plan))


def estimate_json(flags: dict[str, str]) -> dict[str, Any]:
    return _estimate(tuple(flags.items()))


def ranks_of(
    flags: dict[str, str], *, apart: float = 0.0, hosts: tuple[str, ...] = ("alpha.cluster",), **readings: Any
) -> tuple[RankReading, ...]:
    """One reading a rank, ``apart`` (a part of the estimate) more than was estimated."""
    estimated = estimate_json(flags)
    gpu = estimated["plan"]["hardware"]["gpu"]
    ranks = [(rank, stage) for stage in estimated["stages"] for rank in stage["ranks"]]
    return tuple(
        RankReading(
            rank=rank,
            stage=stage["stage"],
            host=hosts[at * len(hosts) // len(ranks)],
            device=NAMES.get(gpu, "cpu"),
            parameters=stage["parameters"],
            requested=round(stage["requested_bytes"] * (1 + apart)),
            allocated=round(stage["allocated_bytes"] * (1 + apart)),
            reserved=round(stage["reserved_bytes"] * (1 + apart)),
            device_bytes=None,
            static=stage["static_bytes"],
            breakdown={key: size for key, size in stage["breakdown"].items() if size},
            **readings,
        )
        for at, (rank, stage) in enumerate(ranks)
    )


def run_of(
    flags: dict[str, str],
    *,
    world: Any = "real",
    code: Any = "torch",
    device: Any = "cuda",
    failures: tuple[Failure, ...] = (),
    versions: Versions = VERSIONS,
    **readings: Any,
) -> Run:
    gpu = estimate_json(flags)["plan"]["hardware"]["gpu"]
    ranks = ranks_of(flags, **readings)
    return Run(world=world, code=code, device=device, gpu=gpu, versions=versions, ranks=ranks, failures=failures)


def record_of(
    flags: dict[str, str] | None = None,
    *,
    minute: int = 0,
    command: str = "memplan validate --model gpt2",
    **run: Any,
) -> Record:
    flags = SINGLE if flags is None else flags
    time = datetime(2026, 11, 21, 20 + minute // 60, minute % 60, tzinfo=timezone.utc)
    return new_record(flags, estimate_json(flags), run_of(flags, **run), command=command, time=time)
