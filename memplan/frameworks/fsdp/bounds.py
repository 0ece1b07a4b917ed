"""What a rank of ``fully_shard`` needs at least.

Without a pipeline shards are counted as ``sharded`` does, and of what hooks gather that which is there whatever the
order of streams: a unit's own parameters while it runs, the copy of what was gathered beside them, what is gathered
ahead in backward, and the last reduction's input.

In a pipeline there is one bound for each rank, from the layers of its stages and the passes in flight. From its first
micro-batch until its reduction a stage keeps its parameters whole, and from its first backward pass on its gradients
(``pipeline``). Every pass in flight keeps what its layers save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import groupby

from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Options, Parameter, Tapes, hold_bytes
from ...plan.plan import ResolvedPlan
from ...plan.resolve import resolve
from ...schedules.torch_schedules import ACTIVE, Place, passes
from ...search.lower_bounds import TENSORS, Growing, Kept, LowerBounds, peaks
from ...search.point import Extra, Point
from ...search.space import Space
from ...tape.events import Category, rounded
from ...tape.program import module_states
from ...values import NamedTuple, dataclass, replace
from . import programs, stages, torchtitan
from .modules import Model, managed
from .stages import Cut
from .torchtitan import Checkpointing
from .units import Sharding, Unit, shard, sharded_states, sharded_step, size


class FsdpBounds(LowerBounds):
    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self._saved: dict[object, Saved] = {}
        self._ranks: dict[object, tuple[Rank, ...]] = {}

    def least(self, point: Point, enough: int) -> int:
        if point.pp == 1:
            return super().least(point, enough)
        return least(resolve(self.space.plan(point)), self._ranks_of(point), self._saved_of(point))

    def _ranks_of(self, point: Point) -> tuple[Rank, ...]:
        key = (point.tp, point.pp, point.vpp, point.dp, point.extras)
        if key not in self._ranks:
            self._ranks[key] = ranks_of(resolve(self.space.plan(point)))
        return self._ranks[key]

    def _saved_of(self, point: Point) -> Saved:
        key = (point.tp, point.recompute)
        if key not in self._saved:
            plan = resolve(self.space.plan(point))
            alone = point._replace(pp=1, vpp=1, dp=self.space.gpus // point.tp)
            self._saved[key] = saved(plan, lambda sequences: self.plan(alone, sequences, False))
        return self._saved[key]

    def regroups(self, extra: Extra) -> bool:
        """Shards and what is summed between their groups are gathered and held in passes, and parameters that stay."""
        return any(path in ("fsdp.replicas", "fsdp.reshard_after_forward") for path, _ in extra.fields)

    def kept(self, plan: ResolvedPlan) -> Kept:
        """Of rank 0, which has the largest shards, of a resolved plan."""
        given = plan.fsdp
        programs.check(plan, given)
        model, sharding = programs.model_of(plan, Options(), given), programs.sharding_of(plan, given)
        static = sum(hold.bytes for hold in model.buffers)
        if sharding.offload:
            return Kept(static, 0 if given.gradient_sync else unreduced(model.units, sharding), 0)
        states = sharded_states(plan.optimizer, sharding)
        static += sum(sum(module_states(span.module, states)) * len(span.names) for span in model.spans)
        left = reduced(model.units, sharding)
        tensors = tuple(one for span in model.spans for _ in span.names for one in span.module.parameters)
        step = left + sharded_step(tensors, plan.optimizer, sharding).excursion.peak
        return Kept(static, left if given.gradient_sync else unreduced(model.units, sharding), step)

    def passing(self, plan: ResolvedPlan, accumulates: bool) -> tuple[int, ...]:
        """What one micro-batch takes beside what is static and what ``accumulates``, where others went before it: until
        the first unit has gone backward, and to the end."""
        model = programs.model_of(plan, Options(), plan.fsdp)
        sharding = programs.sharding_of(plan, plan.fsdp)
        reduces = plan.fsdp.gradient_sync or not accumulates
        cast = sharding.reduce != sharding.trained
        outlives = sharding.replicas > 1 and reduces and (accumulates or sharding.offload or cast)
        return _Walk(model, sharding, reduces, outlives).peaks()


def reduced(units: Sequence[Unit], sharding: Sharding) -> int:
    """Gradients as shards."""
    return sum(size(unit.reduced(sharding.shards), sharding.trained) for unit in units if unit.parameters)


def unreduced(units: Sequence[Unit], sharding: Sharding) -> int:
    """Whole gradients that wait for the micro-batch that reduces them."""
    tensors = [one for unit in units for one in unit.parameters if one.trained]
    return sum(size(one.elements, sharding.reduce) for one in tensors)


class _Sizes(NamedTuple):
    """Bytes of a unit."""

    whole: int
    """Its gathered parameters."""
    flat: int
    """The output of their gathering."""
    gradients: int
    """Its gradients before they are reduced,"""
    reduced: int
    """and as shards."""


@dataclass(frozen=True)
class _Walk:
    """One micro-batch through a model."""

    model: Model
    sharding: Sharding
    reduces: bool
    """Gradients end with their unit's backward, rather than being added to others."""
    outlives: bool
    """What is reduced is held until the end of backward, as sums across replicas run beside it."""

    def peaks(self) -> tuple[int, int]:
        modules = [span.module for span in self.model.spans for _ in span.names]
        level = most = early = 0
        runs = self.runs(modules)
        for place, times in runs:
            level += self.over(place, "first")
            excursion, own = modules[place].first.forward_fold, self.forward(place)
            grown = excursion.net + self.stays(place) - self.over(place, "last", resharded=True)
            most = max(most, *(level + before * grown + own + excursion.peak for before in {0, times - 1}))
            level += times * grown
        owner = {
            at: unit for unit, own in zip(self.units, managed(self.units, len(modules)), strict=True) for at in own
        }
        waiting: Counter[str] = Counter()
        narrow = any(unit.narrow for unit in self.units)
        lowest = next(at for at, one in enumerate(modules) if one.first.backward)
        for place, times in reversed(runs):
            if place < lowest or (narrow and not modules[place].first.backward):
                break  # with units of less than a module, only what the head's pass takes is counted of backward
            level += self.over(place, "last", resharded=True)
            tapes = modules[place].first if self.reduces else modules[place].steady
            excursion, begun = tapes.backward_fold, level
            here = level + self.backward(place) + excursion.peak
            most = max(most, here)
            early = early or (most if place in self.alone else 0)
            if early and not self.reduces:
                break  # from here on, those that waited end
            left = excursion.net_by[Category.GRADIENTS]
            level += excursion.net - (left if place in self.alone else 0) - self.stays(place)
            if place not in self.alone and place in owner:
                waiting[owner[place].name] += left
            if self.outlives and place in self.alone:
                level += self.sizes(self.alone[place]).reduced
                here = max(here, level)
            level -= self.over(place, "first")
            level -= sum(waiting.pop(one.name, 0) for one in self.around if one.first == place)
            others = (times - 1) * (level - begun)
            most, level = max(most, here, here + others), level + others
        return early, most

    def runs(self, modules: Sequence[Module]) -> list[tuple[int, int]]:
        """Places, each with how many in a row are alike, and have neighbours that are: what is held goes up or down by
        as much with each of them."""
        ends = {place for place, _, _ in self._ends}
        alike: list[object] = [
            at if unit is None or at in ends else (id(module), id(unit.parameters), unit.cut, unit.reshard)
            for at, module in enumerate(modules)
            for unit in (self.alone.get(at),)
        ]
        places = range(len(modules))
        inner = [
            alike[at] if 0 < at < places[-1] and alike[at - 1] == alike[at] == alike[at + 1] else -1 - at
            for at in places
        ]
        groups = (list(own) for _, own in groupby(places, inner.__getitem__))
        return [(own[0], len(own)) for own in groups]

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.model.units

    @cached_property
    def alone(self) -> dict[int, Unit]:
        """Units of one module, by its place."""
        return {unit.first: unit for unit in self.units if unit.alone and unit.parameters and not unit.of_experts}

    @cached_property
    def around(self) -> list[Unit]:
        """Units of several modules."""
        return [unit for unit in self.units if not unit.alone and unit.parameters]

    def over(self, place: int, end: str, *, resharded: bool = False) -> int:
        """Gathered parameters of the units of several modules that have an end here."""
        return self._ends.get((place, end, resharded), 0)

    @cached_property
    def _ends(self) -> Counter[tuple[int, str, bool]]:
        found = Counter[tuple[int, str, bool]]()
        for one in self.around:
            for place, end in ((one.first, "first"), (one.last, "last")):
                found[place, end, False] += self.whole(one)
                found[place, end, True] += self.whole(one) if one.resharding is True else 0
        return found

    def stays(self, place: int) -> int:
        """What a unit of one module keeps gathered between forward and backward."""
        unit = self.alone.get(place)
        return self.whole(unit) if unit is not None and not unit.reshard else 0

    def whole(self, unit: Unit) -> int:
        """A unit's gathered parameters."""
        return self.sizes(unit).whole

    def gathered(self, unit: Unit) -> int:
        """The flat output of its gathering."""
        return self.sizes(unit).flat

    @cached_property
    def _known(self) -> dict[object, _Sizes]:
        return {}

    def sizes(self, unit: Unit) -> _Sizes:
        """Layers that are alike have one tuple of parameters."""
        key = id(unit.parameters), unit.cut
        if key not in self._known:
            shards, reduce = self.sharding.shards, self.sharding.reduce
            pieces, part = unit.gathered(self.sharding), unit.reduced(shards)
            flat = sum(one * ITEMSIZE[dtype] for one, dtype in pieces)
            self._known[key] = _Sizes(
                sum(size(one * shards, dtype) for one, dtype in pieces),
                rounded(flat * shards) if shards > 1 else 0,
                size(part * shards, reduce),
                size(part, reduce),
            )
        return self._known[key]

    def forward(self, place: int) -> int:
        """A unit's own parameters, and the flat copy."""
        unit = self.alone.get(place)
        return self.whole(unit) + self.gathered(unit) if unit is not None else 0

    def backward(self, place: int) -> int:
        """A unit's own parameters, those of the unit before it, gathered ahead, and the input of the reduction of the
        unit behind it."""
        unit, before, behind = (self.alone.get(at) for at in (place, place - 1, place + 1))
        if unit is None:
            return 0
        taken = self.whole(unit) if unit.reshard else 0
        if before is not None and before.resharding is True:
            taken += self.gathered(before)
        if behind is not None and self.reduces:
            taken += self.sizes(behind).gradients
        return taken


