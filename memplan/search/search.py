"""The search itself: layouts in the order of their time, each built only when nothing faster fits.

Time costs microseconds to know, memory milliseconds (tapes are folded) and the allocator's answer a tenth of a
second (they are replayed). So every point of the space gets its time and a bound from below of its memory
(``bounds``), and then the points are taken fastest first: one whose bound is too much is passed over, the others are
folded, and the first that fits also in the allocator's replay is the answer, because every layout that was not looked
at is slower. A layout that does not fit with its fastest cut comes back with the fastest cut that does, or with as few
recomputed layers as make it fit, at its later time. Nothing of this is a heuristic: the answer is that of evaluating all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from ..estimate import estimate, fold
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.resolve import resolve
from .bounds import LayerNeeds, States, at_best, at_least, layer_needs, loads, scaled, states
from .clock import Clock
from .cuts import Works, fields_of, fitting, smallest
from .result import Counts, Suggestion
from .space import NO_RECOMPUTE, Point, Recomputing, Space

Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""

CUT = ("megatron", "megatron-deepspeed")
"""Frameworks whose cut into stages is chosen, and whose memory has a bound from below."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point with a cut, before anything is built."""

    seconds: float
    floor: int
    """Bytes that the fullest stage needs at least."""
    point: Point
    works: Works
    fitted: bool = False
    """Its cut, or the number of its recomputed layers, was chosen to fit."""

    @property
    def order(self) -> tuple[object, ...]:
        """Fastest first, what keeps the numbers of training before what does not; of equals the one that needs less,
        then the one with the smaller sizes."""
        return (not self.point.keeps_numerics, self.seconds, self.floor, self.point.order, self.works)


