"""From a plan and its fixed fields to an answer: which layout to run, and what to change where nothing fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from time import perf_counter
from typing import Literal

from ..caches import begin_search
from ..device.measured import NOTHING, Measured
from ..device.outside_pytorch import least_context
from ..frameworks import framework
from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.fields import plan_fields
from ..plan.plan import Plan
from ..plan.resolved import ResolvedPlan
from ..plan.sizes import headroom_bytes
from .candidates import Clock
from .changes import changes_of, measured
from .result import Found, Suggestion
from .search import Report, Search
from .space import Space, filled, nearest_counts, space_of

Objective = Literal["time", "memory", "gpus"]

STEPS, POINTS = 0.1, 8
"""Memory by which a point of the front must be below the faster one before it, and how many there are at most."""


def suggest(
    base: Plan,
    fixed: Mapping[str, object],
    objective: Objective = "time",
    top: int = 4,
    report: Report = lambda what, done, of: None,
    known: Measured = NOTHING,
) -> Found:
    """The best layouts for ``base``, with measurements of the user's own GPUs (``known``). ``PlanError`` where the
    ``fixed`` fields leave no layout, or time is not modelled."""
    started = perf_counter()
    begin_search()
    resolved = filled(base)
    capacity, limit, beyond = _limits(resolved, known)
    space = _space(base, resolved, fixed)
    if objective == "gpus":
        search, best = _fewest_gpus(space, fixed, limit, beyond, top, report, known)
    else:
        search = Search(space, Clock(space), limit, beyond, report, known)
        best = _leanest_first(search, search.fastest(top)) if objective == "time" else _smallest(search, top)
    smallest = search.smallest() if not best else None
    closest = search.estimated(smallest) if smallest is not None else None
    front = search.front(best[0], STEPS, POINTS) if best else []
    given = measured(base, known) if _is_stated(base) else None
    stuck = closest if closest is not None else given if given is not None and not given.fits else None
    changes = changes_of(stuck, limit, fixed, search.report, known) if stuck is not None else ()
    return Found(
        base=resolved,
        fixed=dict(fixed),
        objective=objective,
        capacity=capacity,
        limit=limit,
        best=tuple(best),
        front=tuple(front),
        closest=closest,
        changes=tuple(changes),
        given=given,
        counts=search.counts(),
        seconds=perf_counter() - started,
    )


def _limits(plan: ResolvedPlan, known: Measured) -> tuple[int, int, int]:
    """Bytes of a GPU: its capacity, the limit (capacity less headroom), and the CUDA context within it."""
    capacity, gpu = plan.hardware.capacity, plan.hardware.gpu
    if capacity is None or gpu is None:
        problem = "is missing: a search needs the GPU's memory and speed (--gpu h100-80gb)"
        raise PlanError("hardware.gpu", ABSENT, problem)
    return capacity, capacity - headroom_bytes(plan.headroom, capacity), least_context(plan, known)


def _is_stated(base: Plan) -> bool:
    """Whether the plan says how it is laid out, so that there is something to compare with."""
    return bool(base.layout.model_fields_set) or "dp" not in framework(base.framework).supports.sizes


EQUALLY_FAST = 0.001
"""A part of a step's time that the time model does not tell apart: the layout that needs less comes first."""


def _leanest_first(search: Search, best: list[Suggestion]) -> list[Suggestion]:
    """``best`` with the one that needs least of those that are as fast as its first in front, replayed whole."""
    if not best:
        return best
    fastest = best[0]
    as_good = [one for one in best if one.point.keeps_numerics == fastest.point.keeps_numerics]
    as_fast = [one for one in as_good if one.seconds <= fastest.seconds * (1 + EQUALLY_FAST)]
    leanest = min(as_fast, key=lambda one: (one.needs, one.seconds))
    if leanest is fastest:
        return best
    whole = search.estimated(leanest)
    if whole.judged.verdict is not fastest.judged.verdict:
        return best
    return [whole, *(one for one in best if one is not leanest)]