# -- in a pipeline -----------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """Of one micro-batch, by the number of sequences."""

    layers: dict[Checkpointing, Growing]
    """What a layer saves, by how it is recomputed."""
    turn: dict[Checkpointing, Growing]
    """What the backward pass that follows takes at its peak, of a stage that ends with such a layer."""
    ends: Growing
    """What norm, head and loss save."""
    loss: dict[Checkpointing, Growing]
    """What norm, head and loss take, and that pass behind them."""


class Rank(NamedTuple):
    """What does not depend on the micro-batch."""

    cuts: tuple[Cut, ...]
    static: int
    step: int
    """What the step takes beside it, gradients among it."""
    whole: int
    """Gathered parameters of the stages that have them at once."""
    gradients: int
    """Gradients as they are before they are reduced."""


class Flight(NamedTuple):
    """A moment of a rank's schedule."""

    passes: tuple[int, ...]
    """Of each chunk, that have gone forward and not yet backward."""
    gradients: bool
    """Every chunk has had a backward pass."""
    loss: bool
    """The last of them has just gone forward through the last chunk."""
    sent: tuple[int, ...]
    """Of each chunk, passes that are over, and whose output and input's gradient the schedule still holds."""


def least(plan: ResolvedPlan, ranks: Sequence[Rank], known: Saved) -> int:
    """Bytes of the fullest rank of a resolved plan."""
    made, recompute = torchtitan.recipes(plan), programs.recompute_of(plan, plan.fsdp)
    count, pp, chunks = plan.microbatches, plan.layout.pp, plan.layout.vpp
    layers = {mode: one.at(plan.batch.mbs) for mode, one in known.layers.items()}
    turn = min(one.at(plan.batch.mbs) for one in known.turn.values())
    loss = min(one.at(plan.batch.mbs) for one in known.loss.values())
    ends = known.ends.at(plan.batch.mbs)
    hidden = hold_bytes(made.hidden, made.shape.dtype)
    most = 0
    for number, rank in enumerate(ranks):
        static = rank.static + sum(hold.bytes for hold in stages._kept(made, rank.cuts, count))
        most = max(most, static + rank.step)
        before, saved = 0, []
        for cut in rank.cuts:
            held = cut.high - cut.low
            saved.append(sum(layers[recompute.of(before + at)] for at in range(held)))
            before += held
        for flight in flights(Place(number, pp, chunks), count, plan.pipeline.schedule):
            flying = sum(many * one for many, one in zip(flight.passes, saved, strict=True))
            sent = zip(flight.sent, rank.cuts, strict=True)
            flying += hidden * sum(many * (2 - cut.first - cut.last) for many, cut in sent)
            top = turn
            if number == pp - 1:
                top = loss if flight.loss else 0
                flying += ends * (flight.passes[-1] - flight.loss)
            most = max(most, static + rank.whole + flight.gradients * rank.gradients + flying + top)
    return most


