"""What a layout needs at least, before any of its tapes is built: proven bounds from below, in bytes of tensors.

Where the search chooses cuts, a stage with n layers and f micro-batches in flight holds the states of its parameters
and n f times what one layer saves for backward. Both are exact for one layer, and everything else (ends, padding,
buckets, what a pass takes while it runs) only adds to them.

Beside that a checkpoint may not be saved though an iteration fits (``Needs.saved``): that depends on neither recompute
nor micro-batch, and no cut holds fewer states.

Elsewhere (``LowerBounds``) a rank holds, at some moment of an iteration, what it keeps between iterations, and beside

* what earlier micro-batches left, and what one micro-batch takes at its peak, hooks left out: these only hold more; or
* its gradients, and what the optimizer's step takes.

The larger sum is a bound (``tests/search/test_lower_bounds.py``). The first part of either does not depend on the
micro-batch and the second not on how states are kept, so that few of them are folded for many layouts; a micro-batch of
many sequences is not folded at all (``Growing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING, Any

from ..estimate import programs_of
from ..layers.module import Options
from ..plan.errors import PlanError
from ..plan.plan import ResolvedPlan
from ..plan.resolve import resolve
from ..plan.traced_spec import TracedSpec
from ..tape.events import ROUND, Category, Excursion
from ..tape.program import Folded, Program, first_backward, fold_program, static
from ..values import NamedTuple, dataclass, replace
from .cuts import ChunkLayers, Holds, StageLayers, stage_layers
from .point import NO_RECOMPUTE, Extra, Point

if TYPE_CHECKING:
    from .space import Space

UNBOUNDED = 1 << 62
"""Bytes; more than any rank has."""

ROUNDING = 64 * 512
"""Bytes by which rounding may make what a layer saves at b = 1 larger than its share at another b: fewer than 64
tensors, and what does not grow with b is among them."""


class LayerNeeds(NamedTuple):
    """One layer on one rank; and one of the model's first layers, where these alone have no experts."""

    elements: int
    saved: int
    """Bytes for every micro-batch in flight."""
    experts: int = 0
    """Of the elements, those that only ranks with the same experts share."""
    dense_elements: int = 0
    dense_saved: int = 0


class Beside(NamedTuple):
    """What a stage holds beside states and saved tensors of its layers."""

    embedding: int = 0
    """Elements of the embedding,"""
    head: int = 0
    """and of the head."""
    turn: int = 0
    """Bytes that backward through a layer takes, with experts where some have them."""


class States(NamedTuple):
    """Bytes for every parameter: on every rank, and divided among the replicas."""

    whole: int
    divided: int
    copied: int = 0
    """And divided as well: of copies that saving a checkpoint makes of states, which are there beside all that is kept
    between iterations, gradients among it."""

    @property
    def saved(self) -> States:
        """What is there while a checkpoint is saved."""
        return self._replace(divided=self.divided + self.copied, copied=0)

    def of(self, elements: int, shards: int) -> float:
        """Bytes of so many parameters."""
        return elements * (self.whole + self.divided / shards)


def scaled(needs: LayerNeeds, mbs: int) -> LayerNeeds:
    """At least what a layer needs with ``mbs`` sequences, from what it needs with one."""
    saved, dense = (max(0, one - ROUNDING) * mbs for one in (needs.saved, needs.dense_saved))
    return needs._replace(saved=saved, dense_saved=dense)


@lru_cache(maxsize=1 << 14)
def flights(pp: int, vpp: int, microbatches: int, stage: int) -> int:
    """Passes of one chunk each that a stage has in flight at once, at most, of 1F1B and its interleaved kind."""
    if vpp == 1:
        return min(pp - stage, microbatches)
    return min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, microbatches * vpp)


