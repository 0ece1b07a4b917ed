"""From a plan and its fixed fields to an answer: which layout to run, and what to change where nothing fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import inf
from time import perf_counter
from typing import Literal

from ..caches import begin_search
from ..device.measured import NOTHING, Measured, least_context
from ..frameworks import framework
from ..plan.errors import ABSENT, PlanError, wrong_at
from ..plan.fields import plan_fields
from ..plan.plan import Plan, ResolvedPlan
from ..plan.sizes import default_reserve, headroom_bytes
from ..result import Verdict
from ..values import replace
from .candidates import Clock
from .changes import changes_of, measured, without_retries
from .point import Extra, changed
from .result import Found, Offer, Suggestion
from .search import Report, Search, alike
from .space import Space, filled, nearest_counts, space_of
from .time import check_timed, error_between_layouts, published_error

Objective = Literal["time", "memory", "gpus"]

UNLIMITED = 1 << 60
"""Bytes that every layout fits into."""

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
    return Sought(base, fixed, objective, top, report, known).found()


class Sought:
    """A search: what is best in it (``offer``), and the whole answer (``found``), which takes several times as long."""

    def __init__(
        self,
        base: Plan,
        fixed: Mapping[str, object],
        objective: Objective,
        top: int,
        report: Report,
        known: Measured,
    ) -> None:
        started = perf_counter()
        begin_search()
        self.stated, self.fixed = base, fixed
        reserved = _with_reserve(base)
        self.keeps_free = "" if reserved is base else reserved.headroom
        self.base = _without_extras(reserved, fixed)
        self.objective, self.top, self.report, self.known = objective, top, report, known
        self.resolved = resolved = filled(self.base)
        self.capacity, self.limit, self._beyond = _limits(resolved, known)
        framework(resolved.framework).search.check_model(resolved, timed=objective == "time")
        if objective == "time":
            check_timed(resolved)
        self._space = _space(self.base, resolved, fixed)
        self.error = published_error(resolved)
        self.within = min(EQUALLY_FAST, error_between_layouts(resolved))
        self.gain = headroom_bytes(default_reserve(self.capacity), self.capacity)
        self._search: Search | None = None
        self.seconds = perf_counter() - started

    def offer(self) -> Offer:
        """The first of ``found().best``, or its ``closest``: no other layout is looked for than those that it could
        be."""
        started = perf_counter()
        search, best = self._best(1 if self.objective == "memory" else self.top, self.within)
        closest = None if best else self._closest(search)
        self.seconds += perf_counter() - started
        name = self.base.framework
        return Offer(name, self.objective, next(iter(best), None), closest)

    def found(self) -> Found:
        """The whole answer, from what an ``offer`` has computed."""
        started = perf_counter()
        search, best = self._best(self.top)
        closest = None if best else self._closest(search)
        front = _front(search, best) if best else []
        stated, limit, known = self.stated, self.limit, self.known
        given, refused = _given(stated, known, self._space)
        faster = self.keeps_free and best and given is not None and given.fits
        stuck = closest if closest is not None else given if given is not None and not given.fits else None
        changes = changes_of(stuck, limit, self.fixed, search.report, known) if stuck is not None else ()
        retrying = min(
            (one for one in best if one.judged.verdict is Verdict.RETRIES), key=lambda one: one.seconds, default=None
        )
        too_little = faster and given is not None and given.seconds < best[0].seconds
        return Found(
            base=self.resolved,
            fixed=dict(self.fixed),
            objective=self.objective,
            capacity=self.capacity,
            limit=limit,
            best=tuple(best),
            front=tuple(front),
            closest=closest,
            changes=tuple(changes),
            given=given,
            given_refused=refused,
            given_keeps_too_little=bool(too_little) and not measured(_with_reserve(stated), known).is_safe,
            counts=search.counts(),
            seconds=self.seconds + perf_counter() - started,
            ends_retries=without_retries(retrying, known) if retrying is not None else None,
            keeps_free=self.keeps_free,
            error=self.error,
            within=self.within,
            gain=self.gain,
            chosen_beside_layout=self._space.chosen_beside_layout,
        )

    def _best(self, top: int, within: float = inf) -> tuple[Search, list[Suggestion]]:
        """What is recommended, and the alternatives: those that take longer by no more than the part ``within``."""
        search = self._search
        if search is None and self.objective == "gpus":
            search, best = self._fewest_gpus(top, within)
        else:
            search = self._search_of(self._space) if search is None else search
            search.begin()
            best = _smallest(search, top) if self.objective == "memory" else self._fastest(search, top, within)
        self._search = search
        return search, best

    def _fastest(self, search: Search, top: int, within: float) -> list[Suggestion]:
        """The roomiest of the fastest in front of the others; sought anew where the fastest does not fit once every
        stage of it is replayed."""
        while True:
            fastest = search.fastest(top, within)
            best = _first(_roomiest_first(search, fastest, self.within, self.gain), top)
            if not (fastest and search.is_refuted(fastest[0])):
                return best
            search.begin()

    def _search_of(self, space: Space) -> Search:
        return Search(space, Clock(space), self.limit, self._beyond, self.report, self.known)

    def _closest(self, search: Search) -> Suggestion | None:
        smallest = search.smallest()
        if smallest is None and search.counts().too_large:  # by bounds: not one was a candidate
            search = Search(search.space, Clock(search.space), UNLIMITED, self._beyond, self.report, self.known)
            smallest = search.smallest()
        return search.estimated(smallest) if smallest is not None else None

    def _fewest_gpus(self, top: int, within: float) -> tuple[Search, list[Suggestion]]:
        """The smallest number of GPUs, whole nodes above one, on which a layout fits; the fastest there."""
        space = self._space
        node, most = space.base.hardware.gpus_per_node, space.gpus
        counts = [*(count for count in range(1, min(node, most) + 1)), *range(2 * node, most + 1, node)]
        if counts[-1] != most:
            counts.append(most)
        search: Search | None = None
        for at, count in enumerate(counts):
            self.report("numbers of GPUs", at, len(counts))
            base = space.base.model_copy(update={"hardware": space.base.hardware.model_copy(update={"gpus": count})})
            try:
                smaller = space_of(base, space.resolved, self.fixed, count)
            except PlanError:
                continue
            if not _has_points(smaller):
                continue
            search = self._search_of(smaller)
            best = self._fastest(search, top, within)
            if best:
                return search, best
        return search or self._search_of(space), []


def _with_reserve(base: Plan) -> Plan:
    """``base`` with the default reserve as its headroom, where it says none."""
    if "headroom" in base.model_fields_set or base.hardware.gpu is None:
        return base
    capacity = filled(base).hardware.capacity
    return base if capacity is None else base.model_copy(update={"headroom": default_reserve(capacity)})


def _without_extras(base: Plan, fixed: Mapping[str, object]) -> Plan:
    """``base`` without what a search adds to layouts by itself, where that is not ``fixed``: from there it starts."""
    for back in framework(base.framework).search.without_extras(base):
        base = base if back.keys() & fixed.keys() else changed(base, back)
    return base


def _limits(plan: ResolvedPlan, known: Measured) -> tuple[int, int, int]:
    """Bytes of a GPU: its capacity, the limit (capacity less headroom), and the CUDA context within it."""
    capacity, gpu = plan.hardware.capacity, plan.hardware.gpu
    if capacity is None or gpu is None:
        raise PlanError("hardware.gpu", ABSENT, "is missing: a search needs the GPU's memory and speed")
    if plan.compile:
        raise plan.wrong(
            "compile",
            "must be false in a search: a compiled model is learnt at the sizes of one plan (memplan estimate)",
        )
    return capacity, capacity - headroom_bytes(plan.headroom, capacity), least_context(plan, known)


def _given(stated: Plan, known: Measured, space: Space) -> tuple[Suggestion | None, PlanError | None]:
    """The plan as it was given, with the extras that it has of those of ``space``, or why it does not run; neither
    where it says no layout."""
    if not _is_stated(stated):
        return None, None
    try:
        given = measured(stated, known)
    except PlanError as error:
        return None, error

    def fields(extras: Sequence[Extra]) -> list[tuple[str, object]]:
        return [field for extra in extras for field in extra.fields]

    had = [one for one in space.extras if all(stated.at(path) == value for path, value in fields(one))]
    point = given.point._replace(extras=max(had, key=lambda one: len(fields(one)), default=()))
    return replace(given, point=point), None


def _is_stated(base: Plan) -> bool:
    """Whether the plan says how it is laid out, so that there is something to compare with."""
    return bool(base.layout.model_fields_set) or "dp" not in framework(base.framework).supports.sizes


EQUALLY_FAST = 0.05
"""A part of a step's time that the time model does not tell apart, where its published median error is not less."""

