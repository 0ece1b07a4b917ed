"""Every point of a space with its fastest cut, a bound from below of its time, and one of its memory.

Points that differ only in what is kept (ZeRO stage, optimizer states) share cut and time. Micro-batches are taken from
small to large: what a layer saves grows with them, so that once a layout's tensors are too large in whatever states
and cut, so are those of larger ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ..plan.errors import PlanError
from .bounds import LayerNeeds, Load, States, at_best, at_least, layer_needs, loads, scaled, states
from .clock import Clock
from .cuts import CUT
from .floors import Floors
from .point import Extra, Point, Recomputing
from .space import Space
from .works import Works


class Candidate(NamedTuple):
    """A point with a cut, before anything is built."""

    seconds: float
    floor: int
    """Bytes that the fullest stage needs at least."""
    point: Point
    works: Works
    timed: bool = False
    """``seconds`` is the whole step, not only its passes."""
    fitted: bool = False
    """Its cut, or the number of its recomputed layers, was chosen to fit."""
    to_fit: int = 0
    """Bytes that its tensors may request once that has been chosen; until then its time is a bound from below."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Fastest first, what keeps the numbers of training before what does not."""
        return not self.point.keeps_numerics, self.seconds

    @property
    def order(self) -> tuple[object, ...]:
        """By ``rank``; of equals the one that needs less, then the one with the smaller sizes."""
        return (*self.rank, self.floor, self.point.order, self.works)


class Needs:
    """What the points of one space need at least, in bytes of the fullest stage."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.is_cut = space.base.framework in CUT
        self._layers: dict[object, LayerNeeds] = {}
        self._states: dict[object, States] = {}
        self._floors = Floors(space)

    def floor(self, point: Point, works: Works) -> int:
        """Of ``point`` with the cut ``works``."""
        if not self.is_cut:
            return self._floors(point)
        load = loads(works, self.space.microbatches(point))
        return at_least(self._layer(point), self._kept(point), point.dp * point.cp, load)

    def load(self, point: Point) -> Load:
        """What decides them, whatever the cut."""
        shards, microbatches = point.dp * point.cp, self.space.microbatches(point)
        return Load(self._layer(point), self._kept(point), shards, point.pp, point.vpp, microbatches)

    def at_best(self, point: Point) -> float:
        """Of whatever cut."""
        return at_best(self.load(point), self.space.base.model.layers)

    def _layer(self, point: Point) -> LayerNeeds:
        key = (point.tp, point.cp, point.recompute.mode, point.mbs)
        known = self._layers.get(key)
        if known is None:
            one = (*key[:3], 0)
            if one not in self._layers:
                alone = self.space.alone(point._replace(mbs=1, zero=self.space.least_zero, extras=()))
                self._layers[one] = layer_needs(alone)
            known = self._layers[key] = scaled(self._layers[one], point.mbs)
        return known

    def _kept(self, point: Point) -> States:
        key = (point.zero, point.extras)
        if key not in self._states:
            self._states[key] = states(self.space.alone(point._replace(mbs=1)))
        return self._states[key]


Kept = tuple[int, tuple[Extra, ...]]
"""ZeRO stage, and what goes with it."""


class Candidates:
    """Those of one space. ``requestable`` bytes are what tensors may take."""

    def __init__(self, space: Space, clock: Clock, needs: Needs, requestable: int) -> None:
        self.space, self.clock, self.needs, self.requestable = space, clock, needs, requestable
        self.considered = self.too_large = 0
        """Points; and those of them that need no candidate, because smaller micro-batches are too large."""
        self.refused: Counter[str] = Counter()
        """Points that are left out, by the rule."""
        self._grouped: dict[tuple[int, bool], list[list[Kept]]] = {}

    def __iter__(self) -> Iterator[Candidate]:
        for tp, cp, pp, vpp, dp, sizes in self.space.layouts(self.refused):
            layout = tp, cp, pp, vpp, dp
            for recompute in self.space.recompute:
                yield from self._chain(layout, sizes, recompute)

    def _chain(
        self, layout: tuple[int, int, int, int, int], sizes: Sequence[int], recompute: Recomputing
    ) -> Iterator[Candidate]:
        """tp, cp, pp, vpp and dp of ``layout`` with every micro-batch, and everything beside that."""
        _, cp, pp, _, dp = layout
        groups = self._groups(dp * cp, pp)
        many = sum(map(len, groups))
        refused = self.refused.total()
        for at, mbs in enumerate(sizes):
            alike = [[Point(*layout, zero, mbs, recompute, extras) for zero, extras in group] for group in groups]
            surely = at > 0 and refused == self.refused.total() and self.space.cut is None
            if surely and not self._could_fit(list(chain.from_iterable(alike))):
                self._leave_out((len(sizes) - at) * many)
                return
            self.considered += many
            found = list(chain.from_iterable(map(self._alike, alike)))
            yield from found
            too_large = all(one.floor > self.requestable for one in found)
            if self.needs.is_cut and too_large and not self._could_fit([one.point for one in found]):
                self._leave_out((len(sizes) - at - 1) * many)
                return

    def _leave_out(self, points: int) -> None:
        self.considered += points
        self.too_large += points

    def _groups(self, shards: int, pp: int) -> list[list[Kept]]:
        """What there is beside passes and schedule on so many replicas, by what takes the same time."""
        key = (shards, pp == 1)
        known = self._grouped.get(key)
        if known is None:
            groups: dict[object, list[Kept]] = {}
            for zero, extras in self.space.states(shards, pp):
                passes = tuple(extra for extra in extras if extra.changes_passes)
                groups.setdefault(passes if self.needs.is_cut else (zero, extras), []).append((zero, extras))
            known = self._grouped[key] = list(groups.values())
        return known

    def _alike(self, points: Sequence[Point]) -> Iterator[Candidate]:
        """``points`` that take the same time."""
        try:
            works, seconds = self.clock.fastest(points[0])
        except PlanError as error:
            self._refuse(error, len(points))
            return
        for point in points:
            candidate = self._bounded(point, works, seconds)
            if candidate is not None:
                yield candidate

    def _bounded(self, point: Point, works: Works, seconds: float) -> Candidate | None:
        try:
            return Candidate(seconds, self.needs.floor(point, works), point, works)
        except PlanError as error:
            self._refuse(error, 1)
            return None

    def _refuse(self, error: PlanError, points: int) -> None:
        self.refused[without_values(error)] += points
        self.considered -= points

    def _could_fit(self, points: Sequence[Point]) -> bool:
        """One of ``points``, which differ in what is kept alone, in some cut, for all that its bound says."""
        if not self.needs.is_cut:
            return True
        if self.space.cut is not None:
            return False
        least = min(points, key=lambda point: self.needs.load(point).states, default=None)
        return least is not None and self.needs.at_best(least) <= self.requestable


def recomputing(candidate: Candidate, layers: int) -> Candidate:
    """The same with full recompute of so many layers of every chunk."""
    return candidate._replace(point=candidate.point._replace(recompute=Recomputing("full", "block", layers)))


def without_values(error: PlanError) -> str:
    """An error's field and rule, so that equal ones are counted together."""
    return f"{error.field}: {error.problem}"
