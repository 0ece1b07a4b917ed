"""Other plans beside an answer: the smallest changes that make one fit, and other cuts of the same layout.

Each change is of one thing, with the bytes that it gains and the seconds that it loses. Cuts are those that a
framework's own methods make: ``estimate --partition METHOD`` gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..device.measured import NOTHING, Measured
from ..estimate import estimate, fold, judged_stage
from ..frameworks import framework
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.resolve import resolve
from ..values import dataclass
from .candidates import Clock, chunks_of
from .cuts import fields_of, smallest
from .framework import Proposal
from .point import changed
from .proposals import point_of, proposals
from .result import Change, Suggestion
from .search import Report
from .space import space_of
from .time import ranking_time, work_of


def stated(base: Plan) -> Suggestion:
    """A plan as it is, before the allocator is replayed. ``PlanError`` where it cannot run."""
    plan = resolve(base)
    requested, stage = framework(plan.framework).search.fullest(plan)
    step = ranking_time(plan)
    return Suggestion(point_of(plan), chunks_of(work_of(plan)), base, requested, stage, step.total, step=step)


def replayed(suggestion: Suggestion, known: Measured = NOTHING) -> Suggestion:
    """With the verdict on the fullest stage, or on all where those are few."""
    plan = resolve(suggestion.plan)
    if framework(plan.framework).search.chooses_cut:
        device, judged = judged_stage(plan, suggestion.fullest, known)
    else:
        whole = estimate(suggestion.plan, known)
        device, judged = whole.peak, whole.judged
    return replace(suggestion, device=device, fullest_judged=judged)


def measured(base: Plan, known: Measured = NOTHING) -> Suggestion:
    """A plan as it is, with its verdict. ``PlanError`` where it cannot run."""
    return replayed(stated(base), known)


def changes_of(
    given: Suggestion, limit: int, fixed: Mapping[str, object], report: Report, known: Measured = NOTHING
) -> list[Change]:
    """Single changes of ``given`` that need less, or fit; those that fit first, and of these the fastest. What is
    ``fixed`` stays."""
    found: list[Change] = []
    proposed = [one for one in proposals(given, limit) if not one.fields.keys() & fixed.keys()]
    for at, (what, fields, _) in enumerate(proposed):
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
    others = (_measured(name, plan, fields) for name, fields, _ in _ways(suggestion))
    return (proposed, *(one for one in others if one.name != LEAST or one.requested != proposed.requested))


def _ways(suggestion: Suggestion) -> Iterator[Proposal]:
    """Ways to cut, by their names."""
    least = _least(suggestion)
    if least is not None:
        yield Proposal(LEAST, least)
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