class Search:
    """One search through ``space``; ``limit`` is what a GPU may need in bytes, ``beyond`` what of it is no tensor."""

    def __init__(self, space: Space, clock: Clock, limit: int, beyond: int, report: Report) -> None:
        self.space, self.clock, self.limit, self.report = space, clock, limit, report
        self.requestable = limit - beyond
        self.is_cut = space.base.framework in CUT
        self.refused: Counter[str] = Counter()
        self.considered = self.too_large = self.replayed = 0
        self._layers: dict[object, LayerNeeds] = {}
        self._states: dict[object, States] = {}
        self._folded: dict[tuple[Point, Works], Suggestion | None] = {}
        self._estimated: dict[tuple[Point, Works], Suggestion] = {}
        self.candidates = sorted(self._candidates(), key=lambda one: one.order)

    # -- every point: its time, and a bound of its memory -------------------------------------------------

    def _candidates(self) -> Iterator[Candidate]:
        """All but those that a bound leaves out, which are counted.

        What a layer saves grows with the micro-batch: once one is too large in whatever states, larger ones are.
        """
        space = self.space
        for tp, cp, pp, vpp, dp, sizes in space.layouts():
            combined = space.states(dp * cp)
            for recompute in space.recompute:
                for at, mbs in enumerate(sizes):
                    any_fits = False
                    for zero, extras in combined:
                        point = Point(tp, cp, pp, vpp, dp, zero, mbs, recompute, extras)
                        self.considered += 1
                        candidate = self._candidate(point)
                        if candidate is not None:
                            any_fits |= candidate.floor <= self.requestable
                            yield candidate
                    if not any_fits and self.is_cut:
                        self.considered += (len(sizes) - at - 1) * len(combined)
                        self.too_large += (len(sizes) - at - 1) * len(combined)
                        break
        self.refused.update(space.refused)

    def _candidate(self, point: Point) -> Candidate | None:
        try:
            works, seconds = self.clock.fastest(point)
            return Candidate(seconds, self._floor(point, works), point, works)
        except PlanError as error:
            self.refused[without_values(error)] += 1
            return None

    def _floor(self, point: Point, works: Works) -> int:
        if not self.is_cut:
            return 0
        load = loads(works, self.space.microbatches(point))
        return at_least(self._needs(point), self._kept(point), point.dp * point.cp, load)

    def _needs(self, point: Point) -> LayerNeeds:
        key = (point.tp, point.cp, point.recompute.mode)
        if key not in self._layers:
            self._layers[key] = layer_needs(self.space.alone(point._replace(mbs=1, zero=0, extras=())))
        return scaled(self._layers[key], point.mbs)

    def _kept(self, point: Point) -> States:
        key = (point.zero, point.extras)
        if key not in self._states:
            self._states[key] = states(self.space.alone(point._replace(mbs=1)))
        return self._states[key]

    # -- memory --------------------------------------------------------------------------------------------

    def folded(self, candidate: Candidate) -> Suggestion | None:
        """What the fullest stage requests, to the byte; ``None`` where the framework or its model refuses the plan."""
        key = (candidate.point, candidate.works)
        if key not in self._folded:
            plan = self._plan(candidate)
            try:
                requested = max(stage.peak for stage in fold(resolve(plan)))
                self._folded[key] = Suggestion(*key, plan, requested, candidate.seconds)
            except PlanError as error:
                self.refused[without_values(error)] += 1
                self._folded[key] = None
        return self._folded[key]

    def _plan(self, candidate: Candidate) -> Plan:
        """As a user would write it, defaults left out."""
        return self.space.plan(candidate.point, dict(fields_of(self.space.base.framework, candidate.works)))

    def estimated(self, suggestion: Suggestion) -> Suggestion:
        """With the allocator's replay, and the parts of its time."""
        key = (suggestion.point, suggestion.works)
        if key not in self._estimated:
            self.replayed += 1
            whole, step = estimate(suggestion.plan), self.clock.step(resolve(suggestion.plan))
            self._estimated[key] = replace(suggestion, estimate=whole, step=step)
        return self._estimated[key]

    def fits(self, suggestion: Suggestion) -> bool:
        """By the furthest reading that is known."""
        whole = self.estimated(suggestion).estimate
        assert whole is not None
        return whole.peak <= self.limit

    # -- fastest first -------------------------------------------------------------------------------------

    def fastest(self, wanted: int) -> list[Suggestion]:
        """The ``wanted`` fastest layouts that fit, one of each kind (those that differ in their cut alone are one)."""
        found: dict[object, Suggestion] = {}
        order = count()
        waiting = [(one.order, next(order), one) for one in self.candidates]
        too_small: dict[object, int] = {}
        taken = 0
        while waiting and len(found) < wanted:
            _, _, candidate = heapq.heappop(waiting)
            taken += 1
            self.report("layouts, fastest first", taken, len(self.candidates))
            kind = _kind(candidate.point)
            if kind in found:
                continue
            if candidate.floor <= self.requestable and not self._grows_beyond(candidate, too_small):
                suggestion = self.folded(candidate)
                if suggestion is None:
                    continue
                if suggestion.requested <= self.requestable and self.fits(suggestion):
                    found[kind] = self.estimated(suggestion)
                    continue
                too_small[_chain(candidate.point)] = candidate.point.mbs
            if not candidate.fitted:
                for later in self._fitted(candidate):
                    heapq.heappush(waiting, (later.order, next(order), later))
        return list(found.values())

    def _grows_beyond(self, candidate: Candidate, too_small: dict[object, int]) -> bool:
        """Whether the same layout has been too large with a smaller micro-batch."""
        known = too_small.get(_chain(candidate.point))
        return not self.is_cut and known is not None and known <= candidate.point.mbs

    def _fitted(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same layout cut, or recomputed, such that what its tensors request fits."""
        point = candidate.point
        if not self.is_cut or self.space.cut is not None:
            return
        if point.pp > 1 and self._at_best(point) <= self.requestable:
            plan = resolve(self._plan(candidate))
            works = fitting(plan, self.clock.ratios(point), self.requestable)
            if works is not None and works != candidate.works:
                yield replace(candidate, seconds=self.clock.seconds(point, works), works=works, fitted=True)
        if point.recompute == NO_RECOMPUTE and Recomputing("full") in self.space.recompute:
            yield from self._recomputed(candidate)

    def _at_best(self, point: Point) -> float:
        if point.vpp > 1:
            return 0.0
        shards, count = point.dp * point.cp, self.space.microbatches(point)
        layers = self.space.base.model.layers
        return at_best(self._needs(point), self._kept(point), shards, layers, point.pp, count)

    def _recomputed(self, candidate: Candidate) -> Iterator[Candidate]:
        """Full recompute on the fewest layers of every stage (of every chunk) that make it fit."""
        most = max(work.layers for stage in candidate.works for work in stage)

        def on(layers: int) -> Candidate:
            point = candidate.point._replace(recompute=Recomputing("full", "block", layers))
            return replace(candidate, seconds=self.clock.seconds(point, candidate.works), point=point, fitted=True)

        def holds(layers: int) -> bool:
            suggestion = self.folded(on(layers))
            return suggestion is not None and suggestion.requested <= self.requestable

        whole = candidate.point._replace(recompute=Recomputing("full"))
        if most < 2 or self._floor(whole, candidate.works) > self.requestable:
            return
        low, high = 1, most
        if not holds(most):
            return
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        yield on(low)

    # -- memory against time -------------------------------------------------------------------------------

    def front(self, steps: float, known: list[Suggestion]) -> list[Suggestion]:
        """Layouts that fit such that no other takes as little time and ``steps`` (a part of it) less memory."""
        front: list[Suggestion] = []
        for at, candidate in enumerate(sorted(self.candidates, key=lambda one: (one.seconds, one.order))):
            self.report("memory against time", at, len(self.candidates))
            least = front[-1].requested * (1 - steps) if front else self.requestable
            if candidate.floor > least or not candidate.point.keeps_numerics:
                continue
            suggestion = self.folded(candidate)
            if suggestion is not None and suggestion.requested <= least:
                front.append(suggestion)
        return front

    def smallest(self) -> Suggestion | None:
        """The layout whose fullest stage requests least; of several the fastest."""
        best: Suggestion | None = None
        for candidate in sorted(self.candidates, key=lambda one: (one.floor, one.order)):
            if best is not None and candidate.floor >= best.requested:
                continue
            for one in (candidate, *self._smallest_cut(candidate, best)):
                suggestion = self.folded(one)
                if suggestion is None:
                    continue
                key = (suggestion.requested, suggestion.seconds)
                if best is None or key < (best.requested, best.seconds):
                    best = suggestion
        return best

    def _smallest_cut(self, candidate: Candidate, best: Suggestion | None) -> Iterator[Candidate]:
        point = candidate.point
        if not self.is_cut or point.pp == 1 or self.space.cut is not None:
            return
        if best is not None and self._at_best(point) >= best.requested:
            return
        works = smallest(resolve(self._plan(candidate)), self.clock.ratios(point))
        if works is not None:
            yield replace(candidate, seconds=self.clock.seconds(point, works), works=works, fitted=True)

    def counts(self) -> Counts:
        folded = sum(one is not None for one in self._folded.values())
        too_large = self.too_large + sum(one.floor > self.requestable for one in self.candidates)
        slower = max(0, self.considered - too_large - folded)
        return Counts(self.considered, dict(self.refused), too_large, slower, folded, self.replayed)


def _kind(point: Point) -> object:
    """What two suggestions differ in, so that a person would call them different."""
    return point._replace(recompute=Recomputing(point.recompute.mode))


def _chain(point: Point) -> object:
    return point._replace(mbs=0)


def without_values(error: PlanError) -> str:
    """An error's field and rule, so that equal ones are counted together."""
    return f"{error.field}: {error.problem}"