# -- of a micro-batch -----------------------------------------------------------------------------------


def saved(plan: ResolvedPlan, of: Callable[[int], ResolvedPlan]) -> Saved:
    """For a resolved ``plan``, of which ``of`` is another with so many sequences in a micro-batch."""
    recompute = programs.recompute_of(plan, plan.fsdp)
    modes = {recompute.of(at) for at in range(plan.model.layers)}

    def block(mode: Checkpointing, sequences: int) -> Tapes:
        return torchtitan.recipes(of(sequences)).block(mode, Options()).steady

    def growing(measured: Callable[[Checkpointing, int], tuple[int, ...]]) -> dict[Checkpointing, Growing]:
        return {mode: Growing(partial(measured, mode), TENSORS) for mode in modes}

    def layer(mode: Checkpointing, sequences: int) -> tuple[int, ...]:
        return (max(0, block(mode, sequences).forward_fold.net),)

    def turn(mode: Checkpointing, sequences: int) -> tuple[int, ...]:
        return (block(mode, sequences).backward_fold.peak,)

    def behind(sequences: int) -> list[Tapes]:
        _, *modules = torchtitan.recipes(of(sequences)).ends(Options())
        return [one.steady for one in modules]

    def ends(sequences: int) -> tuple[int, ...]:
        return (max(0, sum(one.forward_fold.net for one in behind(sequences))),)

    def loss(mode: Checkpointing, sequences: int) -> tuple[int, ...]:
        tapes = behind(sequences)
        back = [one.backward_fold for one in (*reversed(tapes), block(mode, sequences))]
        return peaks([*(one.forward_fold for one in tapes), *back], len(tapes) + 1)

    return Saved(growing(layer), growing(turn), Growing(ends, TENSORS), growing(loss))


