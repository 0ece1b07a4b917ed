"""What one rank does in one iteration, and its fold: static memory, micro-batches, optimizer step.

A program is written by a framework, folded by the estimate (and the search), and unrolled into a
tape of events where the allocator replays it. Peaks of both are of the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

from .frameworks.states import State
from .layers.module import Module, Parameter
from .pipeline.megatron_fold import ChunkPasses, Sizes, fold_iteration, most_in_flight
from .pipeline.megatron_schedule import Schedule
from .pipeline.schedule import Passes
from .pipeline.schedule import fold_iteration as fold_one_chunk
from .plan.plan import Plan
from .tape import (
    NOTHING,
    Bytes,
    Category,
    Drop,
    Excursion,
    Hold,
    Stretch,
    Tape,
    change,
    compose,
    fold_once,
)
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class Span:
    """A module, or several equal ones in a row."""

    module: Module
    names: tuple[str, ...]

    @property
    def forward(self) -> Excursion:
        return self._named(self.module.steady.forward_fold, "forward", len(self.names) - 1)

    @property
    def end(self) -> Excursion:
        """What every module drops once the model's forward has ended."""
        return self._named(self.module.steady.end_fold, "forward", len(self.names) - 1)

    def backward(self, first: bool) -> Excursion:
        """The modules run last to first; a peak of growing memory is in the last one to run."""
        tapes = self.module.first if first else self.module.steady
        return self._named(tapes.backward_fold, "backward", 0)

    def evaluation(self) -> Excursion:
        return self._named(self.module.evaluation_fold, "forward", len(self.names) - 1)

    def _named(self, excursion: Excursion, phase: str, last: int) -> Excursion:
        at = last if excursion.net > 0 else len(self.names) - 1 - last
        return excursion.times(len(self.names)).within(f"{phase}/{self.names[at]}")


SLOT = "logits_of_slot"
"""Name of a static tensor that lies in a slot until a micro-batch displaces it."""


class Gradients(Enum):
    """When the gradients that backward leaves behind end."""

    ACCUMULATE = "after the step"
    """They are added to by every micro-batch and end with the step (``zero_grad(set_to_none=True)``)."""
    PER_MICROBATCH = "after each backward"
    """They are moved into a static buffer behind every backward pass."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What a rank keeps, as tapes of holds without drops, but for those of temporaries."""

    construction: Stretch
    """Parameters, buffers and main parameters, in the order in which they are made."""
    states: Stretch
    """What the first step adds for good."""
    step: Stretch
    """What every step takes, for a while or until ``carried`` ends."""
    carried: Stretch
    """The part of ``step`` that is left until the next iteration begins."""
    workspaces: Stretch
    """What libraries take in the first iteration, for good."""

    @cached_property
    def between(self) -> Excursion:
        """What is held between iterations."""
        parts = (self.construction, self.states, self.carried, self.workspaces)
        by = tuple(map(sum, zip(*(part.excursion.net_by for part in parts), strict=True)))
        return Excursion(sum(by), sum(by), by, by, "static")

    @cached_property
    def during(self) -> Excursion:
        """What is held throughout micro-batches: all but what ends when they begin."""
        ended = self.carried.excursion
        by = tuple(map(int.__sub__, self.between.net_by, ended.net_by))
        return Excursion(sum(by), sum(by), by, by, "static")

    @cached_property
    def optimizer(self) -> Excursion:
        """The step."""
        return self.step.excursion.within("step/optimizer")


@dataclass(frozen=True, eq=False)
class Chunk:
    """Modules of one virtual stage, in order. Equal chunks should be one object."""

    spans: tuple[Span, ...]

    @cached_property
    def passes(self) -> ChunkPasses:
        """One micro-batch through the chunk, whose gradients go into a buffer."""
        return ChunkPasses(
            compose(span.forward for span in self.spans),
            compose(span.backward(False) for span in reversed(self.spans)),
        )


@dataclass(frozen=True, slots=True)
class Order:
    """Chunks of layers, the schedule that runs them, and the hidden states that they exchange."""

    schedule: Schedule
    chunks: tuple[Chunk, ...]
    """Virtual stages of the rank, first to last."""
    exchanged: int
    """Bytes of a hidden state between stages, rounded."""

    @property
    def sizes(self) -> Sizes:
        """Bytes of the tensors that the schedule exchanges, by kind."""
        return Sizes(self.exchanged)

    @property
    def retained(self) -> Excursion:
        """What outlives the schedule: the last input of every chunk that receives one, with its gradient."""
        return _retained(self.schedule.chunks - self.schedule.first, self.exchanged)


