"""A validation from the plan to a record: what is run, where, and what came of it.

What a validation is about to run, and about how long that takes: the first line that its user reads.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Literal

from .. import __version__
from ..estimate import estimate
from ..plan.environment import READ, REFUSED
from ..plan.errors import LackingError, PlanError, wrong_at
from ..plan.plan import Plan, ResolvedPlan
from ..plan.resolve import resolve
from ..records.readings import Code, RankReading, Run, Versions, World
from ..report.names import size
from ..result import Estimate
from ..search.time import step_time
from ..search.time.rates import as_validated
from ..search.time.shape import model_flops
from ..trace.job import MOST_MICROBATCHES
from ..trace.run import installed, traced
from ..values import dataclass, replace
from .cluster import Elastic, InTurn, Joined, Membership, Way, membership
from .devices import Device, check_free, check_host, gpu_of, gpus_for
from .failing import explained
from .launch import Watcher, launched
from .native import Native, planned
from .worker import Task, footprint_of

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def versions_of(packages: Iterable[str], driver: str | None) -> Versions:
    """With those of ``packages`` that are installed; ``driver`` is the GPUs', ``None`` of a run without any."""
    on_gpu = driver is not None
    found = {name: one for name in packages if (one := installed(name)) is not None}
    return Versions(
        memplan=__version__,
        python=platform.python_version(),
        torch=version("torch"),
        cuda=_cuda() if on_gpu else None,
        driver=driver,
        nccl=next((one for name in NCCL if (one := installed(name))), None) if on_gpu else None,
        others=found,
    )


def _cuda() -> str | None:
    """The CUDA that the installed PyTorch is built with, which it writes into a file."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


@dataclass(frozen=True, slots=True)
class Where:
    """How the user wants it run."""

    gpus: int
    """That take part, on all machines together."""
    code: Code = "torch"
    """Whose code runs."""
    device: Literal["cuda", "cpu", "fake"] = "cuda"
    emulates: bool = False
    nodes: int = 1
    endpoint: str | None = None
    node_rank: int | None = None
    warmup: int = 2
    steps: int = 3
    patience: float = 600.0
    shares: bool = False
    forces: bool = False
    stages: tuple[int, ...] = ()
    """Of which ranks take turns; empty: of all."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is about to run."""

    native: Native
    estimate: Estimate
    """For the code that runs, on the hardware that is here."""
    world: World
    where: Where
    gpu: str | None
    """Of memplan's table."""
    driver: str | None
    joined: Membership | None

    @property
    def ranks(self) -> tuple[int, ...]:
        if self.world == "real":
            return tuple(range(self.native.ranks))
        wanted, found = self.where.stages, self.native
        return tuple(rank for rank in found.distinct() if not wanted or found.stage_of(rank) in wanted)

    @property
    def stages(self) -> dict[int, int]:
        """Of each rank."""
        return {rank: self.native.stage_of(rank) for rank in self.ranks}

    @property
    def answers(self) -> bool:
        """Whether this process tells the user: of several that join one run, the first."""
        return self.joined is None or not self.joined.rank