@lru_cache(maxsize=1 << 14)
def flying(pp: int, vpp: int, microbatches: int, stage: int) -> tuple[int, ...]:
    """Of each chunk, passes that a stage has in flight when its first backward pass begins: its first ``flights``,
    ``pp`` of each chunk by turns."""
    counts = [0] * vpp
    for one in range(flights(pp, vpp, microbatches, stage)):
        counts[one // pp % vpp] += 1
    return tuple(counts)


class StageLoad(NamedTuple):
    """What of a stage decides a bound."""

    layers: int
    """With experts, where some have them."""
    dense: int
    """Of the model's first layers, without."""
    flying: tuple[tuple[int, int], ...]
    """Layers of either kind whose micro-batches are in flight, counted once for each: one of these pairs, at least."""


def loads(cut: StageLayers, microbatches: int) -> tuple[StageLoad, ...]:
    """Of every stage; where another stage has more of all, it is left out."""
    pp, vpp = len(cut), len(cut[0])
    found = {_load(stage, flights(pp, vpp, microbatches, at)) for at, stage in enumerate(cut)}
    return tuple(one for one in found if not any(one != other and _exceeds(other, one) for other in found))


def _load(stage: tuple[ChunkLayers, ...], passes: int) -> StageLoad:
    """All passes in flight may be those of the smallest chunk."""
    dense = sum(chunk.dense for chunk in stage)
    kinds = {(chunk.layers - chunk.dense, chunk.dense) for chunk in stage}
    least = kinds if dense else {min(kinds)}
    return StageLoad(_layers(stage) - dense, dense, tuple(sorted((passes * n, passes * d) for n, d in least)))


def _layers(stage: Iterable[ChunkLayers]) -> int:
    return sum(chunk.layers for chunk in stage)


def _exceeds(one: StageLoad, other: StageLoad) -> bool:
    if one.dense or other.dense:
        return False
    return one.layers >= other.layers and one.flying >= other.flying


class Shards(NamedTuple):
    """Replicas that share states: of layers, and of experts."""

    layers: int
    experts: int

    @classmethod
    def of(cls, point: Point) -> Shards:
        ranks = point.dp * point.cp
        return cls(ranks, ranks * point.tp // (point.ep * point.etp))


class Load(NamedTuple):
    """What a bound needs to know of a layout."""

    needs: LayerNeeds
    kept: States
    shards: Shards
    pp: int
    vpp: int
    microbatches: int
    first: int = 0
    """The model's first layers, if they are of another kind."""

    @property
    def states(self) -> float:
        """Bytes of a layer."""
        return self.states_as(self.kept)

    def states_as(self, kept: States) -> float:
        """The same, kept in another way."""
        needs, shards = self.needs, self.shards
        return kept.of(needs.elements - needs.experts, shards.layers) + kept.of(needs.experts, shards.experts)

    @property
    def dense_states(self) -> float:
        """And of one of the first."""
        return self.kept.of(self.needs.dense_elements, self.shards.layers)


def at_least(load: Load, stages: tuple[StageLoad, ...]) -> int:
    """Bytes of the fullest stage."""
    states, saved = load.states, load.needs.saved
    if not load.first:
        return int(max(one.layers * states + one.flying[0][0] * saved for one in stages))
    dense, dense_saved = load.dense_states, load.needs.dense_saved
    return int(
        max(
            one.layers * states
            + one.dense * dense
            + min(flying * saved + others * dense_saved for flying, others in one.flying)
            for one in stages
        )
    )


def at_best(load: Load, layers: int) -> float:
    """Bytes of the fullest stage of whatever cut.

    A stage with n layers in v chunks has f passes in flight of chunks with (n - v + 1) / v layers or more, so it needs
    n A + f (n - v + 1) / v S bytes, A for the states of a layer and S for what it saves. If none has more than M bytes,
    a stage holds at most (M + f (v - 1) / v S) / (A + f / v S) of the layers. These add up to all of them, which gives
    the least M. Of layers of two kinds those with experts are counted alone.
    """
    return _at_best(load, load.states, saved_in_flight(load), layers)


def saved_in_flight(load: Load) -> list[float]:
    """f / v S of every stage."""
    needs = load.needs
    flying = [passes * needs.saved for passes in _for_each_chunk(load.pp, load.vpp, load.microbatches)]
    if load.first and load.vpp > 1:  # a chunk of the first stages may hold the model's first layers alone
        mixed = _for_each_chunk(load.pp, load.vpp, load.microbatches)[: load.first + 1]
        flying[: load.first + 1] = [passes * min(needs.saved, needs.dense_saved) for passes in mixed]
    return flying


def _at_best(load: Load, states: float, flying: Sequence[float], layers: int) -> float:
    held = [1 / (states + one) for one in flying]
    free = (load.vpp - 1) * sum(map(mul, flying, held)) if load.vpp > 1 else 0
    return (layers - load.first - free) / sum(held)


@lru_cache(maxsize=1 << 14)
def _for_each_chunk(pp: int, vpp: int, microbatches: int) -> tuple[float, ...]:
    """Of every stage, ``flights`` for each of its chunks."""
    return tuple(flights(pp, vpp, microbatches, stage) / vpp for stage in range(pp))


def least_of(load: Load, beside: Beside) -> Callable[[int, Sequence[ChunkLayers]], float]:
    """Of a stage and what it holds: its bytes when its first backward pass begins, that is through its last chunk."""
    states, dense_states, saved, dense_saved = load.states, load.dense_states, load.needs.saved, load.needs.dense_saved

    def least(stage: int, cut: Sequence[ChunkLayers]) -> float:
        ends, held = cut[0].embedding * beside.embedding + cut[-1].head * beside.head, 0.0
        if ends:
            held = load.kept.of(ends, load.shards.layers)
        for chunk, passes in zip(cut, flying(load.pp, load.vpp, load.microbatches, stage), strict=True):
            held += (chunk.layers - chunk.dense) * (states + passes * saved)
            if chunk.dense:
                held += chunk.dense * (dense_states + passes * dense_saved)
        return held + (beside.turn if cut[-1].layers > cut[-1].dense else 0)

    return least


def fewest_recomputed(plain: Load, full: Load, cut: StageLayers, limit: int) -> int:
    """At least so many layers of every chunk must be recomputed if no stage is to need more than ``limit`` bytes."""
    most = max(chunk.layers for stage in cut for chunk in stage)
    for count in range(1, most + 1):
        needed = 0.0
        for at, stage in enumerate(cut):
            passes = flights(plain.pp, plain.vpp, plain.microbatches, at)
            saved = min(_saved(plain.needs, full.needs, chunk, count) for chunk in stage)
            dense = sum(chunk.dense for chunk in stage)
            kept = (_layers(stage) - dense) * plain.states + dense * plain.dense_states
            needed = max(needed, kept + passes * saved)
        if needed <= limit:
            return count
    return most


def _saved(plain: LayerNeeds, full: LayerNeeds, chunk: ChunkLayers, count: int) -> int:
    """What a pass of ``chunk`` saves, whose first ``count`` layers are recomputed."""
    again = min(chunk.layers, count)
    dense, experts = chunk.dense, chunk.layers - chunk.dense
    of_dense = min(dense, again)
    of_experts = again - of_dense
    saved = (experts - of_experts) * plain.saved + of_experts * full.saved
    return saved + (dense - of_dense) * plain.dense_saved + of_dense * full.dense_saved


class Needs:
    """What the points of one space need at least, in bytes of the fullest stage; of more than ``enough`` bytes, where
    nobody chooses cuts, ``floors`` may be any number above them."""

    def __init__(self, space: Space, enough: int = UNBOUNDED) -> None:
        self.space, self.enough = space, enough
        self.search, self._first = space.search, space.first
        self._layers: dict[object, LayerNeeds] = {}
        self._states: dict[object, States] = {}
        self._besides: dict[object, Beside] = {}
        self._loads: dict[tuple[int, int], tuple[StageLayers, tuple[StageLoad, ...]]] = {}
        """By the cut's object, which is as long as its key, and micro-batches."""
        self._uncut = (stage_layers(0, 1, (space.base.model.layers,), space.first),)
        self._bounds = space.search.lower_bounds(space)
        self._saved: dict[object, float] = {}

    def floor(self, point: Point, cut: StageLayers) -> int:
        """Of ``point`` with ``cut``, however much that is."""
        return next(self.floors((point,), cut)) if self.search.chooses_cut else self._bounds(point)

    def floors(self, points: Sequence[Point], cut: StageLayers) -> Iterator[int]:
        """Of ``points`` with ``cut``, which differ in what is kept alone where the search chooses cuts."""
        if not self.search.chooses_cut:
            yield from (self._bounds(point, self.enough) for point in points)
            return
        load = self.load(points[0])
        key = (id(cut), load.microbatches)
        stages = self._loads.get(key)
        if stages is None:
            stages = self._loads[key] = cut, loads(cut, load.microbatches)
        known: dict[States, int] = {}
        for kept in map(self.states, points):
            if kept not in known:
                known[kept] = at_least(load._replace(kept=kept), stages[1])
            yield known[kept]

    def of_any_cut(self, points: Sequence[Point]) -> list[int]:
        """Of each of ``points``, which differ in what is kept alone, in whatever cut; on one stage there is but one."""
        if not points:
            return []
        if points[0].pp == 1:
            return list(self.floors(points, self._uncut))
        load, layers = self.load(points[0]), self.space.base.model.layers
        flying, known, found = saved_in_flight(load), dict[States, int](), list[int]()
        for kept in map(self.states, points):
            if kept not in known:
                known[kept] = int(_at_best(load, load.states_as(kept), flying, layers))
            found.append(known[kept])
        return found

    def load(self, point: Point) -> Load:
        """What decides them, whatever the cut."""
        sizes = point.pp, point.vpp, self.space.microbatches(point)
        return Load(self._layer(point), self.states(point), Shards.of(point), *sizes, self._first)

    def at_best(self, point: Point) -> float:
        """Of whatever cut."""
        return at_best(self.load(point), self.space.base.model.layers)

    def saved(self, point: Point) -> float:
        """Of whatever cut, while a checkpoint is saved: the fullest stage holds no less than the mean of all, and
        layers are not all that stages hold. 0 where a checkpoint copies nothing, or that is not known."""
        if not self.search.bounds_layers:
            return self._bounds.saved(point)
        if not self.states(point).copied:
            return 0.0
        key = (point.tp, point.cp, point.pp, point.dp, point.ep, point.etp, point.zero, point.extras)
        if key not in self._saved:
            load = self.load(point)
            load = load._replace(kept=load.kept.saved)
            layers = self.space.base.model.layers - load.first
            self._saved[key] = (layers * load.states + load.first * load.dense_states) / load.pp
        return self._saved[key]

    def keeping(self, point: Point, limit: int) -> Holds:
        """Whether a stage of ``point`` with some cut may keep to ``limit`` bytes, for all that a bound says."""
        least = least_of(self.load(point), self._beside(point))
        return lambda stage, cut: least(stage, cut) <= limit

    def _beside(self, point: Point) -> Beside:
        """Of one sequence; more take no less."""
        key = (point.tp, point.cp, point.ep, point.etp, point.recompute)
        if key not in self._besides:
            alone = point._replace(mbs=1, zero=self.space.least_zero, extras=())
            self._besides[key] = self.search.beside_layers(self.space.alone(alone))
        return self._besides[key]

    def _layer(self, point: Point) -> LayerNeeds:
        key = (point.tp, point.cp, point.ep, point.etp, point.recompute, point.mbs)
        known = self._layers.get(key)
        if known is None:
            one = (*key[:-2], point.recompute.kind)
            if one not in self._layers:
                alone = self.space.alone(point._replace(mbs=1, zero=self.space.least_zero, extras=()))
                self._layers[one] = self.search.layer_needs(alone)
            known = self._layers[key] = scaled(self._layers[one], point.mbs)
        return known

    def states(self, point: Point) -> States:
        """How its states are kept."""
        key = (point.zero, point.extras)
        if key not in self._states:
            self._states[key] = self.search.states(self.space.alone(point._replace(mbs=1)))
        return self._states[key]


# -- where nobody chooses cuts ---------------------------------------------------------------------------

EXACT = 4
"""Sequences up to which a micro-batch is folded; what more of them take lies above a line."""

TENSORS = 64
"""More than are alive at once of one layer."""


class Kept(NamedTuple):
    """Bytes of one rank that do not depend on the micro-batch."""

    static: int
    """Between iterations."""
    gradients: int
    """What every micro-batch but the first finds beside that."""
    step: int
    """The largest that the optimizer's step takes beside what is static, gradients among it."""


NONE = Kept(0, 0, 0)


@dataclass(slots=True)
class Growing:
    """Bytes that a micro-batch of so many sequences takes at least, from a function that folds it.

    The peak of a stretch of a pass is the largest of sums of tensors, the same tensors from two sequences on; each is
    of the same size for any number of them or in proportion to it. So but for rounding it is a convex function of the
    number, and beyond ``EXACT`` it lies above the line through 2 and ``EXACT``. Rounding takes less than 512 bytes of
    each tensor away from that for every sequence (``rounded(2 x) <= 2 rounded(x)``). Of several stretches the largest
    line counts: what is large of few sequences need not be what grows.
    """

    measured: Callable[[int], tuple[int, ...]]
    """Peaks of stretches, of so many sequences."""
    tensors: int
    """As many are alive at once, at most."""
    known: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def at(self, sequences: int, enough: int = UNBOUNDED) -> int:
        """Where that is more than ``enough``, what fewer sequences take may stand for it: more take no less."""
        fewer = max((max(peaks) for count, peaks in self.known.items() if count < sequences), default=0)
        if fewer > enough:
            return fewer
        if sequences <= EXACT:
            return max(self._measured(sequences))
        two = self._measured(2)
        if max(two) > enough:
            return max(two)
        most = self._measured(EXACT)
        line = max(low + (sequences - 2) * (high - low) // (EXACT - 2) for low, high in zip(two, most, strict=True))
        return max(*most, line - ROUND * self.tensors * sequences)

    def _measured(self, sequences: int) -> tuple[int, ...]:
        if sequences not in self.known:
            self.known[sequences] = self.measured(sequences)
        return self.known[sequences]


def raised(excursion: Excursion, size: int) -> Excursion:
    """``excursion`` while ``size`` bytes more are held."""
    return replace(excursion, peak=excursion.peak + size) if size else excursion


def peaks(excursions: Sequence[Excursion], early: int) -> tuple[int, int]:
    """Of the first ``early`` ones, one after the other, and of all; what each is for does not matter."""
    level = most = before = 0
    for at, one in enumerate(excursions):
        before = most if at == early else before
        most = max(most, level + one.peak)
        level += one.net
    return before, most


class LowerBounds:
    """Of the points of one space. A framework's room says by other methods what its code keeps and passes."""

    passes_depend_on_zero = False
    """What a micro-batch takes depends on the ZeRO stage."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._kept: dict[object, Kept] = {}
        self._passing: dict[object, Growing] = {}

    def __call__(self, point: Point, enough: int = UNBOUNDED) -> int:
        """Bytes that the fullest rank requests at least, or some number above ``enough`` that it requests; 0 where
        nothing is known."""
        if isinstance(self.space.base.model, TracedSpec):
            return 0
        try:
            return self.least(point, enough)
        except PlanError:
            return 0  # the layout itself is refused when it is built, or another one that stands for it

    def saved(self, point: Point) -> float:
        """While a checkpoint is saved; 0 where nothing is known."""
        return 0.0

    def kept(self, plan: ResolvedPlan) -> Kept:
        """Of a resolved plan; inputs, which depend on the micro-batch, are left out."""
        program, folded = _folded(plan)
        inputs = static(program).net_by[Category.INPUTS]
        return Kept(folded.static - inputs, 0, folded.step_peak - folded.static)

    def passing(self, plan: ResolvedPlan, accumulates: bool) -> tuple[int, ...]:
        """What all micro-batches of a resolved plan take beside what is static, their gradients among it: until a layer
        has gone backward in the last one, and to the end. It has two of them where it ``accumulates``."""
        program, folded = _folded(plan)
        modules = [span.module for span in program.last or program.spans for _ in span.names]
        tapes = [one.steady if accumulates else one.first for one in modules]
        last = max(at for at, one in enumerate(modules) if one.name == "layer")
        forward = [one.forward_fold for one in tapes] + [one.end_fold for one in tapes]
        back = [*forward, *(one.backward_fold for one in reversed(tapes))]
        early, _ = peaks(back, len(forward) + len(tapes) - last)
        gradients = first_backward(program.spans).net_by[Category.GRADIENTS] if accumulates else 0
        return gradients + early, folded.backward_peak - folded.static

    def regroups(self, extra: Extra) -> bool:
        """Whether what ``extra`` moves is held in passes, too."""
        return False

    def least(self, point: Point, enough: int) -> int:
        """Passes are looked at only where what is there anyway is not too much."""
        accumulates, kept = self.space.microbatches(point) > 1, self._kept_of(point)
        held, stepping = kept.static + (kept.gradients if accumulates else 0), kept.static + kept.step
        if max(held, stepping) > enough:
            return max(held, stepping)
        return max(held + self._passing_of(point, accumulates).at(point.mbs, enough - held), stepping)

    def _kept_of(self, point: Point) -> Kept:
        extras = tuple(extra for extra in point.extras if not extra.changes_passes)
        key = (point.tp, point.ep, point.etp, point.dp, point.zero, extras)
        if key not in self._kept:
            self._kept[key] = NONE
            alone = point._replace(mbs=1, recompute=NO_RECOMPUTE, extras=extras)
            self._kept[key] = self.kept(self.plan(alone, 1, False))
        return self._kept[key]

    def _passing_of(self, point: Point, accumulates: bool) -> Growing:
        extras = tuple(extra for extra in point.extras if extra.changes_passes or self.regroups(extra))
        zero = point.zero if self.passes_depend_on_zero else self.space.least_zero
        key = (point.tp, point.ep, point.etp, point.dp, zero, point.recompute, extras, accumulates)
        if key not in self._passing:
            alone = point._replace(zero=zero, extras=extras)
            self._passing[key] = Growing(
                lambda sequences: self.passing(self.plan(alone, sequences, accumulates), accumulates),
                TENSORS * (self.space.base.model.layers + 4),
            )
        return self._passing[key]

    def plan(
        self, point: Point, sequences: int, accumulates: bool, fields: Mapping[str, Any] | None = None
    ) -> ResolvedPlan:
        """``point`` with so many sequences in a micro-batch and one or two of those, resolved."""
        plan = self.space.plan(point, fields)
        gbs = sequences * point.dp * (2 if accumulates else 1)
        batch = plan.batch.model_copy(update={"mbs": sequences, "gbs": gbs})
        return resolve(plan.model_copy(update={"batch": batch}))


def _folded(plan: ResolvedPlan) -> tuple[Program, Folded]:
    (program,) = programs_of(plan, Options())
    return program, fold_program(program)
