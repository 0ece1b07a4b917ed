"""Other plans beside an answer: the smallest changes that make one fit, and other cuts of the same layout.

Each change is of one thing, with the bytes that it gains and the seconds that it loses. Cuts are those that a
framework's own methods make: ``estimate --partition METHOD`` gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..device.gpus import GPUS
from ..device.measured import NOTHING, Measured
from ..estimate import estimate, fold, judged_stage
from ..frameworks import framework
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.resolve import resolve
from ..plan.resolved import ResolvedPlan
from ..values import dataclass
from .candidates import Clock
from .cuts import ChunkLayers, StageLayers, fields_of, fitting, smallest
from .framework import Proposal
from .point import UNCUT_FIELDS, Point, Recomputing, changed
from .result import Change, Suggestion
from .search import Report
from .space import space_of
from .time import ranking_time, work_of


def measured(base: Plan, known: Measured = NOTHING) -> Suggestion:
    """A plan as it is. ``PlanError`` where it cannot run."""
    plan = resolve(base)
    search = framework(plan.framework).search
    requested, stage = search.fullest(plan)
    step = ranking_time(plan)
    stated = Suggestion(_point(plan), _cut(plan), base, requested, stage, step.total, step=step)
    if search.chooses_cut:
        device, judged = judged_stage(plan, stage, known)
    else:
        whole = estimate(base, known)
        device, judged = whole.peak, whole.judged
    return replace(stated, device=device, fullest_judged=judged)


def _point(plan: ResolvedPlan) -> Point:
    layout, recompute = plan.layout, plan.recompute
    done = Recomputing(recompute.mode, recompute.method, recompute.layers)
    return Point(layout.tp, layout.cp, layout.pp, layout.vpp, layout.dp or 1, layout.zero, plan.batch.mbs, done)


def _cut(plan: ResolvedPlan) -> StageLayers:
    return tuple(
        tuple(ChunkLayers(chunk.layers, chunk.embedding, chunk.head) for chunk in stage) for stage in work_of(plan)
    )


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
            after = measured(base, known)
        except PlanError:
            continue
        gained, lost = given.needs - after.needs, after.seconds - given.seconds
        if gained > 0 or after.fits:
            found.append(Change(what, tuple(fields.items()), after, gained, lost, after.fits))
    found.sort(key=_smallest_first)
    return found


def _smallest_first(change: Change) -> tuple[object, ...]:
    """What fits first; other hardware behind the same; then the fastest, or what gains most."""
    buys = any(path.startswith("hardware.") and path != "hardware.gpus" for path, _ in change.fields)
    return not change.fits, buys, change.lost if change.fits else -change.gained, -change.gained


def _proposed(given: Suggestion, limit: int) -> Iterator[Proposal]:
    """What to try, in words and fields."""
    plan = resolve(given.plan)
    search = framework(plan.framework).search
    yield from _smaller_batches(plan)
    yield from _more_recompute(plan)
    yield from _more_sharding(plan)
    yield from _other_cuts(plan, limit)
    for group in search.extras(plan):
        for extra in group:
            yield extra.label, dict(extra.fields)
    if plan.attention == "eager" and search.flash_attention:
        yield "flash attention", {"attention": "flash"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in plan.environment and search.expandable_segments:
        environment = {**plan.environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        yield "expandable segments", {"environment": environment}
    yield from _larger_gpus(plan, given.needs)


def _smaller_batches(plan: ResolvedPlan) -> Iterator[Proposal]:
    mbs = plan.batch.mbs
    smaller = {mbs // 2, 1} if mbs > 1 else set()
    for size in sorted(smaller - {0}, reverse=True):
        yield (
            f"micro-batch {mbs} → {size}",
            {"batch.mbs": size, "batch.gbs": plan.batch.gbs, "batch.accumulation": None},
        )


def _more_recompute(plan: ResolvedPlan) -> Iterator[Proposal]:
    mode = plan.recompute.mode
    if mode == "none":
        yield from framework(plan.framework).search.more_recompute(plan)
    if mode != "full":
        fields = {"recompute.mode": "full", "recompute.method": "uniform", "recompute.layers": None}
        yield "full recompute", {**fields, "recompute.modules": None}


def _more_sharding(plan: ResolvedPlan) -> Iterator[Proposal]:
    layout, own = plan.layout, framework(plan.framework)
    dp = layout.dp or 1
    for zero in range(layout.zero + 1, max(own.supports.zero) + 1):
        if dp * layout.cp > 1:
            yield own.zero_words(zero), {"layout.zero": zero}
    shards_sequence = own.search.chooses_cut and own.supports.sequence_parallel
    for name in ("tp", "pp") if own.search.chooses_cut else ():
        size = 2 * getattr(layout, name)
        if dp % 2 == 0:
            fields = {f"layout.{name}": size, "layout.dp": None, **UNCUT_FIELDS}
            if name == "tp" and shards_sequence:
                fields["layout.sequence_parallel"] = True
            yield f"{name} {size // 2} → {size}", {**fields, "hardware.gpus": plan.hardware.gpus}
    if layout.tp > 1 and not layout.sequence_parallel and shards_sequence:
        yield "sequence parallelism", {"layout.sequence_parallel": True}
    if plan.hardware.gpus is not None and "dp" in own.supports.sizes:
        gpus = 2 * plan.hardware.gpus
        fields = {"hardware.gpus": gpus, "layout.dp": None, "batch.gbs": plan.batch.gbs, "batch.accumulation": None}
        yield f"{gpus:,} GPUs", fields


def _other_cuts(plan: ResolvedPlan, limit: int) -> Iterator[Proposal]:
    if not framework(plan.framework).search.chooses_cut or plan.layout.pp == 1:
        return
    point = _point(plan)
    space = space_of(plan, plan, {})
    ratios = Clock(space).ratios(point)
    for what, cut in (
        ("the fastest cut that fits", fitting(plan, ratios, limit)),
        ("the cut that needs least", smallest(plan, ratios)),
    ):
        if cut is not None:
            yield what, dict(fields_of(plan.framework, cut))


def _larger_gpus(plan: ResolvedPlan, needs: int) -> Iterator[Proposal]:
    """The smallest GPU of a data centre on which the plan may fit, where the capacity is the table's."""
    name = plan.hardware.gpu
    if name is None or plan.hardware.capacity != GPUS[name].process_bytes:
        return
    larger = [gpu for gpu in GPUS.values() if gpu.process_bytes >= needs and not gpu.name.startswith("rtx")]
    if larger:
        gpu = min(larger, key=lambda gpu: gpu.process_bytes)
        yield gpu.name, {"hardware.gpu": gpu.name, "hardware.capacity": None}


