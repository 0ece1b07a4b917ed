"""One iteration of Megatron-Core on one rank, folded: passes of every chunk, and tensors between stages.

``fold_iteration`` gives the same excursion as composing every event of ``megatron_schedule.trace``
(``composed``), from a few candidates. Before a pass, a rank holds what its micro-batches in flight saved
and so many tensors between stages: a vector of counts. Vectors repeat with the period of the
schedule, and of those in front of the same pass only the largest can carry the peak, so they are
found once per schedule and only multiplied with bytes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from operator import add, mul

from ..tape.events import NOTHING, ROUND, ZERO, Bytes, Category, Excursion, Hold, change
from ..tape.program import Action, Chunk, Exchanged, Passes, Role
from ..values import NamedTuple, dataclass, replace
from .megatron_interleaved import table
from .megatron_schedule import KINDS, Kind, Schedule, trace

DEFERRED, RECEIVED, DETACHED = "deferred_gradient", "gradients_received", "detached_hidden"

CATEGORIES: dict[str, Category] = {
    DEFERRED: Category.LOGITS,
    RECEIVED: Category.COMMUNICATION_BUFFERS,
    DETACHED: Category.ACTIVATIONS,
    "input": Category.ACTIVATIONS,
    "output": Category.ACTIVATIONS,
    "stub": Category.ACTIVATIONS,
    "output_grad": Category.COMMUNICATION_BUFFERS,
    "input_grad": Category.TEMPORARIES,
    "report": Category.BUFFERS,
}
"""What a tensor between stages counts as. ``output`` and ``input_grad`` are held by the passes that
make them, so there these must be their categories, too."""

NAMES: dict[str, str] = {
    "input": "received_input",
    "output_grad": "received_gradient",
    "stub": "output_sent",
    "report": "loss_report",
}


MADE: tuple[Kind, ...] = ("output", "input_grad")
"""Tensors that passes make."""

SENT: tuple[Kind, ...] = ("output", "output_grad")
"""Tensors on the way between a chunk and the next."""

PASSES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of tensors between stages, rounded."""

    hidden: int
    """A hidden state of shape (s/cp[/t], b, h) in ``pipeline_dtype``, and its gradient."""
    stub: int = ROUND
    report: int = ROUND
    edges: tuple[tuple[int, int], ...] = ()
    """What each chunk receives and what it sends, where not all are ``hidden``."""

    def of(self, kind: str, chunk: int) -> int:
        if kind in SIZED:
            return self.stub if kind == "stub" else self.report
        return self.edges[chunk][kind in SENT] if self.edges else self.hidden


def composed(
    plan: Schedule, chunks: tuple[Passes, ...], sizes: Sizes, first: tuple[Passes, ...] | None = None
) -> Excursion:
    """An iteration, event by event. What ``fold_iteration`` must equal; with ``first`` passes of the first
    micro-batch, if they are others."""
    total = ZERO
    at = "0/forward"
    inside = False
    for what, chunk, number, tensor in trace(plan):
        if tensor is not None:
            size = sizes.of(tensor, chunk) if what == "begin" else -sizes.of(tensor, chunk)
            if not (inside and tensor in MADE):
                total = total.then(change(size, CATEGORIES[tensor], f"{at}/pipeline/{NAMES.get(tensor, '')}"))
            inside = False
        elif what in PASSES:
            own = first if first is not None and not number else chunks
            passes = own[chunk].forward if what == "forward" else own[chunk].backward
            total = total.then(passes.within(str(number)))
            at, inside = f"{number}/{what}", True
    return total


# -- counts ---------------------------------------------------------------------------------------------