@lru_cache(maxsize=4096)
def _retained(receiving: int, size: int) -> Excursion:
    inputs = change(receiving * size, Category.ACTIVATIONS, "input_tensor")
    return inputs.then(change(receiving * size, Category.TEMPORARIES, "input_tensor_grad"))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One rank's iteration."""

    stage: int
    ranks: tuple[int, ...]
    entries: tuple[str, ...]
    """Names of the entries of the layer list that this stage holds."""
    spans: tuple[Span, ...]
    states: tuple[State, ...]
    """Kept for every parameter of every module."""
    extra: tuple[Hold, ...]
    """Kept besides: flat buffers, inputs, communication buffers, workspaces."""
    step: Tape
    """The optimizer step from where the last backward pass ended, with gradients."""
    late_step: Tape = ()
    """The rest of the step, once the gradients that backward left have ended."""
    gradients: Gradients = Gradients.ACCUMULATE
    flight: int = 1
    microbatches: int = 1
    initialisation: int | None = None
    """Peak bytes while the optimizer is built, counted from nothing; ``None`` where it is not known."""
    building: tuple[Hold, ...] = ()
    """Held only while optimizer states are made."""
    late_extra: tuple[Hold, ...] = ()
    """Kept besides from the first step on."""
    originals: tuple[Hold, ...] = ()
    """Parameter tensors that flat ones have replaced; only the allocator remembers them."""
    gradients_kept: int = 0
    """Bytes of the gradients that ``late_step`` still reads; the others end before it."""
    late_states: bool = False
    """Optimizer states appear in the first step rather than when the optimizer is built."""
    kept: Kept | None = None
    """Megatron-Core: all that is kept, in order; instead of ``states``, ``extra`` and ``step``."""
    last: tuple[Span, ...] = ()
    """Modules of an iteration's last micro-batch, where they are others (gradients reduced once)."""
    streams: bool = False
    """Events are on several streams, each with an allocator's pools of its own."""
    elements: int | None = None
    """Parameters on one rank, where they are not those of the modules: shards."""
    host: int = 0
    """Bytes of host memory that one rank takes."""
    nvme: int = 0
    """Bytes on NVMe that one rank takes."""
    evaluated: tuple[int, int] = (0, 0)
    """Bytes of what evaluation has gathered: during its last forward pass, and when that has been appended."""
    order: Order | None = None
    """Megatron-Core: chunks and their schedule; instead of ``gradients``, ``flight`` and ``microbatches``."""
    unrolled: tuple[Span, ...] = ()
    """The same modules as one, for replaying, where they refer to more of one another than inputs and outputs."""
    timeline: Timeline | None = None
    """``torch.distributed.pipelining``: passes of an iteration in order, instead of ``gradients`` and ``flight``."""

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the rank holds at once, at most; of a chunk, where it has several."""
        return self.flight if self.order is None else max(most_in_flight(self.order.schedule))

    def parameters(self) -> int:
        if self.elements is not None:
            return self.elements
        return sum(len(span.names) * module_elements(span.module) for span in self.spans)

    def parameter_tensors(self) -> list[Parameter]:
        """In the order of the layer list."""
        return [parameter for span in self.spans for _ in span.names for parameter in span.module.parameters]


def ranks_on_node(plan: Plan, program: Program) -> int:
    """Ranks of the stage that share a node, of the fullest node."""
    return min(plan.hardware.gpus_per_node, len(program.ranks))


@lru_cache(maxsize=4096)
def module_elements(module: Module) -> int:
    return sum(parameter.elements for parameter in module.parameters)


@lru_cache(maxsize=4096)
def module_states(module: Module, states: tuple[State, ...]) -> Bytes:
    """Bytes that one module keeps between iterations, by category."""
    by = list(NOTHING)
    for parameter in module.parameters:
        for state in states:
            by[state.category] += state.size(parameter)
    return tuple(by)


def static(program: Program) -> Excursion:
    """What is held between iterations, as one excursion from nothing."""
    by = list(NOTHING)
    if program.kept is not None:
        by = list(program.kept.between.net_by)
    if program.order is not None:
        by = list(map(int.__add__, by, program.order.retained.net_by))
    if program.timeline is not None:
        by = list(map(int.__add__, by, program.timeline.carried))
    for span in program.spans if program.states else ():
        for category, size in enumerate(module_states(span.module, program.states)):
            by[category] += size * len(span.names)
    for hold in (*program.extra, *program.late_extra):
        by[hold.category] += hold.bytes
    total = sum(by)
    return Excursion(total, total, tuple(by), tuple(by), "static")


def passes(program: Program) -> Passes:
    """Forward and backward of one micro-batch through the stage."""
    return _passes(program.spans, program.gradients)


@lru_cache(maxsize=4096)
def _passes(spans: tuple[Span, ...], gradients: Gradients) -> Passes:
    ended = [span.end for span in spans if span.module.steady.end]
    forward = compose([*(span.forward for span in spans), *ended])
    first = compose(span.backward(True) for span in reversed(spans))
    if gradients is Gradients.PER_MICROBATCH:
        alone = first.then(_end_of_gradients(first))
        return Passes(forward, alone, alone)
    return Passes(forward, first, compose(span.backward(False) for span in reversed(spans)))


def fold_with_last(program: Program) -> Excursion:
    """All micro-batches of an iteration of two or more whose last one has modules of its own."""
    once, final = passes(program), _passes(program.last, program.gradients)
    between = once.forward.then(once.steady).within("1")
    parts = (
        once.forward.within("0"),
        once.first.within("0"),
        between.times(program.microbatches - 2),
        final.forward.then(final.first).within(str(program.microbatches - 1)),
    )
    return compose(parts)


def _end_of_gradients(excursion: Excursion) -> Excursion:
    return change(-excursion.net_by[Category.GRADIENTS], Category.GRADIENTS)


@dataclass(frozen=True, slots=True)
class Folded:
    """An iteration's fold. ``peak`` and ``peak_by`` count from nothing, in bytes."""

    static: int
    peak: int
    peak_by: Bytes
    place: str
    """``microbatch/phase/module/…/tensor``, or ``step/optimizer/tensor``."""
    step_peak: int
    backward_peak: int
    after_forward: int
    """Held when the first forward pass has ended."""


