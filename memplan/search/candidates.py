"""Every point of a space with its fastest cut, a bound from below of its time, and one of its memory.

``Clock`` computes once what the times of many points share: ``fastest`` is a bound from below, the passes without what
a step does once (gradients between replicas, the optimizer); ``seconds`` adds that, and is the total of
``time.step_time`` for the same plan.

Points that differ only in what is kept (ZeRO stage, optimizer states) share cut and time. Micro-batches are taken from
small to large: what a layer saves grows with them, so that once a layout's tensors are too large in whatever states
and cut, so are those of larger ones. Where the search may choose cuts, those of points are not chosen before it asks
for them: until then bounds of any cut stand for their time (``Clock.least``) and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain, groupby
from math import inf

from ..plan.errors import PlanError
from ..plan.plan import ResolvedPlan
from ..plan.resolve import resolve
from ..plan.spec import ModelSpec
from ..values import NamedTuple, replace
from .cuts import ChunkLayers, Ratios, StageLayers, fastest, has_place
from .lower_bounds import Needs
from .point import Extra, Point, Recomputing
from .space import Sizes, Space
from .time import (
    EntryTimes,
    LayerTimes,
    Rates,
    Shape,
    StageWork,
    on_timed_gpu,
    ranking_seconds,
    rates_of,
    step_seconds,
    work_of,
)
from .time.layer import host_seconds, send_time, times_of
from .time.shape import Shapes, Wide, Work, counts_of_kinds
from .time.updates import Replicas, updates

Groups = tuple[tuple[int, tuple[StageWork, ...]], ...]
"""How many stages in a row have these chunks."""


ENDLESS = 1 << 24
"""Sequences of a micro-batch beside which waves of tiles and latencies take no time."""
ROUNDED = 1e-4
"""Part of a time by which rounded sizes of kernels may make it smaller than ``Clock.least`` reckons, and what is more
than nothing beside ``ENDLESS`` sequences."""


class _Family(NamedTuple):
    """What points share that differ only in replicas and states."""

    times: EntryTimes
    ratios: Ratios
    shape: Shape
    rates: Rates


class _Limit(NamedTuple):
    """Seconds of a sequence at least, through a layer, one of the model's first, and either end; and of any number of
    them, what the host takes for such layers."""

    layer: float = 0.0
    dense: float = 0.0
    embedding: float = 0.0
    head: float = 0.0
    host: float = 0.0
    dense_host: float = 0.0
    rounding: float = 1.0
    """The part by which whole numbers of rows may make any of them less for one sequence."""


class Clock:
    """Times of the points of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.chooses_cut, self.alone = space.search.chooses_cut, space.framework.supports.stages_without_layers
        self.layers, self.first = space.base.model.layers, space.first
        self.wide = space.resolved.precision.wide_layers
        self._shapes: dict[object, tuple[Shapes, Rates]] = {}
        self._families: dict[object, _Family | PlanError] = {}
        self._limits: dict[object, _Limit] = {}
        self._kept: dict[object, ResolvedPlan] = {}
        self._laid_out: dict[object, ResolvedPlan] = {}
        self._fixed: StageLayers | None = None
        overlapped_sends = space.framework.time.overlapped_sends
        self._overlapped_sends = cache(lambda vpp: overlapped_sends(space.resolved, vpp))
        self._groups: dict[tuple[int, Recomputing], tuple[StageLayers, Groups]] = {}
        self._whole = cache(self._whole_step)
        self._at_full_clock = cache(lambda rates: replace(rates, power=None))
        self.plan = lru_cache(maxsize=1)(lambda point: resolve(space.plan(point)))

    def family(self, point: Point) -> _Family:
        """Times of a layer and of both ends, and of sends between stages."""
        recompute, experts = point.recompute, (point.ep, point.etp)
        accumulates = self.space.microbatches(point) > 1
        key = (point.tp, point.cp, experts, point.mbs, recompute.kind, _passing(point), accumulates, point.pp > 1)
        known = self._families.get(key)
        if known is None:
            try:
                known = self._family(point)
            except PlanError as error:
                known = error
            self._families[key] = known
        if isinstance(known, PlanError):
            raise known
        return known

    def _shape(self, point: Point) -> tuple[Shape, Rates]:
        """Of few replicas on one stage."""
        shapes, rates = self._shapes_of(point)
        return shapes.of(point.mbs), rates

    def _shapes_of(self, point: Point) -> tuple[Shapes, Rates]:
        """The same for micro-batches of any size."""
        recompute = Recomputing(point.recompute.mode, modules=point.recompute.modules)
        extras, accumulates = _passing(point), self.space.microbatches(point) > 1
        key = (point.tp, point.cp, point.ep, point.etp, recompute, extras, accumulates)
        if key not in self._shapes:
            zero = self.space.least_zero
            mbs = 1 if accumulates else point.mbs  # of any size: with one sequence, bounds of bytes need it, too
            plan = self.space.alone(point._replace(recompute=recompute, zero=zero, extras=extras, mbs=mbs))
            self._shapes[key] = Shapes(plan, accumulates), rates_of(on_timed_gpu(plan, self.space.gpus))
        return self._shapes[key]

    def _family(self, point: Point) -> _Family:
        shape, rates = self._shape(point)
        times = times_of(shape, rates, False, False)
        ratios = self._ratios(times, point.recompute)
        if point.pp > 1:
            across = self.space.gpus > self.space.base.hardware.gpus_per_node
            times = replace(times, send=send_time(shape, rates, across))
        return _Family(times, ratios, shape, rates)

    def ratios(self, point: Point) -> Ratios:
        return self.family(point).ratios

    def fastest(self, point: Point) -> tuple[StageLayers, float]:
        """The cut whose slowest stage takes least, and at least its seconds."""
        if not self.chooses_cut:
            return (), self._whole(point)
        family = self.family(point)
        if self.space.cut is None:
            cut = fastest(self.space.base.model.layers, point.pp, point.vpp, family.ratios, self.alone)
            cut = self.space.placed(cut)
        else:
            cut = self._given(point)
        return cut, self._passes(family, point, cut, 0.0)

    def least(self, point: Point) -> float:
        """At least the seconds of ``point``, whatever its cut: as if all stages took as long, or the fullest one held
        its share of layers, and the GPU kept its full clock.

        A micro-batch of b sequences takes no less than b times what each of B takes as B grows without end. A kernel's
        tiles, bytes and FLOPs grow by as much for every sequence, and what is added to that is never negative: waves
        and edges of tiles, weights, latencies. So does what collectives add to the kernels beside them, the larger of
        their own time and of what they take from those. Nor does it take less than the host, which launches as many
        products for any number. Where experts take whole rows it is less, by what one row is of those that an expert
        has of a sequence. 0 where sizes do not grow so, and where nobody chooses cuts. Extras that change passes are
        other losses: of these nothing is reckoned.
        """
        b, layers, count = point.mbs, self.layers - self.first, self.space.microbatches(point)
        key = (point.tp, point.cp, point.ep, point.etp, point.recompute, count > 1)
        known = self._limits.get(key)
        if known is None:
            known = self._limits[key] = self._limit(point._replace(extras=()))
        ends = known.embedding if _passing(point) else known.embedding + known.head
        layer, dense = max(b * known.layer, known.host), max(b * known.dense, known.dense_host)
        whole = layers * layer + self.first * dense + b * ends
        slowest = max(whole / point.pp, -(-layers // point.pp) * layer)
        passes = count * slowest if point.vpp > 1 else whole + (count - 1) * slowest
        return passes * max(0.0, 1 - ROUNDED - known.rounding / b)

    def _limit(self, point: Point) -> _Limit:
        shapes, rates = self._shapes_of(point)
        if shapes.rounding == 1 or not self.chooses_cut:  # or layers of more kinds than two
            return _Limit()
        shape, again = shapes.recorded(ENDLESS), point.recompute.mode != "none" and point.recompute.method != "block"
        times, entries = times_of(shape, self._at_full_clock(rates), False, False), shape.entries
        each = [_whole(one) + (one.recompute if again else 0.0) for one in times.of_layers]
        embedding, head = _whole(times.embedding), _whole(times.head)
        spent = [host_seconds(work[again], rates, shape.host) for work in entries.of_layers]
        layer, dense, host, dense_host = min(each[::2]), min(each[1::2]), min(spent[::2]), min(spent[1::2])
        layer, dense, embedding, head = (one / ENDLESS for one in (layer, dense, embedding, head))
        return _Limit(layer, dense, embedding, head, host, dense_host, shapes.rounding)

    def _whole_step(self, point: Point) -> float:
        """Seconds of a step whose cut nobody chooses."""
        plan = self.plan(point)
        if not self.space.search.shares_shapes or self.space.base.model.mtp_layers:
            return ranking_seconds(plan)
        shape, _ = self._shape(point)
        return ranking_seconds(plan, replace(shape, overlapped_sends=self._overlapped_sends(point.vpp)))

    def _given(self, point: Point) -> StageLayers:
        """The cut that the plan has, which all points share."""
        if self._fixed is None:
            stages = work_of(resolve(self.space.plan(point)))
            self._fixed = chunks_of(stages)
        return self._fixed

    def seconds(self, point: Point, cut: StageLayers) -> float:
        """Of the whole step."""
        if not self.chooses_cut:
            return self._whole(point)
        family, count = self.family(point), self.space.microbatches(point)
        replicas = Replicas(self._states(point), family.shape, family.rates)
        once = max(
            updates(replicas, chunks, family.times, count, len(cut) > 1).total
            for _, chunks in self._grouped(cut, point.recompute)
        )
        return self._passes(family, point, cut, once)

    def _states(self, point: Point) -> ResolvedPlan:
        """A resolved plan whose replicas keep states and exchange gradients as those of ``point`` do."""
        key = (point.zero, point.extras)
        if key not in self._kept:
            self._kept[key] = resolve(self.space.plan(point))
        sizes = (point.tp, point.cp, point.pp, point.dp)
        known = self._laid_out.get((key, sizes))
        if known is None:
            plan = self._kept[key]
            layout = plan.layout.model_copy(update=dict(zip(("tp", "cp", "pp", "dp"), sizes, strict=True)))
            known = self._laid_out[(key, sizes)] = plan.model_copy(update={"layout": layout})
        return known

    def _passes(self, family: _Family, point: Point, cut: StageLayers, once: float) -> float:
        groups, count = self._grouped(cut, point.recompute), self.space.microbatches(point)
        return step_seconds(family.times, groups, count, once, self._overlapped_sends(point.vpp))

    def _grouped(self, cut: StageLayers, recompute: Recomputing) -> Groups:
        """Remembered by the object, which is as long as its key."""
        key = (id(cut), recompute)
        known = self._groups.get(key)
        if known is None:
            known = self._groups[key] = cut, grouped(cut, recompute, self.space.base.model, self.wide)
        return known[1]

    def _ratios(self, times: EntryTimes, recompute: Recomputing) -> Ratios:
        """Layers at the ends that keep 16 bits count as parts of the ends: a chunk that does not hold all of them takes
        other seconds than its cut is chosen by."""
        again, (first, last) = recompute.mode != "none", self.wide
        each = [_whole(one) + (one.recompute if again else 0.0) for one in times.of_layers]
        layer, dense, *wide = each
        embedding, head = _whole(times.embedding), _whole(times.final_norm) + _whole(times.head)
        if wide:
            few = min(first, self.first)
            embedding += max(0.0, few * (wide[1] - dense) + (first - few) * (wide[0] - layer))
            head += max(0.0, last * (wide[0] - layer))
        return Ratios(embedding / layer, head / layer, *((dense / layer, self.first) if self.first else ()))


def _passing(point: Point) -> tuple[Extra, ...]:
    """What of it changes passes."""
    return tuple([extra for extra in point.extras if extra.changes_passes])


def _whole(times: LayerTimes) -> float:
    return times.forward + times.backward


def grouped(cut: StageLayers, recompute: Recomputing, spec: ModelSpec, wide: Wide) -> Groups:
    """``cut`` as the time model counts them, equal neighbours together."""
    starts = _starts(cut) if any(wide) else {}

    def counted(at: int, number: int, work: ChunkLayers) -> StageWork:
        again, start = _recomputed(work.layers, recompute), starts.get((at, number), 0)
        return StageWork(
            work.layers,
            again,
            work.embedding,
            spec.final_norm and work.final_norm,
            work.head,
            work.dense,
            min(work.dense, again),
            kinds=counts_of_kinds(spec, range(start, start + work.layers), again, wide) if starts else (),
        )

    stages = (tuple([counted(at, number, work) for number, work in enumerate(stage)]) for at, stage in enumerate(cut))
    return tuple((len(list(equal)), chunks) for chunks, equal in groupby(stages))


def _starts(cut: StageLayers) -> dict[tuple[int, int], int]:
    """The first layer of every chunk, by stage and number: layers go through the first chunks of all stages, then
    through the second ones."""
    start, found = 0, dict[tuple[int, int], int]()
    for number in range(len(cut[0])):
        for at, stage in enumerate(cut):
            found[at, number], start = start, start + stage[number].layers
    return found


def _recomputed(layers: int, recompute: Recomputing) -> int:
    if recompute.mode == "none":
        return 0
    return min(layers, recompute.layers) if recompute.method == "block" and recompute.layers else layers


def chunks_of(stages: Work) -> StageLayers:
    """What stages hold, from what they do."""
    return tuple(
        tuple(ChunkLayers(chunk.layers, chunk.embedding, chunk.head, dense=chunk.dense) for chunk in stage)
        for stage in stages
    )


class Candidate(NamedTuple):
    """A point with a cut, before anything is built."""

    seconds: float
    """Infinite where a layout does not fit, and its time decides nothing."""
    floor: int
    """Bytes that the fullest stage needs at least."""
    point: Point
    cut: StageLayers
    timed: bool = False
    """``seconds`` is the whole step, not only its passes."""
    fitted: int = 0
    """How often its cut, or the number of its recomputed layers, was chosen to fit."""
    to_fit: int = 0
    """Bytes that its tensors may request once that has been chosen; until then its time is a bound from below."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Fastest first, what keeps the numbers of training before what does not. Picoseconds are no difference: the
        order in which times are added, and Python's own ``sum`` (since 3.12), change the last digits."""
        return not self.point.keeps_numerics, round(self.seconds, 12)

    @property
    def order(self) -> tuple[object, ...]:
        """By ``rank``; of equals the one that needs less, then the one with the smaller sizes."""
        return (*self.rank, self.floor, self.point.order, self.cut)


class Group(NamedTuple):
    """Points that take the same time."""

    place: int
    """Of the first of them among all points."""
    candidates: tuple[Candidate, ...]
    """With their cuts; where none is chosen yet, with bounds from below, of whatever cut."""
    is_cut: bool

    @property
    def ranks(self) -> set[tuple[bool, float]]:
        """Of its candidates, which take the same time."""
        seconds = round(self.candidates[0].seconds, 12)
        return {(not one.point.keeps_numerics, seconds) for one in self.candidates}


Kept = tuple[int, tuple[Extra, ...]]
"""ZeRO stage, and what goes with it."""


class Candidates:
    """Those of one space. ``requestable`` bytes are what tensors may take."""

    def __init__(self, space: Space, clock: Clock, needs: Needs, requestable: int) -> None:
        self.space, self.clock, self.needs, self.requestable = space, clock, needs, requestable
        self.chooses_cut = space.search.chooses_cut
        self.considered = self.too_large = 0
        """Points; and those of them that need no candidate, because smaller micro-batches are too large."""
        self.refused: Counter[str] = Counter()
        """Points that are left out, by the rule."""
        self._grouped: dict[tuple[int, bool], list[list[Kept]]] = {}
        self._cannot_lie: dict[tuple[int, int], PlanError | None] = {}

    def __iter__(self) -> Iterator[Group]:
        place = 0
        for found, is_cut in self._every():
            yield Group(place, found, is_cut)
            place += len(found)

    def _every(self) -> Iterator[tuple[tuple[Candidate, ...], bool]]:
        """Of every group."""
        for layout, sizes in self.space.layouts(self.refused):
            error = None if self.chooses_cut else self._without_cut(layout, sizes[0])
            for recompute in self.space.recompute:
                if error is None:
                    yield from self._chain(layout, sizes, recompute)
                    continue
                points = len(sizes) * sum(map(len, self._groups(layout.dp * layout.cp, layout.pp)))
                self.considered += points
                self._refuse(error, points)

    def _without_cut(self, layout: Sizes, mbs: int) -> PlanError | None:
        """Why the layers cannot lie on so many stages and chunks, which is the same for every point that has them."""
        key = layout.pp, layout.vpp
        groups = self._groups(layout.dp * layout.cp, layout.pp)
        if key not in self._cannot_lie and groups:
            zero, extras = groups[0][0]
            try:
                plan = resolve(self.space.plan(Point(*layout, zero, mbs, self.space.recompute[0], extras)))
            except PlanError:
                return None  # refused for something else: another point tells
            try:
                self.space.search.check_cut(plan)
                self._cannot_lie[key] = None
            except PlanError as error:
                self._cannot_lie[key] = error
        return self._cannot_lie.get(key)

    def _chain(
        self, layout: Sizes, sizes: Sequence[int], recompute: Recomputing
    ) -> Iterator[tuple[tuple[Candidate, ...], bool]]:
        """``layout`` with every micro-batch, and everything beside that."""
        groups = self._groups(layout.dp * layout.cp, layout.pp)
        many = sum(map(len, groups))
        refused = self.refused.total()
        for at, mbs in enumerate(sizes):
            alike = [[Point(*layout, zero, mbs, recompute, extras) for zero, extras in group] for group in groups]
            runs = refused == self.refused.total() and self.space.cut is None
            bounds = self._bounded(alike) if runs else None
            if bounds == [] or (runs and bounds is None and not self._surely_could_fit(alike)):
                self._leave_out((len(sizes) - at) * many)
                return
            if bounds is not None:
                self.considered += many
                yield from ((tuple(group), False) for group in bounds)
                continue
            self.considered += many
            found = [tuple(self.cut(points)) for points in alike]
            yield from ((group, True) for group in found)
            too_large = all(one.floor > self.requestable for group in found for one in group)
            if self.chooses_cut and too_large and not self._could_fit([one.point for group in found for one in group]):
                self._leave_out((len(sizes) - at - 1) * many)
                return

    def _bounded(self, alike: Sequence[Sequence[Point]]) -> list[list[Candidate]] | None:
        """Each of ``alike``, points that take the same time, with bounds of any cut, none where all are too large;
        ``None`` where nobody chooses cuts, or some cannot be laid out."""
        if not alike or not self.chooses_cut:
            return None
        clock, one = self.clock, alike[0][0]
        if not has_place(clock.first, clock.layers, (one.pp, one.vpp, clock.alone)):
            return None
        try:
            sizes = self.needs.of_any_cut([*chain.from_iterable(alike)])
            if min(sizes) > self.requestable:
                return []
            floors = iter(sizes)
            return [
                [Candidate(seconds, floor, point, ()) for point, floor in zip(points, floors)]  # noqa: B905
                for points, seconds in ((points, clock.least(points[0])) for points in alike)
            ]
        except PlanError:
            return None  # counted where its cut is looked for

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
                groups.setdefault(passes if self.chooses_cut else (zero, extras), []).append((zero, extras))
            known = self._grouped[key] = list(groups.values())
        return known

    def cut(self, points: Sequence[Point]) -> Iterator[Candidate]:
        """``points`` that take the same time, with their cut."""
        if not self.chooses_cut:
            yield from chain.from_iterable(map(self._uncut, points))
            return
        try:
            cut, seconds = self.clock.fastest(points[0])
        except PlanError as error:
            self._refuse(error, len(points))
            return
        try:
            floors = list(self.needs.floors(points, cut))
        except PlanError as error:
            if len(points) == 1:
                self._refuse(error, 1)
            else:
                yield from chain.from_iterable(self.cut([point]) for point in points)
            return
        for point, floor in zip(points, floors, strict=True):
            yield Candidate(seconds, floor, point, cut)

    def _uncut(self, point: Point) -> Iterator[Candidate]:
        """Of a layout whose cut nobody chooses: if it does not fit, its time is left open."""
        try:
            self.clock.plan(point)
            (floor,) = self.needs.floors((point,), ())
            seconds = self.clock.seconds(point, ()) if floor <= self.requestable else inf
        except PlanError as error:
            self._refuse(error, 1)
        else:
            yield Candidate(seconds, floor, point, ())

    def _refuse(self, error: PlanError, points: int) -> None:
        raise_for_all(error)
        self.refused[without_values(error)] += points
        self.considered -= points

    def _surely_could_fit(self, alike: Sequence[Sequence[Point]]) -> bool:
        """``_could_fit``, or they are refused."""
        try:
            return self._could_fit(list(chain.from_iterable(alike)))
        except PlanError:
            return True

    def _could_fit(self, points: Sequence[Point]) -> bool:
        """One of ``points``, which differ in what is kept alone, in some cut, for all that its bound says."""
        if not self.space.search.bounds_layers:
            return True
        if self.chooses_cut and self.space.cut is not None:
            return False
        return any(size <= self.requestable for size in self.needs.of_any_cut(points))


def recomputing(candidate: Candidate, layers: int) -> Candidate:
    """The same with full recompute of so many layers of every chunk."""
    return candidate._replace(point=candidate.point._replace(recompute=Recomputing("full", "block", layers)))


def without_values(error: PlanError) -> str:
    """An error's field and rule, so that equal ones are counted together."""
    return f"{error.field}: {error.problem}"


def raise_for_all(error: PlanError) -> None:
    """Raises an ``error`` that every layout has: of the model's family, which no search changes."""
    if error.field == "model.family":
        raise error