@lru_cache(maxsize=1 << 14)
def flights(place: Place, count: int, schedule: str) -> tuple[Flight, ...]:
    """When a rank has most passes in flight."""
    if place.chunks == 1:
        flying = count if schedule == "gpipe" else min(count, place.ranks - place.rank)
        again = count > flying
        return Flight((flying,), False, True, (0,)), Flight((flying if again else flying - 1,), True, again, (0,))
    flying_of, ended = [0] * place.chunks, [0] * place.chunks
    best: dict[bool, Flight] = {}
    for what, chunk, _ in passes(place, count):
        flying_of[chunk] += 1 if what == "forward" else -1
        ended[chunk] += what == "backward"
        if max(ended) == count:
            break  # that stage's parameters and gradients are reduced
        has_all = all(ended)
        if has_all not in best or sum(flying_of) >= sum(best[has_all].passes):
            at_loss = what == "forward" and chunk == place.chunks - 1
            best[has_all] = Flight(tuple(flying_of), has_all, at_loss, tuple(ended))
    return tuple(best.values())


# -- of a rank ------------------------------------------------------------------------------------------


def ranks_of(plan: ResolvedPlan) -> tuple[Rank, ...]:
    """Every rank of a resolved plan's pipeline."""
    stages.check_pipeline(plan, plan.fsdp)
    pp, chunks, edges = plan.layout.pp, plan.layout.vpp, stages.partition(plan)
    made = torchtitan.recipes(plan)
    made = replace(made, shape=replace(made.shape, b=1, s=2 * made.tensor))  # parameters do not depend on it
    layer, ends = made.block("none", Options()), made.ends(Options())
    result = []
    for rank in range(pp):
        numbers = [rank + chunk * pp for chunk in range(chunks)]
        cuts = tuple(Cut(edges[at], edges[at + 1], not at, at == pp * chunks - 1) for at in numbers)
        result.append(_rank(plan, cuts, [_modules(cut, layer, ends) for cut in cuts]))
    return tuple(result)


Modules = tuple[tuple[Module, int], ...]
"""Modules of a stage, and how many of each."""


def _modules(cut: Cut, layer: Module, ends: Sequence[Module]) -> Modules:
    embedding, norm, head, _ = ends
    return (
        *(((embedding, 1),) if cut.first else ()),
        (layer, cut.high - cut.low),
        *(((norm, 1), (head, 1)) if cut.last else ()),
    )


def _rank(plan: ResolvedPlan, cuts: tuple[Cut, ...], modules: Sequence[Modules]) -> Rank:
    sharding = programs.sharding_of(plan, plan.fsdp)
    states = sharded_states(plan.optimizer, sharding)
    tensors = [[one for module, count in own for _ in range(count) for one in module.parameters] for own in modules]
    every = [one for own in tensors for one in own]
    shards = sum(shard(one, sharding.shards).elements for one in every) * ITEMSIZE[sharding.parameters]
    step = max(sharded_step(tuple(own), plan.optimizer, sharding).excursion.peak for own in tensors)
    whole = sorted(_gathered(sharding, own) for own in tensors)
    return Rank(
        cuts,
        static=sum(sum(module_states(module, states)) * count for own in modules for module, count in own),
        step=shards + step,
        whole=sum(whole[:ACTIVE]),
        gradients=sum(size(one.elements, sharding.reduce) for one in every),
    )


def _gathered(sharding: Sharding, tensors: Sequence[Parameter]) -> int:
    """Whether or not they have been copied out."""
    shards = sharding.shards
    return sum(shard(one, shards).elements * shards * ITEMSIZE[sharding.gathers(one)] for one in tensors)