def fold_program(program: Program) -> Folded:
    """The requested bytes of one steady iteration."""
    if program.order is not None and program.kept is not None:
        return _fold_ordered(program.order, program.kept)
    kept = static(program)
    if program.timeline is not None:
        micro, after_forward = program.timeline.whole, program.timeline.after_forward
    else:
        once = passes(program)
        micro = fold_with_last(program) if program.last else fold_one_chunk(once, program.flight, program.microbatches)
        after_forward = once.forward.net
    iteration = kept.then(micro)
    step = fold_once(program.step)
    late = fold_once(program.late_step)
    kept_gradients = change(min(program.gradients_kept, micro.net_by[Category.GRADIENTS]), Category.GRADIENTS)
    optimizer = compose((step, _end_of_gradients(micro), kept_gradients, late, _end_of_gradients(kept_gradients)))
    optimizer = optimizer.within("step/optimizer")
    whole = iteration.then(optimizer)
    assert whole.net == kept.net, f"stage {program.stage}: an iteration leaves {whole.net - kept.net} bytes behind"
    return Folded(
        kept.net,
        whole.peak,
        whole.peak_by,
        whole.place,
        iteration.net + optimizer.peak,
        iteration.peak,
        kept.net + after_forward,
    )


def _fold_ordered(order: Order, kept: Kept) -> Folded:
    """What Megatron-Core's iteration needs; the reports of its losses end with the step.

    The largest of three: between iterations, while micro-batches run, and the step behind them.
    """
    once = tuple([chunk.passes for chunk in order.chunks])
    micro = fold_iteration(order.schedule, once, Sizes(order.exchanged))
    retained, optimizer = order.retained, kept.optimizer
    static, start = kept.between.net + retained.net, kept.during.net + retained.net
    iterating, stepping = start + micro.peak, start + micro.net + optimizer.peak
    peak, parts, place = static, (kept.between.net_by, NOTHING), "static"
    if iterating > peak:
        peak, parts, place = iterating, (kept.during.net_by, micro.peak_by), micro.place
    if stepping > peak:
        by = tuple(map(int.__add__, micro.net_by, optimizer.peak_by))
        peak, parts, place = stepping, (kept.during.net_by, by), optimizer.place
    peak_by = tuple(map(sum, zip(*parts, retained.net_by, strict=True)))
    return Folded(static, peak, peak_by, place, stepping, max(static, iterating), start + once[0].forward.net)


def fold_evaluation(program: Program) -> int | None:
    """Peak bytes of a forward pass without a graph, one micro-batch at a time; not known of a timeline's schedule."""
    if program.timeline is not None:
        return None
    forward = compose(span.evaluation() for span in program.spans)
    during, appended = program.evaluated
    kept = static(program)
    return max(kept.peak + appended, kept.then(forward).peak + during)


def drop_all(holds: Sequence[Hold], start: int) -> Tape:
    """A tape that holds ``holds`` one after the other, then drops them. Ids from ``start``."""
    taken = tuple(hold._replace(tensor=start + i) for i, hold in enumerate(holds))
    return (*taken, *(Drop(hold.tensor, hold.bytes, hold.category) for hold in taken))
