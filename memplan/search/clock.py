"""Seconds of a point's step, for many points: what is shared among them is computed once.

``fastest`` is a bound from below, the passes without what a step does once (gradients between replicas, the optimizer);
``seconds`` adds that, and is the total of ``timing.step_time`` for the same plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from ..plan.plan import Plan
from ..plan.resolve import resolve
from .cuts import CUT, Ratios, fastest, may_be_alone
from .point import Extra, Point, Recomputing
from .space import Space
from .timing import (
    EntryTimes,
    LayerTimes,
    Rates,
    Shape,
    StageWork,
    rates_of,
    shape_of,
    step_seconds,
    step_time,
    work_of,
)
from .timing.ends import send_time, times_of
from .timing.shape import overlapped_sends
from .timing.updates import Replicas, updates
from .works import Work, Works

Groups = tuple[tuple[int, tuple[StageWork, ...]], ...]
"""How many stages in a row have these chunks."""


class _Family(NamedTuple):
    """What points share that differ only in replicas and states."""

    times: EntryTimes
    ratios: Ratios
    shape: Shape
    rates: Rates


class Clock:
    """Times of the points of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.is_cut = space.base.framework in CUT
        self._shapes: dict[object, tuple[Shape, Rates]] = {}
        self._families: dict[object, _Family] = {}
        self._kept: dict[object, Plan] = {}
        self._fixed: Works | None = None
        self._groups: dict[tuple[int, Recomputing], tuple[Works, Groups]] = {}

    def family(self, point: Point) -> _Family:
        """Times of a layer and of both ends, and of sends between stages."""
        extras = tuple([extra for extra in point.extras if extra.changes_passes])
        accumulates = self.space.microbatches(point) > 1
        key = (point.tp, point.cp, point.mbs, point.recompute.mode, extras, accumulates, point.pp > 1)
        known = self._families.get(key)
        if known is None:
            known = self._families[key] = self._family(point, extras, accumulates)
        return known

    def _family(self, point: Point, extras: tuple[Extra, ...], accumulates: bool) -> _Family:
        key = (point.tp, point.cp, point.recompute.mode, extras, accumulates)
        if key not in self._shapes:
            recompute, zero = Recomputing(point.recompute.mode), self.space.least_zero
            plan = self.space.alone(point._replace(recompute=recompute, zero=zero, extras=extras))
            self._shapes[key] = replace(shape_of(plan), b=1), rates_of(plan)
        one, rates = self._shapes[key]
        shape = replace(one, b=point.mbs)
        times = times_of(shape, rates, False, False)
        ratios = _ratios(times, point.recompute)
        if point.pp > 1:
            across = self.space.gpus > self.space.base.hardware.gpus_per_node
            times = replace(times, send=send_time(shape, rates, across))
        return _Family(times, ratios, shape, rates)

    def ratios(self, point: Point) -> Ratios:
        return self.family(point).ratios

    def fastest(self, point: Point) -> tuple[Works, float]:
        """The cut whose slowest stage takes least, and at least its seconds."""
        if not self.is_cut:
            return (), step_time(resolve(self.space.plan(point))).total
        family = self.family(point)
        if self.space.cut is None:
            base = self.space.base
            works = fastest(base.model.layers, point.pp, point.vpp, family.ratios, may_be_alone(base.framework))
        else:
            works = self._given(point)
        return works, self._passes(family, point, works, 0.0)

    def _given(self, point: Point) -> Works:
        """The cut that the plan has, which all points share."""
        if self._fixed is None:
            stages = work_of(resolve(self.space.plan(point)))
            self._fixed = tuple(
                tuple(Work(chunk.layers, chunk.embedding, chunk.head) for chunk in stage) for stage in stages
            )
        return self._fixed

    def seconds(self, point: Point, works: Works) -> float:
        """Of the whole step."""
        if not self.is_cut:
            return step_time(resolve(self.space.plan(point))).total
        family, count = self.family(point), self.space.microbatches(point)
        replicas = Replicas(self._states(point), family.shape, family.rates)
        once = max(
            updates(replicas, chunks, family.times, count, len(works) > 1).total
            for _, chunks in self._grouped(works, point.recompute)
        )
        return self._passes(family, point, works, once)

    def _states(self, point: Point) -> Plan:
        """A resolved plan whose replicas keep states and exchange gradients as those of ``point`` do."""
        key = (point.zero, point.extras)
        if key not in self._kept:
            self._kept[key] = resolve(self.space.plan(point))
        plan = self._kept[key]
        sizes = {"tp": point.tp, "cp": point.cp, "pp": point.pp, "dp": point.dp}
        return plan.model_copy(update={"layout": plan.layout.model_copy(update=sizes)})

    def _passes(self, family: _Family, point: Point, works: Works, once: float) -> float:
        groups, count = self._grouped(works, point.recompute), self.space.microbatches(point)
        return step_seconds(family.times, groups, count, once, overlapped_sends(self.space.resolved, point.vpp))

    def _grouped(self, works: Works, recompute: Recomputing) -> Groups:
        """Remembered by the object, which is as long as its key."""
        key = (id(works), recompute)
        known = self._groups.get(key)
        if known is None:
            known = self._groups[key] = works, grouped(works, recompute, self.space.base.model.final_norm)
        return known[1]


def _ratios(times: EntryTimes, recompute: Recomputing) -> Ratios:
    layer = _whole(times.layer) + (times.layer.recompute if recompute.mode != "none" else 0.0)
    return Ratios(_whole(times.embedding) / layer, (_whole(times.final_norm) + _whole(times.head)) / layer)


def _whole(times: LayerTimes) -> float:
    return times.forward + times.backward


def grouped(works: Works, recompute: Recomputing, final_norm: bool) -> Groups:
    """``works`` as the time model counts them, equal neighbours together."""
    stages = (
        tuple(
            StageWork(
                work.layers,
                _recomputed(work.layers, recompute),
                work.embedding,
                final_norm and work.final_norm,
                work.head,
            )
            for work in stage
        )
        for stage in works
    )
    return tuple((len(list(equal)), chunks) for chunks, equal in groupby(stages))


def _recomputed(layers: int, recompute: Recomputing) -> int:
    if recompute.mode == "none":
        return 0
    return min(layers, recompute.layers) if recompute.method == "block" and recompute.layers else layers