# -- other cuts --------------------------------------------------------------------------------------------

LEAST = "least memory"
"""What the search's own cut by memory is called, where the proposed one is faster and needs more."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to cut the recommended layout, and what comes of it."""

    name: str
    requested: int | None
    """Bytes of its fullest stage; ``None`` where the method cannot make a cut of it."""
    fullest: int | None
    seconds: float | None
    problem: str = ""
    """Why it cannot."""


def methods_of(suggestion: Suggestion) -> tuple[Method, ...]:
    """The cut of ``suggestion``, then others of its layout; empty where there is nothing to cut."""
    plan = suggestion.plan
    if len(suggestion.cut) < 2:
        return ()
    proposed = Method("proposed", suggestion.requested, suggestion.fullest, suggestion.seconds)
    others = (_measured(name, plan, fields) for name, fields in _ways(suggestion))
    return (proposed, *(one for one in others if one.name != LEAST or one.requested != proposed.requested))


def _ways(suggestion: Suggestion) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Ways to cut by their name, each as fields of a plan by their paths."""
    least = _least(suggestion)
    if least is not None:
        yield LEAST, least
    yield from framework(suggestion.plan.framework).search.other_cuts()


def _least(suggestion: Suggestion) -> Mapping[str, Any] | None:
    """The cut whose fullest stage needs least, if it is another one."""
    resolved = resolve(suggestion.plan)
    if not framework(resolved.framework).search.chooses_cut:
        return None
    ratios = Clock(space_of(suggestion.plan, resolved, {})).ratios(suggestion.point)
    cut = smallest(resolved, ratios)
    return None if cut is None or cut == suggestion.cut else dict(fields_of(resolved.framework, cut))


def _measured(name: str, plan: Plan, fields: Mapping[str, Any]) -> Method:
    try:
        resolved = resolve(changed(plan, fields))
        peaks = [folded.peak for folded in fold(resolved)]
        return Method(name, max(peaks), peaks.index(max(peaks)), ranking_time(resolved).total)
    except PlanError as error:
        return Method(name, None, None, None, f"{error.field}: {error.problem}")