def _period(plan: Schedule) -> tuple[int, int]:
    """Micro-batches after which the steady phase repeats, and the periods that forward passes take to get there."""
    step = 1 if plan.chunks == 1 else plan.group
    return step, -(-plan.warmup // (step * plan.chunks))


SETTLING = 2
"""Periods until the steady phase repeats, beyond the ramp: chunks keep their last input beyond its backward."""


def reduced(plan: Schedule, *, reports: bool = True) -> Schedule:
    """The schedule without most repetitions of its steady phase. Behind those until it repeats one period is left, of
    one micro-batch two; and one more where ``reports`` of losses add up, so that each moment comes once again."""
    step, ramp = _period(plan)
    ending = 2 if plan.chunks == 1 or (reports and plan.last) else 1
    kept = plan.microbatches % step + (ramp + SETTLING + ending) * step
    return plan if plan.microbatches <= kept else replace(plan, microbatches=kept)


@lru_cache(maxsize=1 << 14)
def most_in_flight(plan: Schedule) -> tuple[int, ...]:
    """Micro-batches whose activations each chunk holds at once, at most."""
    forward, last, warmup = [chunk for _, chunk in table(reduced(plan))], plan.chunks - 1, plan.warmup
    held, most = [0] * plan.chunks, [0] * plan.chunks
    for k, chunk in enumerate(forward):
        held[chunk] += 1
        most[chunk] = max(most[chunk], held[chunk])
        if k >= warmup:
            held[last - forward[k - warmup]] -= 1
    return tuple(most)


def layers_in_flight(plan: Schedule, layers: Sequence[int]) -> int:
    """Layers between their forward and their backward at once, at most, where each chunk has so many."""
    short = reduced(plan)
    forward, last = [chunk for _, chunk in table(short)], plan.chunks - 1
    held = most = 0
    for at, chunk in enumerate(forward):
        held += layers[chunk]
        most = max(most, held)
        if at >= short.warmup:
            held -= layers[last - forward[at - short.warmup]]
    return most


def graphed_in_flight(plan: Schedule, layers: Sequence[int]) -> int:
    """The same as CUDA graphs are captured: beside one another in the usual order, a layer forward before one backward
    (``TECudaGraphHelper._get_cuda_graph_input_data``, ``get_overlap_moe_expert_parallel_comm_order``)."""
    usual = replace(plan, beside=False)
    turns = plan.beside and plan.microbatches * plan.chunks > usual.warmup + 1
    return layers_in_flight(usual, layers) + (turns and sum(layers) > 0)


_COUNT = 24
"""Bits by which one count is told from the next where several are packed into a number."""
SIZED: dict[str, int] = {"stub": 1, "report": 2}
"""Which size of a tensor between stages counts, behind those of hidden states."""


class _Row(NamedTuple):
    """A candidate: a moment at which something may peak, and that no other exceeds in every count."""

    source: int
    """2j and 2j + 1: forward and backward of class j; then a tensor between stages."""
    counts: tuple[int, ...]
    """In flight by class, hidden states, stubs, reports."""
    kinds: tuple[int, ...]
    """Tensors between stages, by ``KINDS``, more than when the iteration began."""
    chunk: int
    """Of the pass;"""
    tensor: str | None
    """or what begins,"""
    phase: str
    """behind which pass,"""
    microbatch: int
    """of which micro-batch."""
    repeats: bool
    """Behind the repetitions that ``reduced`` leaves out."""


Pattern = tuple[int, ...]
"""By chunk, the first chunk that is the same."""


@lru_cache(maxsize=1 << 14)
def _rows(plan: Schedule, pattern: Pattern, weightless: frozenset[int]) -> tuple[_Row, ...]:
    """Candidates in order of appearance. Counts of ``weightless`` classes do not tell two apart."""
    short = reduced(plan)
    if short == plan:
        return _pruned_rows(plan, pattern, weightless)
    shift = plan.microbatches - short.microbatches
    reports = shift if plan.last else 0
    return tuple(
        row._replace(
            counts=(*row.counts[:-1], row.counts[-1] + reports),
            kinds=(*row.kinds[:-1], row.kinds[-1] + reports),
            microbatch=row.microbatch + shift,
        )
        if row.repeats
        else row
        for row in _pruned_rows(short, pattern, weightless)
    )


@lru_cache(maxsize=1 << 12)
def _pruned_rows(plan: Schedule, pattern: Pattern, weightless: frozenset[int]) -> tuple[_Row, ...]:
    """Of a reduced schedule. Of moments with the same counts, the first."""
    classes = sorted(set(pattern))
    number = [classes.index(first) for first in pattern]
    edge = len(classes)
    index: dict[str, int] = {kind: i for i, kind in enumerate(KINDS)}
    place = [edge + SIZED.get(kind, 0) for kind in KINDS]
    packed = [0 if i in weightless else 1 << _COUNT * i for i in range(edge + 3)]
    counts, kinds = [0] * (edge + 3), [0] * len(KINDS)
    told = _each_field(edge + 3, _COUNT - 2)
    """All of ``counts`` that tell, packed, above what keeps negative ones from borrowing of their neighbours."""
    best: list[dict[int, _Row]] = [{} for _ in range(2 * edge + 1)]
    found: list[_Row] = []
    phase, microbatch = "forward", 0
    step, ramp = _period(plan)
    steady = plan.microbatches // step * step * plan.chunks - plan.warmup
    early = min((ramp + SETTLING) * step * plan.chunks, steady)
    """Backward passes until the first that may come behind the repetitions."""
    inside = False
    for what, chunk, at, tensor in trace(plan):
        if tensor is not None:
            kind = index[tensor]
            one, source = place[kind], 2 * edge
            sign = 1 if what == "begin" else -1
            kinds[kind] += sign
            counts[one] += sign
            told += sign * packed[one]
            if sign > 0 and not (inside and tensor in MADE) and told not in best[source]:
                row = _Row(source, tuple(counts), tuple(kinds), 0, tensor, phase, microbatch, early < 0)
                best[source][told] = row
                found.append(row)
            inside = False
        elif what in PASSES:
            phase, microbatch = what, at
            one = number[chunk]
            sign = 1 if what == "forward" else -1
            source = 2 * one + (sign < 0)
            if told not in best[source]:
                row = _Row(source, tuple(counts), tuple(kinds), chunk, None, phase, at, early < 0)
                best[source][told] = row
                found.append(row)
            counts[one] += sign
            told += sign * packed[one]
            inside = True
            early -= sign < 0
    kept = {id(row) for rows in best for row in _front(rows, edge + 3)}
    return tuple([row for row in found if id(row) in kept])


def _each_field(fields: int, bit: int) -> int:
    """A number with one bit of each packed count."""
    return sum(1 << _COUNT * field + bit for field in range(fields))


def _front(rows: dict[int, _Row], fields: int) -> list[_Row]:
    """Those of so many packed counts that no other's are at least equal to in each."""
    top = _each_field(fields, _COUNT - 1)
    front: list[int] = []
    for told in sorted(rows, reverse=True):
        for at, other in enumerate(front):
            if (top + other - told) & top == top:  # no field of ``other`` is the smaller one and takes its top bit
                front.insert(0, front.pop(at))  # one that exceeds many is tried first
                break
        else:
            front.append(told)
    return [rows[told] for told in front]


# -- bytes ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def saved_by_flight(passes: Passes, sends: bool, receives: bool, hidden: int) -> tuple[int, Bytes] | None:
    """Bytes that a micro-batch in flight holds besides tensors between stages; ``None`` if backward leaves others."""
    output = change(-hidden * sends, CATEGORIES["output"])
    gradient = change(-hidden * receives, CATEGORIES["input_grad"])
    saved = Excursion(
        passes.forward.net + output.net, 0, tuple(map(add, passes.forward.net_by, output.net_by)), NOTHING
    )
    left = tuple(map(add, map(add, passes.backward.net_by, gradient.net_by), saved.net_by))
    return (saved.net, saved.net_by) if left == NOTHING and saved.net >= 0 else None


@lru_cache(maxsize=1 << 14)
def fold_iteration(plan: Schedule, chunks: tuple[Passes, ...], sizes: Sizes) -> Excursion:
    """The excursion of a steady iteration up to the return of ``forward_backward_func``.

    It begins with what the iteration before left (the last input of every chunk that receives one, and its gradient;
    ``TransformerBlock.input_tensor`` is only replaced by the next forward), and leaves that and the reports. The
    place begins with the micro-batch: ``5/backward/layer.3/…``, or ``5/forward/pipeline/received_input``.
    """
    pattern = tuple(map(chunks.index, chunks))
    weights: list[int] = []
    saved_by: list[Bytes] = []
    peaks: list[int] = []
    hidden = sizes.hidden
    for chunk, first in enumerate(pattern):
        passes = chunks[chunk]
        saved = saved_by_flight(passes, plan.sends(chunk), plan.receives(chunk), hidden)
        if saved is None:
            return composed(plan, chunks, sizes)
        if chunk == first:
            weights.append(saved[0])
            saved_by.append(saved[1])
            peaks += (passes.forward.peak, passes.backward.peak)
    weightless = frozenset(i for i, weight in enumerate(weights) if not weight) if 0 in weights else frozenset()
    weights += (hidden, sizes.stub, sizes.report)
    peaks.append(0)
    most, winner = 0, None
    for row in _rows(plan, pattern, weightless):
        value = sum(map(mul, row[1], weights)) + peaks[row[0]]
        if value > most:
            most, winner = value, row
    reports = plan.microbatches if plan.last else 0
    net = reports * sizes.report
    net_by = change(net, CATEGORIES["report"]).net_by
    if winner is None:
        return Excursion(net, 0, net_by)
    peak_by, place = _described(winner, chunks, saved_by, sizes)
    return Excursion(net, most, net_by, peak_by, place)


def _described(row: _Row, chunks: tuple[Passes, ...], saved_by: list[Bytes], sizes: Sizes) -> tuple[Bytes, str]:
    """Bytes by category, and the place of a peak."""
    at: Excursion | None = None
    if row.tensor is None:
        passes = chunks[row.chunk]
        at = passes.forward if row.phase == "forward" else passes.backward
    by = list(at.peak_by if at else NOTHING)
    for count, saved in zip(row.counts, saved_by, strict=False):
        if count:
            for category, size in enumerate(saved):
                if size:
                    by[category] += count * size
    for kind, count in zip(KINDS, row.kinds, strict=True):
        by[CATEGORIES[kind]] += count * sizes.of(kind, 0)
    if at is None:
        return tuple(by), f"{row.microbatch}/{row.phase}/pipeline/{NAMES[row.tensor or '']}"
    return tuple(by), f"{row.microbatch}/{at.place}"


# -- on a rank ------------------------------------------------------------------------------------------

EXCHANGED = Exchanged(numbered=MADE, renumbered=("input", "input_grad"), until_step=("report",))


@dataclass(frozen=True)
class MegatronOrder:
    """Chunks of layers, the schedule that runs them, and the hidden states that they exchange."""

    schedule: Schedule
    chunks: tuple[Chunk, ...]
    hidden: int
    """Bytes of a hidden state between stages, rounded."""
    edges: tuple[tuple[int, int], ...] = ()
    """Of what each chunk receives and what it sends, where not all are that: behind multi-token prediction in a stage
    before the last."""
    deferred: tuple[int, int] = (0, 0)
    """Micro-batches whose gradients of logits wait for their products with the head's input, beside the one at hand,
    and bytes of both."""
    received: int = 0
    """Bytes of a bucket of gradients that arrives, to be summed, while passes run."""
    detached: int = 0
    """Bytes of a hidden state, and of its gradient, that the graph of the micro-batch before holds."""
    exchanged = EXCHANGED

    @property
    def microbatches(self) -> int:
        return self.schedule.microbatches

    @property
    def in_flight(self) -> int:
        return max(most_in_flight(self.schedule))

    @property
    def sizes(self) -> Sizes:
        """Bytes of the tensors that the schedule exchanges, by kind."""
        return Sizes(self.hidden, edges=self.edges)

    @cached_property
    def whole(self) -> Excursion:
        """Up to the return of the schedule: the reports of losses end with the step."""
        whole = self._passes
        for kind, count in self._throughout:
            size = count * self.begun(0, kind).bytes
            whole = change(size, CATEGORIES[kind]).then(whole).then(change(-size, CATEGORIES[kind]))
        return whole

    @property
    def _throughout(self) -> list[tuple[str, int]]:
        """Kinds and numbers of tensors that are held while passes run."""
        found = [(DEFERRED, self.deferred[0]), (RECEIVED, int(self.received > 0)), (DETACHED, int(self.detached > 0))]
        return [(kind, count) for kind, count in found if count]

    @property
    def _passes(self) -> Excursion:
        passes = tuple([chunk.passes for chunk in self.chunks])
        if not self.first_differs and not self.edges:
            return fold_iteration(self.schedule, passes, self.sizes)
        short = reduced(self.schedule)
        left_out = (self.schedule.microbatches - short.microbatches) * self.sizes.report * self.schedule.last
        first = tuple([chunk.first_passes for chunk in self.chunks])
        return change(left_out, CATEGORIES["report"]).then(composed(short, passes, self.sizes, first))

    @cached_property
    def first_differs(self) -> bool:
        """The first micro-batch saves other tensors."""
        return any(chunk.first_differs for chunk in self.chunks)

    @property
    def after_forward(self) -> int:
        return self.chunks[0].passes.forward.net

    @property
    def carried(self) -> Excursion:
        """What outlives the schedule: the last input of every chunk that receives one, with its gradient."""
        received = [self.sizes.of("input", chunk) for chunk in range(self.schedule.first, self.schedule.chunks)]
        return _carried(sum(received))

    @property
    def shortened(self) -> list[Action]:
        """As ``reduced``; reports of losses that are left out are there from the beginning."""
        plan = self.schedule
        short = reduced(plan, reports=False)
        reports = plan.microbatches - short.microbatches if plan.last else 0
        run = [action for action in trace(short) if action.what != "reduce"]
        for kind, count in self._throughout:
            run = [Action("begin_all", 0, count, kind), *run, Action("end_all", 0, count, kind)]
        return [Action("begin_all", 0, reports, "report"), *run] if reports else run

    def role(self, microbatch: int) -> Role:
        return "first" if self.first_differs and not microbatch else "steady"

    def begun(self, chunk: int, tensor: str) -> Hold:
        known = {DEFERRED: self.deferred[1], RECEIVED: self.received, DETACHED: self.detached}
        size = known[tensor] if tensor in known else self.sizes.of(tensor, chunk)
        return Hold(0, size, CATEGORIES[tensor])


@lru_cache(maxsize=4096)
def _carried(received: int) -> Excursion:
    inputs = change(received, Category.ACTIVATIONS, "input_tensor")
    return inputs.then(change(received, Category.TEMPORARIES, "input_tensor_grad"))