TRIED = 3
"""Layouts with most room, or of those that need least, that are replayed until one needs no retry."""


def _roomiest_first(search: Search, best: list[Suggestion], within: float, gain: int) -> list[Suggestion]:
    """``best``, fastest first, with the one in front that leaves most room of all that are as fast as the fastest and
    keep as much on the GPU: of those that leave as much but for less than ``gain`` bytes the fastest. Of that one
    every stage is replayed; the fullest stage and those at the ends rule others out, and are enough of the fastest
    where that one needs less than they do."""
    if not best:
        return best
    best = [*best]
    longest = best[0].seconds * (1 + within)

    def is_worth(one: Suggestion) -> bool:
        if not one.is_safe or one.judged.retries > best[0].judged.retries:
            return False
        if one.needs > best[0].needs - gain:  # a stage between its ends may need more
            best[0] = search.estimated(best[0])
        return one.needs <= best[0].needs - gain

    for roomy in search.roomier(best[0], within, gain)[:TRIED]:
        ends = search.replayed_fullest(roomy)
        if is_worth(ends):
            whole = _with_more_room(search, ends, best, longest, gain)
            whole = search.estimated(roomy) if whole is ends else whole
            if is_worth(whole):
                break
    else:
        whole = best[0] = search.estimated(best[0])
    whole = _with_more_room(search, whole, best, longest, gain)
    return [whole, *(one for one in best if not (one.point == whole.point and one.cut == whole.cut))]