def _smallest(search: Search, top: int) -> list[Suggestion]:
    """The layout that needs least, if it fits, and the fastest ones beside it."""
    least = search.smallest(numerics=True)
    whole = search.estimated(least) if least is not None and least.requested <= search.requestable else None
    if whole is None or not whole.fits:
        least = search.smallest()
        if least is None or least.requested > search.requestable:
            return []
        whole = search.estimated(least)
    others = [one for one in search.fastest(top) if one.point != whole.point] if top > 1 else []
    return [whole, *others[: top - 1]] if whole.fits else []


# -- what leaves no layout ---------------------------------------------------------------------------------


def _space(base: Plan, resolved: ResolvedPlan, fixed: Mapping[str, object]) -> Space:
    """The space, which has a point; ``PlanError`` that names what contradicts itself elsewhere."""
    space = space_of(base, resolved, fixed)
    if _has_points(space):
        return space
    gpus = space.gpus
    for number in (1, 2, 3):
        for paths in combinations(sorted(fixed), number):
            if not _has_points_with(base, resolved, {path: fixed[path] for path in paths}):
                raise _contradiction(space, fixed, paths)
    near = nearest_counts(base, resolved, fixed, gpus)
    works = f"; {' and '.join(f'{count:,}' for count in near)} GPUs work" if near else ""
    raise PlanError("hardware.gpus", gpus, f"has no layout: {_why(space)}{works}")


def _has_points(space: Space) -> bool:
    return next(iter(space), None) is not None


def _has_points_with(base: Plan, resolved: ResolvedPlan, fixed: Mapping[str, object]) -> bool:
    try:
        return _has_points(space_of(base, resolved, fixed))
    except PlanError:
        return False


def _contradiction(space: Space, fixed: Mapping[str, object], paths: Sequence[str]) -> PlanError:
    fields = plan_fields()
    named = [f"{fields[path].flag[2:] if path in fields else path} = {fixed[path]}" for path in paths]
    if len(named) > 1:
        together = f"{', '.join(named[:-1])} and {named[-1]}"
        problem = f"contradict each other on {space.gpus:,} GPUs: {_why(space)}"
        return PlanError("", ABSENT, f"{together} {problem}", origin=Origin("--fix"))
    return PlanError(paths[0], fixed[paths[0]], f"leaves no layout of {space.gpus:,} GPUs: {_why(space)}")


def _why(space: Space) -> str:
    """The rule that left out what had passed all others."""
    refused: Counter[str] = Counter()
    for _ in space.layouts(refused):
        pass
    rules = sorted(refused, key=lambda rule: (_depth(rule), refused[rule]))
    return rules[-1] if rules else "no values are left"


def _depth(rule: str) -> int:
    """How late a rule of the enumeration is applied."""
    starts = ("tp x cp x pp must", "no tp x cp x pp leaves", "dp must divide", "mbs x dp must divide")
    return next((at for at, start in enumerate(starts) if rule.startswith(start)), len(starts))


# -- fewest GPUs -------------------------------------------------------------------------------------------


def _fewest_gpus(
    space: Space, fixed: Mapping[str, object], limit: int, beyond: int, top: int, report: Report, known: Measured
) -> tuple[Search, list[Suggestion]]:
    """The smallest number of GPUs, whole nodes above one, on which a layout fits; the fastest there."""
    node, most = space.base.hardware.gpus_per_node, space.gpus
    counts = [*(count for count in range(1, min(node, most) + 1)), *range(2 * node, most + 1, node)]
    if counts[-1] != most:
        counts.append(most)
    search: Search | None = None
    for at, count in enumerate(counts):
        report("numbers of GPUs", at, len(counts))
        base = space.base.model_copy(update={"hardware": space.base.hardware.model_copy(update={"gpus": count})})
        try:
            smaller = space_of(base, space.resolved, fixed, count)
        except PlanError:
            continue
        if not _has_points(smaller):
            continue
        search = Search(smaller, Clock(smaller), limit, beyond, report, known)
        best = search.fastest(top)
        if best:
            return search, best
    return search or Search(space, Clock(space), limit, beyond, report, known), []


__all__ = ["Objective", "suggest"]