def prepared(plan: Plan, where: Where, environment: Mapping[str, str] = os.environ) -> Prepared:
    """Checks everything that can be known before anything is started. ``PlanError`` where the plan cannot be run so,
    ``LackingError`` where something is missing or in use."""
    found = planned(where.code, resolve(plan), where.device)
    joined = membership(environment, where.gpus) if where.device != "fake" else None
    world = _world(found, where)
    if joined is not None and joined.world > 1 and world == "emulated":
        raise wrong_at(
            "--gpus",
            f"{where.gpus} is fewer than the {found.ranks} ranks of the plan: ranks that take turns need no "
            f"{joined.launcher}; start one process",
        )
    _check_stages(where, world, found.stages)
    devices: tuple[Device, ...] = ()
    if where.device == "cuda":
        _check_build()
        devices = _devices(where, world, joined, environment)
    gpu = gpu_of(devices[0].name, devices[0].total) if devices else found.runs.hardware.gpu
    runs = _here(found.runs, gpu, devices, environment)
    found = replace(found, runs=runs)
    estimated = estimate(runs)
    _check_size(estimated, devices, where)
    if where.device == "cpu" and not where.forces:
        check_host(estimated, where.gpus // where.nodes if world == "real" and joined is None else 1)
    driver = devices[0].driver if devices else None
    return Prepared(found, estimated, world, where, gpu, driver, joined)


def _world(found: Native, where: Where) -> World:
    """Real where there is a device for every rank."""
    if where.device == "fake":
        return "fake"
    if where.emulates:
        return "emulated"
    if where.gpus > found.ranks:
        raise wrong_at(
            "--gpus",
            f"{where.gpus} is more than the {found.ranks} ranks of the plan (hardware.gpus); a run takes one for each",
        )
    if where.gpus % where.nodes:
        raise wrong_at(
            "--nnodes", f"{where.nodes} must divide the {where.gpus} GPUs: every machine has the same number"
        )
    return "real" if where.gpus == found.ranks else "emulated"


def _check_stages(where: Where, world: World, stages: int) -> None:
    """Refuses stages that the plan has not, and a choice where all ranks run together."""
    if where.stages and world == "real":
        raise wrong_at("--stage", "is for ranks that take turns (--emulate): together they run all stages")
    for stage in where.stages:
        if not 0 <= stage < stages:
            raise wrong_at("--stage", f"{stage} must be from 0 to {stages - 1}")


def _devices(
    where: Where, world: World, joined: Membership | None, environment: Mapping[str, str]
) -> tuple[Device, ...]:
    """Those of this machine that take part, which nobody else uses."""
    if joined is None:
        count = 1 if world == "emulated" else where.gpus // where.nodes
        return gpus_for(count, share=where.shares, environment=environment)
    own = gpus_for(joined.local_rank + 1, share=True, environment=environment)[joined.local_rank :]
    check_free(own, share=where.shares)
    return own


def _check_build() -> None:
    """A PyTorch that was built without CUDA runs on no GPU."""
    found = version("torch")
    if found.endswith("+cpu"):
        raise LackingError(
            f"torch {found} is built without CUDA: install one with it (pytorch.org/get-started); "
            "--device fake and --device cpu need none"
        )


def _here(
    plan: ResolvedPlan, gpu: str | None, devices: tuple[Device, ...], environment: Mapping[str, str]
) -> ResolvedPlan:
    """``plan`` on the hardware and the PyTorch that are here, with the variables that its ranks will have."""
    torch = ".".join(version("torch").split("+")[0].split(".")[:2])
    hardware = plan.hardware.model_copy(update={"gpu": gpu}) if devices else plan.hardware
    if devices:
        hardware = hardware.model_copy(update={"capacity": devices[0].total})
    inherited = {name: environment[name] for name in (*READ, *REFUSED) if name in environment} if devices else {}
    changed = {"hardware": hardware, "torch": torch, "environment": {**inherited, **plan.environment}}
    return resolve(plan.model_copy(update=changed))


def _check_size(estimated: Estimate, devices: tuple[Device, ...], where: Where) -> None:
    """Refuses a run that cannot end well, unless it is forced."""
    if not devices or where.forces:
        return
    free = min(device.free for device in devices)
    hardware = estimated.plan.hardware.model_copy(update={"capacity": free})
    if estimate(estimated.plan.model_copy(update={"hardware": hardware})).fits is False:
        stage = f"stage {estimated.peak_stage} is estimated to need {size(estimated.peak)}"
        raise wrong_at(
            "--gpus",
            f"{stage}, and {devices[0]} has {size(free)} free: it would run out of memory; --force runs it anyway",
        )


def run(prepared: Prepared, watch: Watcher, says: Callable[[str, int, int], None]) -> Run:
    """Runs it. ``watch`` is shown the progress of processes, ``says`` that of traces."""
    if prepared.world == "fake":
        return _traced(prepared, says)
    where = prepared.where
    assert where.device != "fake"
    task = Task(
        plan=prepared.native.runs,
        code=where.code,
        world=prepared.world,
        device=where.device,
        warmup=max(where.warmup, prepared.native.least_warmup),
        steps=where.steps,
        seconds=where.patience,
        gathers=where.nodes > 1 or prepared.joined is not None,
    )
    runs, stages = prepared.native.runs, prepared.stages
    outcome = launched(
        _way(prepared),
        task.model_dump_json().encode(),
        patience=where.patience,
        environment={**os.environ, **runs.environment},
        watch=watch,
    )
    failures = tuple(explained(one, runs, stages) for one in outcome.failures)
    return Run(
        world=prepared.world,
        code=where.code,
        device=where.device,
        gpu=prepared.gpu if where.device == "cuda" else None,
        versions=versions_of(prepared.native.packages, prepared.driver),
        ranks=outcome.readings,
        failures=failures,
        notes=prepared.native.notes(prepared.world, where.device),
    )


def _way(prepared: Prepared) -> Way:
    where = prepared.where
    if prepared.world == "emulated":
        return InTurn(prepared.ranks)
    if prepared.joined is not None:
        return Joined(prepared.joined)
    endpoint = where.endpoint or "localhost:0"
    return Elastic(where.gpus // where.nodes, where.nodes, endpoint, where.node_rank)


def _traced(prepared: Prepared, says: Callable[[str, int, int], None]) -> Run:
    """One rank of each stage on fake tensors."""
    found, readings = prepared.native, []
    for at, rank in enumerate(prepared.ranks):
        says("tracing", at, len(prepared.ranks))
        trace = traced(found.job(rank), found.runs.model.name)
        footprint = footprint_of(trace, found.program(rank))
        readings.append(
            RankReading(
                rank=rank,
                stage=found.stage_of(rank),
                host=socket.gethostname(),
                device="fake",
                parameters=trace.outline.parameters,
                requested=footprint.peak,
                allocated=None,
                reserved=None,
                device_bytes=None,
                static=footprint.static,
                breakdown=footprint.breakdown,
                apart=footprint.apart,
            )
        )
    versions = versions_of(found.packages, prepared.driver)
    return Run(world="fake", code="torch", device="fake", gpu=None, versions=versions, ranks=tuple(readings))


STARTING = 15.0
"""Seconds in which launcher and rank import torch and transformers, and the rank builds its model, twice on a GPU; a
small model's run on a CPU takes 8 s of processor time in all."""
CORE = 1e10
"""FLOP/s of a CPU's core, assumed: fp32 products do better, 16 bits without instructions for them worse."""
ROUND = 5
"""Seconds to which a duration is rounded up."""


def announced(asked: Prepared) -> str:
    """One line; of a run on fake tensors nothing, since that is over before it is read."""
    where, ranks = asked.where, len(asked.ranks)
    if where.device == "fake":
        return ""
    plan, on = asked.native.runs, "the CPU" if where.device == "cpu" else (asked.gpu or "the GPU")
    sizes = f"{plan.framework}, {plan.precision.dtype}, mbs {plan.batch.mbs}, seq {plan.batch.seq}"
    if asked.world == "emulated":
        who = f"{ranks} of {asked.native.ranks} ranks" if ranks < asked.native.ranks else f"{ranks} ranks"
        who = f"{who}, one after another," if ranks > 1 else f"one of {asked.native.ranks} ranks"
    else:
        who = f"{ranks} ranks" if ranks > 1 else "one process"
    seconds = duration(asked)
    text = f"runs {plan.model.name} ({sizes}) as {who} on {on}: {iterations(asked)} iterations"
    return text if seconds is None else f"{text}, about {ROUND * ceil(seconds / ROUND)} s"


def iterations(asked: Prepared) -> int:
    """Of each rank: on a GPU those that warm up, those that are timed, one by phases; then, as on a CPU, those that
    warm up and the one that is followed."""
    warmup = max(asked.where.warmup, asked.native.least_warmup)
    followed = warmup + 1
    return followed if asked.where.device == "cpu" else warmup + asked.where.steps + 1 + followed


def duration(asked: Prepared) -> float | None:
    """Seconds; ``None`` where the GPU's speed is not known."""
    turns = len(asked.ranks) if asked.world == "emulated" else 1
    step = _cpu_step(asked) if asked.where.device == "cpu" else _gpu_step(asked)
    return None if step is None else turns * (STARTING + iterations(asked) * step)


def _gpu_step(asked: Prepared) -> float | None:
    try:
        return step_time(as_validated(asked.native.runs)).total * _share(asked)
    except PlanError:
        return None


def _cpu_step(asked: Prepared) -> float:
    """Of a rank, beside others that run at once."""
    whole = model_flops(asked.native.runs) / asked.native.ranks * _share(asked)
    at_once = 1 if asked.world == "emulated" else len(asked.ranks)
    return whole * at_once / (CORE * (os.cpu_count() or 1))


def _share(asked: Prepared) -> float:
    """Of an iteration's micro-batches those that run: outside a pipeline no more than a trace has."""
    plan = asked.native.runs
    if plan.layout.pp > 1 or asked.where.code != "torch":
        return 1.0
    return min(1.0, MOST_MICROBATCHES / plan.microbatches)
