"""The smallest changes of one plan that make it fit: each changes one thing, with the bytes that it gains and the
seconds that it loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..estimate import device_bytes, estimate
from ..gpus import GPUS
from ..measured import NOTHING, Measured
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.resolve import resolve
from .axes import extras_of
from .clock import Clock
from .cuts import CUT, fitting, smallest
from .fields import UNCUT_FIELDS, changed
from .peaks import fullest
from .point import Point, Recomputing
from .result import Change, Suggestion
from .search import Report
from .space import space_of
from .timing import step_time, work_of
from .works import Work, Works, fields_of


def measured(base: Plan, known: Measured = NOTHING) -> Suggestion | None:
    """A plan as it is; ``None`` where it cannot run."""
    try:
        plan = resolve(base)
        return _suggestion(base, plan, known)
    except PlanError:
        return None


def _suggestion(base: Plan, plan: Plan, known: Measured) -> Suggestion:
    requested, stage = fullest(plan)
    device = device_bytes(plan, stage, known) if plan.framework in CUT else estimate(base, known).peak
    step = step_time(plan)
    return Suggestion(_point(plan), _works(plan), base, requested, stage, step.total, device, None, step)


def _point(plan: Plan) -> Point:
    layout, recompute = plan.layout, plan.recompute
    done = Recomputing(recompute.mode, recompute.method, recompute.layers)
    return Point(layout.tp, layout.cp, layout.pp, layout.vpp, layout.dp or 1, layout.zero, plan.batch.mbs, done)


def _works(plan: Plan) -> Works:
    return tuple(tuple(Work(chunk.layers, chunk.embedding, chunk.head) for chunk in stage) for stage in work_of(plan))


def changes_of(
    given: Suggestion, limit: int, fixed: Mapping[str, object], report: Report, known: Measured = NOTHING
) -> list[Change]:
    """Single changes of ``given`` that need less, or fit; those that fit first, and of these the fastest. What is
    ``fixed`` stays."""
    found: list[Change] = []
    proposed = [(what, fields) for what, fields in _proposed(given, limit) if not fields.keys() & fixed.keys()]
    for at, (what, fields) in enumerate(proposed):
        report("changes that could help", at, len(proposed))
        base = changed(given.plan, fields)
        try:
            after = _suggestion(base, resolve(base), known)
        except PlanError:
            continue
        gained, lost = given.needs - after.needs, after.seconds - given.seconds
        fits = after.needs <= _limit_of(base, given.plan, limit)
        if gained > 0 or fits:
            found.append(Change(what, tuple(fields.items()), after, gained, lost, fits))
    found.sort(key=_smallest_first)
    return found


def _smallest_first(change: Change) -> tuple[object, ...]:
    """What fits first; other hardware behind the same; then the fastest, or what gains most."""
    buys = any(path.startswith("hardware.") and path != "hardware.gpus" for path, _ in change.fields)
    return not change.fits, buys, change.lost if change.fits else -change.gained, -change.gained


def _limit_of(base: Plan, before: Plan, limit: int) -> int:
    """``limit`` on the GPU of ``base``, with the same headroom in bytes."""
    if base.hardware.gpu == before.hardware.gpu or base.hardware.gpu is None or before.hardware.gpu is None:
        return limit
    return limit + GPUS[base.hardware.gpu].capacity_bytes - GPUS[before.hardware.gpu].capacity_bytes


def _proposed(given: Suggestion, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to try, in words and fields."""
    plan = resolve(given.plan)
    yield from _smaller_batches(plan)
    yield from _more_recompute(plan)
    yield from _more_sharding(plan)
    yield from _other_cuts(plan, limit)
    for group in extras_of(plan):
        for extra in group:
            yield extra.label, dict(extra.fields)
    if plan.attention == "eager" and plan.framework not in ("megatron-deepspeed",):
        yield "flash attention", {"attention": "flash"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in plan.environment and plan.framework != "megatron-deepspeed":
        environment = {**plan.environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        yield "expandable segments", {"environment": environment}
    yield from _larger_gpus(plan, given.needs)


def _smaller_batches(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    mbs = plan.batch.mbs
    smaller = {mbs // 2, 1} if mbs > 1 else set()
    for size in sorted(smaller - {0}, reverse=True):
        yield (
            f"micro-batch {mbs} → {size}",
            {"batch.mbs": size, "batch.gbs": plan.batch.gbs, "batch.accumulation": None},
        )


def _more_recompute(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    mode = plan.recompute.mode
    if mode == "none" and plan.framework == "megatron":
        yield "selective recompute", {"recompute.mode": "selective"}
        most = max(chunk.layers for stage in work_of(plan) for chunk in stage)
        for layers in sorted({max(1, most // 4), max(1, most // 2)}):
            fields = {"recompute.mode": "full", "recompute.method": "block", "recompute.layers": layers}
            yield f"full recompute of {layers} of {most} layers", fields
    if mode != "full":
        fields = {"recompute.mode": "full", "recompute.method": "uniform", "recompute.layers": None}
        yield "full recompute", {**fields, "recompute.modules": None}


def _more_sharding(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    layout, framework = plan.layout, plan.framework
    dp = layout.dp or 1
    most = {"deepspeed": 3, "ddp": 1, "megatron": 1, "megatron-deepspeed": 1}.get(framework, 0)
    for zero in range(layout.zero + 1, most + 1):
        name = "distributed optimizer" if framework == "megatron" else f"ZeRO-{zero}"
        if dp * layout.cp > 1:
            yield name, {"layout.zero": zero}
    if framework in CUT:
        for name in ("tp", "pp"):
            size = 2 * getattr(layout, name)
            if dp % 2 == 0:
                fields = {f"layout.{name}": size, "layout.dp": None, **UNCUT_FIELDS}
                if name == "tp" and framework == "megatron":
                    fields["layout.sequence_parallel"] = True
                yield f"{name} {size // 2} → {size}", {**fields, "hardware.gpus": plan.hardware.gpus}
    if layout.tp > 1 and not layout.sequence_parallel and framework == "megatron":
        yield "sequence parallelism", {"layout.sequence_parallel": True}
    if plan.hardware.gpus is not None and framework not in ("single", "device-map"):
        gpus = 2 * plan.hardware.gpus
        fields = {"hardware.gpus": gpus, "layout.dp": None, "batch.gbs": plan.batch.gbs, "batch.accumulation": None}
        yield f"{gpus:,} GPUs", fields


def _other_cuts(plan: Plan, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if plan.framework not in CUT or plan.layout.pp == 1:
        return
    point = _point(plan)
    space = space_of(plan, plan, {})
    ratios = Clock(space).ratios(point)
    for what, works in (
        ("the fastest cut that fits", fitting(plan, ratios, limit)),
        ("the cut that needs least", smallest(plan, ratios)),
    ):
        if works is not None:
            yield what, dict(fields_of(plan.framework, works))


def _larger_gpus(plan: Plan, needs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The smallest GPU of a data centre on which the plan may fit, where the capacity is the table's."""
    name = plan.hardware.gpu
    if name is None or plan.hardware.capacity != GPUS[name].capacity_bytes:
        return
    larger = [gpu for gpu in GPUS.values() if gpu.capacity_bytes >= needs and not gpu.name.startswith("rtx")]
    if larger:
        gpu = min(larger, key=lambda gpu: gpu.capacity_bytes)
        yield gpu.name, {"hardware.gpu": gpu.name, "hardware.capacity": None}