def _first(best: list[Suggestion], top: int) -> list[Suggestion]:
    """The ``top`` of ``best``, of which the last stays where it is faster but for retries: no other says so."""
    if 1 < top < len(best) and best[-1].judged.retries and not best[0].judged.retries:
        return [*best[: top - 1], best[-1]]
    return best[:top]


def _with_more_room(
    search: Search, whole: Suggestion, best: Sequence[Suggestion], longest: float, gain: int
) -> Suggestion:
    """``whole``, or one of ``best`` that is as fast, keeps as much on the GPU as the fastest and takes less of the
    device, by ``gain`` bytes at least: what the allocator and NCCL add can be the other way round than what tensors
    request."""
    others = [
        one
        for one in best
        if one.seconds <= longest
        and one.needs <= whole.needs - gain
        and one.device is not None
        and (one.is_safe, one.judged.retries) == (True, whole.judged.retries)
        and alike(one.point, best[0].point)
    ]
    roomy = search.estimated(min(others, key=lambda one: one.needs)) if others else whole
    return roomy if roomy.is_safe and roomy.needs <= whole.needs - gain else whole


def _front(search: Search, best: list[Suggestion]) -> list[Suggestion]:
    """Slower layouts than the recommended one that need less, and in front of both the fastest."""
    alike = [one for one in best if one.point.keeps_numerics == best[0].point.keeps_numerics]
    fastest = min(alike, key=lambda one: (one.judged.retries > 0, one.seconds))
    faster = [fastest] if fastest.seconds < best[0].seconds and fastest.requested > best[0].requested else []
    return [*faster, *search.front(best[0], STEPS, POINTS - len(faster))]


def _smallest(search: Search, top: int) -> list[Suggestion]:
    """The layout that needs least of those that fit, and the fastest ones beside it. Layouts with other numbers come
    last."""
    whole = _that_fits(search, numerics=True) or _that_fits(search, numerics=False)
    if whole is None:
        return []
    others = [one for one in search.fastest(top) if one.point != whole.point] if top > 1 else []
    return [whole, *others[: top - 1]]


def _that_fits(search: Search, *, numerics: bool) -> Suggestion | None:
    """What needs least without a retry, else with some: what requests least need not fit, as a checkpoint may need more
    than an iteration, and the allocator more than tensors."""
    retrying = None
    for one in _from_the_smallest(search, numerics):
        if one.is_safe and not one.judged.retries:
            return one
        retrying = retrying or (one if one.is_safe else None)
    return retrying


def _from_the_smallest(search: Search, numerics: bool) -> Iterator[Suggestion]:
    """Layouts whose tensors fit and whose checkpoint may, from what requests least on."""
    but = {one.point for one in search.candidates if search.needs.saved(one.point) > search.requestable}
    for _ in range(TRIED):
        least = search.smallest(numerics=numerics, but=but)
        if least is None or least.requested > search.requestable:
            return
        yield search.estimated(least)
        but.add(least.point)


# -- what leaves no layout ---------------------------------------------------------------------------------


def _space(base: Plan, resolved: ResolvedPlan, fixed: Mapping[str, object]) -> Space:
    """The space, which has a point; ``PlanError`` that names what contradicts itself elsewhere."""
    gpus = resolved.hardware.gpus
    try:
        space = space_of(base, resolved, fixed)
    except PlanError as error:
        near = nearest_counts(base, resolved, fixed, gpus)
        if not near:
            raise
        raise PlanError(
            error.field, error.value, f"leaves no layout of {gpus:,} GPUs{_work(near)}", origin=error.origin
        ) from None
    if _has_points(space):
        return space
    for number in (1, 2, 3):
        for paths in combinations(sorted(fixed), number):
            if not _has_points_with(base, resolved, {path: fixed[path] for path in paths}):
                raise _contradiction(space, fixed, paths)
    near = nearest_counts(base, resolved, fixed, gpus)
    raise resolved.wrong("hardware.gpus", f"has no layout: {_why(space)}{_work(near)}")


def _work(near: Sequence[int]) -> str:
    """Numbers of GPUs that have a layout."""
    return f"; {' and '.join(f'{count:,}' for count in near)} GPUs work" if near else ""


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
        return wrong_at("--fix", f"{together} contradict each other on {space.gpus:,} GPUs: {_why(space)}")
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


__all__ = ["Objective", "Sought", "suggest"]
