"""The search itself: layouts in the order of their time, each built only when nothing faster fits.

Time costs microseconds to know, memory milliseconds (tapes are folded) and the allocator's answer a tenth of a second
(they are replayed). So every point of the space gets its time and a bound from below of its memory (``lower_bounds``),
and then the points are taken fastest first: one whose bound is too much is passed over, the others are folded, and the
first that fits also in the allocator's replay is the answer, because every layout that was not looked at is slower. A
layout that does not fit with its fastest cut comes back with the fastest cut that does, or with as few recomputed
layers as make it fit, at its later time. The answer is that of evaluating every point with every cut, as far as tensors
go (``tests/search/test_search.py``). Two things are rules rather than optima: the best cut is the one whose slowest
stage takes least, chunks of a stage differing by one layer at most and none empty; and a layout whose tensors fit but
not what lies outside PyTorch, or not its blocks, is cut or recomputed once more for each, against a limit that is lower
by what these took more.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from math import inf

from ..device.measured import NOTHING, Measured, causes, outside_range
from ..estimate import estimate, judged_ends
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.resolve import resolve
from ..values import replace
from ..verdict import Replays
from .candidates import Candidate, Candidates, Clock, Group, raise_for_all, recomputing, without_values
from .cuts import StageLayers, capped, fields_of, fitting, smallest
from .lower_bounds import Needs, fewest_recomputed
from .point import NO_RECOMPUTE, Point, Recomputing
from .result import Counts, Suggestion
from .space import Space
from .time import ranking_seconds, ranking_time

Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""


_Entry = tuple[bool, float, int, Candidate | Group]
"""``Candidate.rank``, the place among all points, and what has it: a group without cuts, or a candidate."""


OFTEN = 3
"""How often a layout is made to fit: its tensors, with what lies outside PyTorch, with what its blocks take more."""
TOLD = 512
"""Groups of layouts after which it is reported how many have their bounds."""


class Search:
    """One search through ``space``; ``limit`` is what a GPU may need in bytes, ``beyond`` what of it is no tensor,
    ``known`` what was measured on the user's own GPUs."""

    def __init__(
        self, space: Space, clock: Clock, limit: int, beyond: int, report: Report, known: Measured = NOTHING
    ) -> None:
        self.space, self.clock, self.limit, self.report, self.known = space, clock, limit, report, known
        self.beyond, self.requestable = beyond, limit - beyond
        self.asked = space.search
        self.needs = Needs(space, self.requestable)
        self._replayed: set[Point] = set()
        self._wholes: dict[tuple[Point, StageLayers], Suggestion] = {}
        self._fullest: dict[tuple[Point, StageLayers], Suggestion] = {}
        """What went through the allocator: of every stage, and of the fullest alone."""
        self._replays = Replays()
        self._folded: dict[tuple[Point, StageLayers], Suggestion | None] = {}
        self.passed_over: dict[tuple[Point, StageLayers], Suggestion] = {}
        """What was folded until it was known to be too much: its fullest stage requests so many bytes at least."""
        self._left_out: set[Point] = set()
        """Of layouts that were to be folded, those of which a bound was too much already."""
        self.unbuilt: dict[Point, str] = {}
        """What the framework or its model refused only when it was to be folded, and why."""
        self._waiting: list[Candidate] = []
        self._too_large_from: dict[Point, int] = {}
        """The smallest micro-batch with which a layout's tensors were too much."""
        self._rooms: dict[Point, int] = {}
        """What ``_room`` has found, whatever is recomputed."""
        self._points = Candidates(space, clock, self.needs, self.requestable)
        self._groups = list[Group]()
        for group in self._points:
            self._groups.append(group)
            if not len(self._groups) % TOLD:
                self.report("layouts bounded from below", group.place, 0)
        self._cut: dict[int, tuple[Candidate, ...]] = {}
        """What ``_with_cuts`` has found, by the group's place."""
        self._many = sum(len(group.candidates) for group in self._groups)
        self._ahead = [
            entry for group in self._groups if group.is_cut for entry in _entries(group.place, group.candidates)
        ]
        self._ahead += [
            (*rank, group.place, group) for group in self._groups if not group.is_cut for rank in group.ranks
        ]
        self._ahead.sort()

    @property
    def candidates(self) -> list[Candidate]:
        """All of them, with their cuts."""
        return [one for group in self._groups for one in self._with_cuts(group)]

    def _with_cuts(self, group: Group) -> tuple[Candidate, ...]:
        if group.is_cut:
            return group.candidates
        if group.place not in self._cut:
            self._cut[group.place] = tuple(self._points.cut([one.point for one in group.candidates]))
        return self._cut[group.place]

    # -- memory --------------------------------------------------------------------------------------------

    def folded(self, candidate: Candidate, enough: int | None = None) -> Suggestion | None:
        """What the fullest stage requests, to the byte, or that it is more than ``enough``; ``None`` where the
        framework or its model refuses the plan, or a bound of one of its stages is more than that."""
        key = (candidate.point, candidate.cut)
        passed = self.passed_over.get(key)
        if passed is not None and enough is not None and passed.requested > enough:
            return passed
        if key not in self._folded:
            if enough is not None and self.asked.chooses_cut and not self._may_keep_to(candidate, enough):
                self._left_out.add(candidate.point)
                return None
            try:
                placed = self._placed(candidate if candidate.seconds < inf else self._timed(candidate))
                plan = self._plan(placed)
                resolved = resolve(plan)
                requested, stage = self.asked.fullest(resolved, enough)
                suggestion = Suggestion(placed.point, placed.cut, plan, requested, stage, placed.seconds)
                if self.asked.stops_early and enough is not None and requested > enough:
                    self.passed_over[key] = suggestion
                    return suggestion
                self._folded[key] = suggestion
            except PlanError as error:
                raise_for_all(error)
                self.unbuilt[candidate.point] = without_values(error)
                self._folded[key] = None
        known = self._folded[key]
        if known is None or not candidate.timed or not self.asked.chooses_cut:
            return known
        return replace(known, seconds=candidate.seconds)

    def _may_keep_to(self, candidate: Candidate, limit: int) -> bool:
        """Whether every stage may request ``limit`` bytes at most, for all that bounds say."""
        return all(map(self.needs.keeping(candidate.point, limit), count(), candidate.cut))

    def _placed(self, candidate: Candidate) -> Candidate:
        """Where every cut takes the same time, layers are placed by memory."""
        cut = self.asked.placed(self.space, candidate.point) if self.space.cut is None else None
        if cut is None:
            return candidate
        plan = self._plan(candidate._replace(cut=cut))
        return candidate._replace(cut=cut, seconds=ranking_seconds(resolve(plan)))

    def _plan(self, candidate: Candidate) -> Plan:
        """As a user would write it, defaults left out."""
        chosen = self.space.cut is None
        fields = fields_of(self.space.base.framework, candidate.cut) if chosen else ()
        return self.space.plan(candidate.point, dict(fields))

    def estimated(self, suggestion: Suggestion) -> Suggestion:
        """With the allocator's replay of every stage, and the parts of its time."""
        self._replayed.add(suggestion.point)
        key = (suggestion.point, suggestion.cut)
        if key not in self._wholes:
            whole = estimate(suggestion.plan, self.known, replays=replace(self._replays, plan=key))
            step = ranking_time(resolve(suggestion.plan))
            suggestion = replace(suggestion, estimate=whole, device=whole.peak, step=step, seconds=step.total)
            self._wholes[key] = suggestion
        return self._wholes[key]

    def replayed_fullest(self, suggestion: Suggestion, *, tells_retries: bool = True) -> Suggestion:
        """With the replay of the fullest stage and, if that fits, of those at the ends; of every stage, where a search
        folds all of them. Without ``tells_retries`` what fits with retries alone may count as what does not fit, which
        takes a part of the time."""
        key = suggestion.point, suggestion.cut
        by_ends = self.asked.chooses_cut or self.asked.stops_early
        if not by_ends and (tells_retries or self._is_whole(suggestion)):
            return self.estimated(suggestion)
        self._replayed.add(suggestion.point)
        if key not in self._fullest:
            plan = resolve(suggestion.plan)
            step = ranking_time(plan)
            replays = replace(self._replays, plan=key)
            telling = {"tells_retries": tells_retries, "tells_most": False}
            found = judged_ends(plan, suggestion.fullest, self.known, replays, **telling)
            replayed = replace(suggestion.replayed(found), step=step, seconds=step.total)
            if not (tells_retries or _is_steady(replayed)):
                return replayed
            if not by_ends:
                return self.estimated(suggestion)
            self._fullest[key] = replayed
        return self._fullest[key]

    # -- fastest first -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Counts anew; what was computed stays."""
        self._replayed.clear()
        self._too_large_from.clear()

    def fastest(self, wanted: int, within: float = inf) -> list[Suggestion]:
        """The ``wanted`` fastest layouts that fit, one of each kind, which take longer than the first of them by no
        more than the part ``within``. The fullest stage of each is replayed, and its ends; of the first, stages between
        them count once they are (``estimated``), which they have to be before it is recommended. The fastest of all
        comes last where the allocator has to give memory back for it, and first where nothing else fits."""
        found: dict[object, Suggestion] = {}
        retrying: Suggestion | None = None
        latest = inf
        for candidate in self._by_time(lambda one: _kind(one.point) not in found):
            if candidate.seconds > latest:
                break
            room = self._room(candidate)
            suggestion = self._requestable(candidate, room)
            outside = 0 if suggestion is None else self._most_outside(suggestion)
            if suggestion is not None and suggestion.requested + outside > self.limit:
                room = self.limit - outside
            elif suggestion is not None:
                replayed = self.replayed_fullest(suggestion, tells_retries=not found and retrying is None)
                if not found and replayed.fits and (self._is_whole(suggestion) or not _is_steady(replayed)):
                    replayed = self.estimated(suggestion)
                if replayed.fits and _is_steady(replayed):
                    latest = min(latest, replayed.seconds * (1 + within))
                    found[_kind(candidate.point)] = replayed
                    if len(found) == wanted:
                        break
                    continue
                if replayed.is_safe and retrying is None and not found:
                    retrying = replayed
                less = max(1, replayed.reading - self.limit)  # it may fit but for retries
                room = min(room, suggestion.requested - less)
            self._waiting += self._fitted(candidate, room)
        if retrying is None or (wanted == 1 and found):
            return list(found.values())
        if not found:
            return [self.estimated(retrying)]
        return [*list(found.values())[: wanted - 1], retrying]

    def _is_whole(self, suggestion: Suggestion) -> bool:
        """Every stage has been replayed."""
        return (suggestion.point, suggestion.cut) in self._wholes

    def is_refuted(self, suggestion: Suggestion) -> bool:
        """Stages between its ends have been replayed since, and one of them does not fit, or not without a retry."""
        return _is_steady(suggestion) and self._is_whole(suggestion) and not _is_steady(self.estimated(suggestion))

    def _most_outside(self, suggestion: Suggestion) -> int:
        """Bytes that may lie outside PyTorch on the fullest stage: what fits, fits beside them."""
        return outside_range(causes(resolve(suggestion.plan), suggestion.fullest, self.known))[1]

    def roomier(self, fastest: Suggestion, within: float, gain: int) -> list[Suggestion]:
        """Layouts that take longer than ``fastest`` by no more than the part ``within``, train with the same numbers
        and keep as much on the GPU; each requests less than the ones before it, by ``gain`` bytes at least, and the
        last one that was found stands first."""
        found = [fastest]
        latest = fastest.seconds * (1 + within)

        def is_worth(candidate: Candidate) -> bool:
            return candidate.floor <= found[-1].requested - gain and alike(candidate.point, fastest.point)

        for candidate in self._by_time(is_worth, " for more room"):
            if candidate.seconds > latest:
                break
            most = found[-1].requested - gain
            suggestion = self.folded(candidate, most)
            if suggestion is not None and suggestion.requested <= most:
                found.append(suggestion)
        return found[:0:-1]

    def _by_time(self, is_worth: Callable[[Candidate], bool], why: str = "") -> Iterator[Candidate]:
        """Candidates in their order that are worth it, and of which a bound leaves room for a checkpoint, with the time
        of their whole step; what is put into ``_waiting`` meanwhile is among them. ``why``: what is reported of it."""
        order, taken = count(), 0
        ahead = self._ahead.copy()

        def may_fit(one: Candidate) -> bool:
            return is_worth(one) and self.needs.saved(one.point) <= self.requestable

        heap: list[tuple[tuple[object, ...], int, Candidate]] = []
        while True:
            for later in self._waiting:
                heapq.heappush(heap, (later.order, next(order), later))
            self._waiting.clear()
            if ahead and (not heap or ahead[0][:2] <= heap[0][0]):
                changes, _, _, candidate = heapq.heappop(ahead)
                if isinstance(candidate, Group):
                    group = candidate
                    if any(map(may_fit, group.candidates)):
                        for entry in _entries(group.place, self._with_cuts(group)):
                            if entry[0] == changes:
                                heapq.heappush(ahead, entry)
                    continue
            elif heap:
                _, _, candidate = heapq.heappop(heap)
            else:
                return
            if not may_fit(candidate):
                continue
            if candidate.to_fit:
                self._waiting += self._chosen(candidate)
            elif candidate.timed:
                taken += 1
                self.report(f"layouts tried{why} (at most {self._many:,})", taken, 0)
                yield candidate
            else:
                self._waiting.append(self._timed(candidate))

    def _room(self, candidate: Candidate) -> int:
        """Bytes that its tensors may request beside what lies outside PyTorch on the stage that has least of that.
        Stages between the ends differ in no more than one, which has a word table of its own."""
        key = candidate.point._replace(recompute=NO_RECOMPUTE)
        if key not in self._rooms:
            try:
                plan = resolve(self._plan(candidate))
            except PlanError:  # told where it is folded
                return self.requestable
            pp = plan.layout.pp
            stages = {*range(min(pp, 3)), pp - 1}
            least = min(outside_range(causes(plan, stage, self.known))[1] for stage in stages)
            self._rooms[key] = min(self.requestable, self.limit - least)
        return self._rooms[key]

    def _requestable(self, candidate: Candidate, room: int) -> Suggestion | None:
        """What it needs, if its tensors fit. A layout that was too large with a smaller micro-batch is not built, nor
        one whose floor is: once it was fitted, that is the floor of another cut, or of fewer recomputed layers."""
        chain, mbs = candidate.point._replace(mbs=0), candidate.point.mbs
        known = self._too_large_from.get(chain, mbs + 1)
        if (not candidate.fitted and candidate.floor > room) or (not self.asked.chooses_cut and known <= mbs):
            return None
        suggestion = self.folded(candidate, room)
        if suggestion is None or suggestion.requested <= room:
            return suggestion
        self._too_large_from[chain] = min(known, mbs)
        return None

    def _timed(self, candidate: Candidate, cut: StageLayers | None = None) -> Candidate:
        """With the seconds of its whole step, cut as ``cut`` says."""
        cut = candidate.cut if cut is None else self.space.placed(cut)
        return candidate._replace(seconds=self.clock.seconds(candidate.point, cut), cut=cut, timed=True)

    def _fitted(self, candidate: Candidate, limit: int) -> Iterator[Candidate]:
        """The same layout, to be cut or recomputed such that its tensors request ``limit`` bytes at most: not before
        nothing faster is left (``_chosen``), as that takes many folds."""
        point, fitted = candidate.point, candidate.fitted + 1
        if not self.asked.chooses_cut or fitted > OFTEN:
            return
        if point.recompute.method == "block" and fitted > 1:
            yield candidate._replace(fitted=fitted, to_fit=limit)
            return
        if self.space.cut is None and point.pp > 1 and self.needs.at_best(point) <= limit:
            layers, alone = self.space.base.model.layers, self.space.framework.supports.stages_without_layers
            sizes = point.pp, point.vpp, alone
            cut = capped(layers, sizes, self.clock.ratios(point), self.needs.keeping(point, limit))
            if cut is not None:
                yield self._timed(candidate, cut)._replace(fitted=fitted, to_fit=limit)
        whole = point._replace(recompute=Recomputing("full"))
        most = max(chunk.layers for stage in candidate.cut for chunk in stage)
        if fitted > 1 or point.recompute != NO_RECOMPUTE or whole.recompute not in self.space.recompute or most < 2:
            return
        if self.needs.floor(whole, candidate.cut) <= limit:
            fewest = fewest_recomputed(self.needs.load(point), self.needs.load(whole), candidate.cut, limit)
            yield self._timed(recomputing(candidate, fewest))._replace(fitted=fitted, to_fit=limit)

    def _chosen(self, candidate: Candidate) -> Iterator[Candidate]:
        """``candidate`` with the fastest cut that fits, or the fewest recomputed layers."""
        point, limit = candidate.point, candidate.to_fit
        done = candidate._replace(to_fit=0)
        if point.recompute.method == "block":
            yield from self._recomputed(done, limit)
            return
        holds = self.needs.keeping(point, limit)
        cut = fitting(resolve(self._plan(done)), self.clock.ratios(point), limit, holds)
        if cut is not None:
            yield self._timed(done, cut)

    def _recomputed(self, candidate: Candidate, limit: int) -> Iterator[Candidate]:
        """Full recompute on the fewest layers of every stage (of every chunk) that make it fit, from a number that is
        not more than that."""
        least = candidate.point.recompute.layers or 1
        most = max(chunk.layers for stage in candidate.cut for chunk in stage)

        def holds(layers: int) -> bool:
            suggestion = self.folded(recomputing(candidate, layers), limit)
            return suggestion is not None and suggestion.requested <= limit

        if holds(least):
            yield self._timed(candidate)
        elif least < most and holds(most):
            fewest = bisect_left(range(least + 1, most), True, key=holds) + least + 1
            yield self._timed(recomputing(candidate, fewest))

    # -- memory against time -------------------------------------------------------------------------------

    def front(self, best: Suggestion, steps: float, most: int) -> list[Suggestion]:
        """``best`` and slower layouts such that each requests less than the faster one before it, by ``steps`` (a part
        of that) at least; the first ``most``."""
        front = [best]

        def least() -> int:
            return int(front[-1].requested * (1 - steps))

        def is_worth(candidate: Candidate) -> bool:
            return candidate.floor <= least() and candidate.point.keeps_numerics >= best.point.keeps_numerics

        for candidate in self._by_time(is_worth, " for less memory"):
            suggestion = self.folded(candidate, least())
            if suggestion is not None and suggestion.requested <= least() and candidate.seconds >= best.seconds:
                front.append(replace(suggestion, seconds=candidate.seconds))
            if len(front) == most:
                break
        return front

    def smallest(self, *, numerics: bool = False, but: Collection[Point] = ()) -> Suggestion | None:
        """The layout whose fullest stage requests least; of several the fastest. ``numerics``: among those that keep
        the numbers of training. ``but``: not among these."""
        best: Suggestion | None = None
        kept = [one for one in self.candidates if one.point.keeps_numerics or not numerics]
        kept = [one for one in kept if one.point not in but]
        if not self.asked.chooses_cut:
            kept = [one._replace(floor=self.needs.floor(one.point, one.cut)) for one in kept]
        for at, candidate in enumerate(sorted(kept, key=lambda one: (one.floor, one.order))):
            if best is not None and candidate.floor >= best.requested:
                continue
            self.report(f"layouts tried for the least memory (at most {len(kept):,})", at, 0)
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
        if not self.asked.chooses_cut or point.pp == 1 or self.space.cut is not None:
            return
        if best is not None and self.needs.at_best(point) >= best.requested:
            return
        cut = smallest(resolve(self._plan(candidate)), self.clock.ratios(point))
        if cut is not None:
            yield self._timed(candidate, cut)._replace(fitted=OFTEN)

    def counts(self) -> Counts:
        """Every point has one fate; points of which several cuts were folded are counted once."""
        folded = {point for point, _ in (*self._folded, *self.passed_over)} | self._left_out
        sizes = {point[:SIZES] for point in (*folded, *self.unbuilt)}
        cut = [group for group in self._groups if group.is_cut or group.place in self._cut]
        own = [one for group in cut for one in self._with_cuts(group) if one.point[:SIZES] in sizes]
        refused = {one.point for one in own} & self.unbuilt.keys()
        built = [one for one in own if one.point in folded]
        considered = self._points.considered - len(refused)
        every = (one for group in self._groups for one in group.candidates)
        too_large = self._points.too_large + sum(map(self._is_too_large, every))
        too_large -= sum(self._is_too_large(one) for group in cut for one in group.candidates if one.point in folded)
        return Counts(
            considered=considered,
            refused=dict(self._points.refused + Counter(self.unbuilt.values())),
            too_large=too_large,
            slower=considered - too_large - len({one.point for one in built} - refused),
            folded=len({one.point for one in built} - refused),
            replayed=len(self._replayed),
        )

    def _is_too_large(self, candidate: Candidate) -> bool:
        """By a bound, in an iteration or while a checkpoint is saved."""
        return max(candidate.floor, self.needs.saved(candidate.point)) > self.requestable


def _entries(place: int, candidates: Sequence[Candidate]) -> Iterator[_Entry]:
    """``candidates``, the first of which stands at ``place``, to be sorted."""
    return ((*one.rank, place + at, one) for at, one in enumerate(candidates) if one.seconds < inf)


def _is_steady(suggestion: Suggestion) -> bool:
    """It fits without a retry, as far as is known."""
    return suggestion.is_safe and not suggestion.judged.retries


def alike(point: Point, other: Point) -> bool:
    """They train with the same numbers, and ``point`` keeps nothing off the GPU that ``other`` keeps there."""
    return point.keeps_numerics == other.keeps_numerics and point.moved <= other.moved


SIZES = 9
"""Fields of a point that are numbers, in front of the others."""


def _kind(point: Point) -> object:
    """What a person would call another layout: not another number of recomputed layers, of virtual
    stages, another cut or kernel of the loss."""
    extras = tuple(extra for extra in point.extras if not extra.keeps_numerics or extra.moves_states)
    return point._replace(recompute=Recomputing(point.recompute.mode), vpp=0, extras=extras)
