"""What a record of ``memplan validate`` says, reading by reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from memplan.device.measured import cublas_workspaces
from memplan.estimate import estimate
from memplan.frameworks.megatron import validating as megatron
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.resolve import resolve
from memplan.records.readings import Estimated, RankReading, Stage
from memplan.records.record import Record, differences, from_json
from memplan.report.json import to_json
from memplan.search.time import step_time
from memplan.search.time.rates import as_validated

from .readings import Reading


def readings_of(data: Mapping[str, Any]) -> tuple[list[Reading], str]:
    """Of a record as JSON; and why the run failed, if it did."""
    record = from_json(data, "memplan validate")
    failures = record.run.failures
    return list(_readings(record)), f"{failures[0].kind}: {failures[0].message}" if failures else ""


def readings_today(record: Record) -> list[Reading]:
    """Of a record, beside what today's code estimates of the plan that ran."""
    plan = _plan(record)
    if record.run.code == megatron.CODE and not {"transformer-engine", "apex"} & set(record.run.versions.others):
        plan = megatron.stepped_by_torch(plan)
    estimated = Estimated.model_validate(to_json(estimate(plan)))
    return list(_readings(record.model_copy(update={"estimate": estimated})))


def _readings(record: Record) -> Iterator[Reading]:
    several = len({rank.stage for rank in record.run.ranks}) > 1
    workspaces = sum(hold.bytes for hold in cublas_workspaces(_plan(record)))
    for one in differences(record.estimate, record.run):
        yield Reading(_named(one.reading, one.stage, several), "bytes", one.measured, one.estimated)
    for rank in record.run.ranks:
        stage = record.estimate.of(rank.stage)
        if stage is not None:
            yield from _of_rank(rank, stage, several, workspaces)
    yield from _seconds(record)


def _named(name: str, stage: int, several: bool) -> str:
    return f"{name}, stage {stage}" if several else name


def _plan(record: Record) -> ResolvedPlan:
    return ResolvedPlan.model_validate(record.estimate.to_json()["plan"])


def _of_rank(rank: RankReading, stage: Stage, several: bool, workspaces: int) -> Iterator[Reading]:
    """What lies beside the tensors, and the moments that an estimate has, too."""
    known = stage.model_dump()
    beside: dict[str, tuple[int | None, int | None]] = {
        "static": (rank.static, known.get("static_bytes")),
        "context": (rank.context, stage.beyond_allocated.get("cuda_context")),
        "workspaces": (rank.workspaces, workspaces),
    }
    moments = {moment.name: moment.allocated for moment in rank.moments}
    for name in ("initialisation", "evaluation"):
        beside[name] = (moments.get(name), (known.get("moments") or {}).get(name))
    for name, (measured, estimated) in beside.items():
        if measured is not None:
            yield Reading(_named(name, rank.stage, several), "bytes", measured, estimated)


def seconds(record: Record) -> float | None:
    """The median of a run's steps: of one rank alone, which waits for nobody. ``None`` where others ran on its GPU."""
    ranks = record.run.ranks
    return median(ranks[0].seconds) if len(ranks) == 1 and ranks[0].seconds and record.run.world == "real" else None


def _seconds(record: Record) -> Iterator[Reading]:
    """The median step, beside the time model's of the same kernels."""
    taken = seconds(record)
    if taken is None:
        return
    try:
        predicted: float | None = step_time(as_validated(resolve(_plan(record)))).total
    except (PlanError, ValueError):
        predicted = None
    yield Reading("seconds of a step", "seconds", taken, predicted)
