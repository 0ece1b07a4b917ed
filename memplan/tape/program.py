"""What one rank does in one iteration, and its fold: static memory, micro-batches, optimizer step.

A program is written by a framework, folded by the estimate (and the search), and unrolled into a
tape of events where the allocator replays it. Peaks of both are of the same events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from ..plan.plan import ResolvedPlan
from ..values import NamedTuple, dataclass
from .events import (
    GRAD_OUTPUT,
    INPUT,
    NOTHING,
    Bytes,
    Category,
    Drop,
    Excursion,
    Hold,
    Hook,
    Stretch,
    Tape,
    change,
    compose,
    cut,
    fold,
    fold_once,
)

if TYPE_CHECKING:
    from ..layers.module import Module, Parameter, Tapes
    from ..optimizers.base import State


@dataclass(frozen=True, slots=True)
class Span:
    """A module, or several equal ones in a row."""

    module: Module
    names: tuple[str, ...]

    @property
    def forward(self) -> Excursion:
        return self._named(self.module.steady.forward_fold, "forward", len(self.names) - 1)

    @property
    def first_forward(self) -> Excursion:
        """Of the first micro-batch."""
        return self._named(self.module.first.forward_fold, "forward", len(self.names) - 1)

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
    host: int = 0
    """Bytes of host memory."""
    pool: int = 0
    """The stream whose memory steps but the first take: that of a graph which they have been captured in."""

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


What = Literal[
    "forward", "loss", "backward", "unshard", "wait", "reshard", "reduce", "merge",
    "begin", "end", "begin_all", "end_all", "forward_piece", "backward_piece",
]  # fmt: skip
"""What a rank does. ``forward_piece`` and ``backward_piece``: the next piece of a pass that takes turns with another
(``Hook.PIECE``). ``unshard`` to ``reduce`` are done by hooks outside of passes; a tensor between passes may
``begin`` and ``end`` where the schedule says. ``begin_all`` and ``end_all``: as many tensors, those that micro-batches
left out would leave, as the action's number of a micro-batch says."""

Role = Literal["first", "steady", "last"]
"""Of a micro-batch: the first one leaves gradients behind, and the last one's modules may be others."""


class Action(NamedTuple):
    """Something that a rank does with one of its chunks (numbered from 0)."""

    what: What
    chunk: int
    microbatch: int = 0
    tensor: str | None = None
    """What begins or ends. One that begins right behind the pass that makes it is no new one."""


class Hooked(NamedTuple):
    """What hooks do for one module outside of its passes."""

    place: int
    """The module's in its chunk."""
    name: str
    events: Tape


@dataclass(frozen=True, slots=True)
class Lasting:
    """A tensor that a pass hands to the schedule."""

    place: int
    """Of the module that makes it."""
    hold: Hold


@dataclass(frozen=True, eq=False, slots=True)
class Passes:
    """One micro-batch through one chunk. Equal chunks should have one object.

    Where a schedule hands tensors from stage to stage, a chunk's input and the gradient of its output belong to it and
    are not dropped here (they live throughout the pass). There ``forward`` leaves the output, if it is sent (a loss
    counts in its layer); ``backward`` leaves the input's gradient, if the input was received; the rest of what
    ``forward`` leaves, ends.
    """

    forward: Excursion
    backward: Excursion


Whole = Literal["forward", "backward"]
WHOLE: Mapping[What, Whole] = MappingProxyType({"forward_piece": "forward", "backward_piece": "backward"})
"""The pass that a piece is of."""


def forward_passes(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """Chunks and micro-batches of the forward passes among ``actions``, whole or in pieces."""
    return {(one.chunk, one.microbatch) for one in actions if WHOLE.get(one.what, one.what) == "forward"}


class Piece(NamedTuple):
    """Of a pass: from one seam of ``Hook.PIECE`` to the next. The first piece has no label."""

    label: str
    excursion: Excursion


@dataclass(frozen=True, eq=False)
class Chunk:
    """Modules of one virtual stage, in order. Equal chunks should be one object."""

    spans: tuple[Span, ...]
    losses: tuple[Span, ...] = ()
    """The loss outside of the model, in the last stage."""
    hooks: Mapping[What, tuple[Hooked, ...]] = field(default_factory=dict)
    last: tuple[Span, ...] = ()
    """Modules of an iteration's last micro-batch, where they are others (gradients reduced once)."""
    unrolled: tuple[Span, ...] = ()
    """The same modules as one, for replaying, where they refer to more of one another than inputs and outputs."""
    first_differs: bool = False
    """The first micro-batch saves other tensors in a schedule of several stages."""
    _excursions: dict[tuple[What, bool], Excursion] = field(default_factory=dict, repr=False)

    @cached_property
    def passes(self) -> Passes:
        """One micro-batch through the chunk, which adds to gradients."""
        return passes_of(self.spans)

    @cached_property
    def first_passes(self) -> Passes:
        """The first micro-batch through the chunk, where it ``first_differs``."""
        if not self.first_differs:
            return self.passes
        return Passes(compose([span.first_forward for span in self.spans]), first_backward(self.spans))

    @property
    def modules(self) -> list[tuple[Module, str]]:
        """Where every span is one module."""
        return [(span.module, span.names[0]) for span in (*self.spans, *self.losses)]

    def handed(self, place: int, first: bool, *, backward: bool) -> tuple[int, int]:
        """Where what the module at ``place`` hands on was made, and its id there: the output, or the gradient of
        the input. A module may hand on what it was given."""
        tapes = tapes_of(self.modules[place][0], first)
        id = tapes.grad_input if backward else tapes.output
        if id == (GRAD_OUTPUT if backward else INPUT):
            return self.handed(place + 1 if backward else place - 1, first, backward=backward)
        return place, id

    def lasting(self, tensor: str, first: bool) -> Lasting | None:
        """``tensor`` as the first or another micro-batch makes it; ``None`` where this stage has none."""
        if tensor in ("loss", "loss_gradient"):
            if not self.losses:
                return None
            tapes = tapes_of(self.losses[0].module, first)
            tape, name = (tapes.forward, "loss") if tensor == "loss" else (tapes.backward, "grad_loss")
            return Lasting(len(self.spans), named_hold(tape, name))
        backward = tensor == "input_gradient"
        place, id = self.handed(0 if backward else len(self.spans) - 1, first, backward=backward)
        tapes = tapes_of(self.modules[place][0], first)
        tape = tapes.backward if backward else tapes.forward
        found = (event for event in tape if isinstance(event, Hold) and event.tensor == id)
        return next((Lasting(place, hold) for hold in found), None)

    @cached_property
    def pieces(self) -> Mapping[Whole, tuple[Piece, ...]]:
        """Of the passes of a micro-batch that adds to gradients, in the order in which they run without another one."""
        return self._pieces(False)

    @cached_property
    def first_pieces(self) -> Mapping[Whole, tuple[Piece, ...]]:
        """Of the first micro-batch, where it ``first_differs``."""
        return self._pieces(True) if self.first_differs else self.pieces

    def _pieces(self, first: bool) -> Mapping[Whole, tuple[Piece, ...]]:
        named = [(tapes_of(span.module, first), name) for span in self.spans for name in span.names]
        return {
            "forward": _pieces([(tapes.forward, f"forward/{name}") for tapes, name in named]),
            "backward": _pieces([(tapes.backward, f"backward/{name}") for tapes, name in reversed(named)]),
        }

    @cached_property
    def ends(self) -> dict[str, Excursion]:
        """Of each tensor that outlives its pass."""
        found = {tensor: self.lasting(tensor, True) for tensor in LASTING}
        return {tensor: change(-one.hold.bytes, one.hold.category) for tensor, one in found.items() if one is not None}

    def excursion(self, what: What, first: bool) -> Excursion:
        """Of a pass, or of what hooks do besides; ``first``: for the first micro-batch."""
        found = self._excursions.get((what, first))
        if found is None:
            found = self._excursions[what, first] = compose(self._parts(what, first))
        return found

    def _parts(self, what: What, first: bool) -> list[Excursion]:
        if what in ("forward", "loss"):
            spans = self.spans if what == "forward" else self.losses
            return [_within(tapes_of(span.module, first).forward_fold, "forward", span) for span in spans]
        if what == "backward":
            spans = (*self.spans, *self.losses)[::-1]
            return [_within(tapes_of(span.module, first).backward_fold, "backward", span) for span in spans]
        phase = "backward" if what == "reduce" else "forward"
        return [fold(one.events).within(f"{phase}/{one.name}") for one in self.hooks.get(what, ())]


def _pieces(tapes: Sequence[tuple[Tape, str]]) -> tuple[Piece, ...]:
    found, label, parts = list[Piece](), "", list[Excursion]()
    for tape, name in tapes:
        for events, seam in cut(tape):
            parts.append(fold_once(events).within(name))
            if seam is not None and seam.hook is Hook.PIECE:
                found.append(Piece(label, compose(parts)))
                label, parts = seam.name, []
    return (*found, Piece(label, compose(parts)))


LASTING = ("output", "input_gradient", "loss", "loss_gradient")
"""Tensors that a pass may hand to a schedule."""


def tapes_of(module: Module, first: bool) -> Tapes:
    return module.first if first else module.steady


def named_hold(tape: Tape, name: str) -> Hold:
    """The first tensor called ``name``."""
    return next(event for event in tape if isinstance(event, Hold) and event.name == name)


def _within(excursion: Excursion, phase: str, span: Span) -> Excursion:
    return excursion.within(f"{phase}/{span.names[0]}")


@lru_cache(maxsize=4096)
def passes_of(spans: tuple[Span, ...]) -> Passes:
    """One micro-batch through ``spans``, which adds to gradients."""
    ended = [span.end for span in spans if span.module.steady.end]
    forward = compose([*[span.forward for span in spans], *ended])
    return Passes(forward, compose([span.backward(False) for span in reversed(spans)]))


@lru_cache(maxsize=4096)
def first_backward(spans: tuple[Span, ...]) -> Excursion:
    """The backward pass that leaves gradients behind."""
    return compose([span.backward(True) for span in reversed(spans)])


class Order(Protocol):
    """In which order a rank runs the passes of its chunks in one iteration, and which tensors the schedule itself
    begins and ends between them."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Virtual stages of the rank, first to last."""

    @property
    def microbatches(self) -> int:
        """Of one iteration."""

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the rank holds at once, at most; of a chunk, where it has several."""

    @property
    def whole(self) -> Excursion:
        """All passes of a steady iteration, from and to what is static."""

    @property
    def after_forward(self) -> int:
        """Bytes beyond the static ones behind the first forward pass."""

    @property
    def carried(self) -> Excursion:
        """What one iteration leaves to the next besides static tensors."""

    @property
    def shortened(self) -> Iterable[Action]:
        """As many of an iteration's actions as show everything that repeats, for the allocator's replay."""

    @property
    def exchanged(self) -> Exchanged:
        """What the schedule begins and ends itself."""

    def role(self, microbatch: int) -> Role:
        """Which passes a micro-batch of ``shortened`` runs."""

    def begun(self, chunk: int, tensor: str) -> Hold:
        """A tensor between passes that begins by itself."""


class Exchanged(NamedTuple):
    """Tensors between passes, by what becomes of them."""

    passes: Mapping[What, tuple[str, ...]] = MappingProxyType({})
    """Those that a pass makes, under its own number."""
    numbered: tuple[str, ...] = ()
    """Those that passes make, under numbers of their own: they begin right behind the pass."""
    renumbered: tuple[str, ...] = ()
    """Those that outlive an iteration, and are counted from 0 in the next."""
    until_step: tuple[str, ...] = ()
    """Those that end behind the step."""
    gradients: bool = False
    """Gradients end behind every backward pass."""

    @property
    def any(self) -> bool:
        """Passes exchange tensors through the schedule."""
        return bool(self.passes or self.numbered)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One rank's iteration."""

    stage: int
    ranks: tuple[int, ...]
    entries: tuple[str, ...]
    """Names of the entries of the layer list that this stage holds."""
    order: Order
    """Chunks of modules, and in which order micro-batches run through them."""
    states: tuple[State, ...] = ()
    """Kept for every parameter of every module."""
    extra: tuple[Hold, ...] = ()
    """Kept besides: flat buffers, inputs, communication buffers, workspaces."""
    step: Tape = ()
    """The optimizer step from where the last backward pass ended, with gradients."""
    clipping: int = 0
    """So many events of ``step`` clip gradients, before states appear: first those of parameters that decay, as
    transformers' Trainer groups them (``create_optimizer``)."""
    late_step: Tape = ()
    """The rest of the step, once the gradients that backward left have ended."""
    initialisation: int | None = None
    """Peak bytes while the optimizer is built, counted from nothing; ``None`` where it is not known."""
    building: tuple[Hold, ...] = ()
    """Held only while optimizer states are made."""
    late_extra: tuple[Hold, ...] = ()
    """Kept besides from the first step on."""
    before: Tape = ()
    """What came and went before anything that is kept: parameter tensors that flat ones have replaced. Only the
    allocator remembers it. The first of ``extra`` may be in it, where other tensors come and go between them:"""
    made: int = 0
    """so many."""
    before_elsewhere: tuple[Tape, ...] = ()
    """Where ``before`` is the most of what a rank other than the first does: what the first one does instead, and the
    least of the others."""
    gradients_kept: int = 0
    """Bytes of the gradients that ``late_step`` still reads; the others end before it."""
    late_states: bool = False
    """Optimizer states appear in the first step rather than when the optimizer is built."""
    kept: Kept | None = None
    """Megatron-Core: all that is kept, in order; instead of ``states``, ``extra`` and ``step``."""
    groups: tuple[tuple[tuple[Parameter, ...], int], ...] = ()
    """Parameters of each module, and how many such modules follow one another, in the order in which the model
    registers them, where ``spans`` have another: a table of words that is tied comes first."""
    elements: int | None = None
    """Parameters on one rank, where they are not those of the modules: shards."""
    host: int = 0
    """Bytes of host memory that one rank takes."""
    managed: int = 0
    """Bytes of optimizer states in CUDA's unified memory, which count as the host's."""
    nvme: int = 0
    """Bytes on NVMe that one rank takes."""
    saving: int = 0
    """Bytes that saving a checkpoint, or loading one, takes at most beside what is held between iterations."""
    set_aside: int = 0
    """Bytes of segments that the allocator keeps for what counts as allocated no more: the pool of captured graphs."""
    empties: int = 0
    """The allocator's cache is emptied before a step (1), and behind it, too (2)."""
    evaluated: tuple[int, int] = (0, 0)
    """Bytes of what evaluation has gathered: during its last forward pass, and when that has been appended."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Modules of all chunks, first to last."""
        (first, *others) = self.order.chunks
        if not others and not first.losses:
            return first.spans
        return tuple([span for chunk in self.order.chunks for span in (*chunk.spans, *chunk.losses)])

    @property
    def last(self) -> tuple[Span, ...]:
        """Modules of an iteration's last micro-batch, where they are others."""
        return self.order.chunks[0].last

    @property
    def microbatches(self) -> int:
        return self.order.microbatches

    def parameters(self) -> int:
        if self.elements is not None:
            return self.elements
        return sum(len(span.names) * module_elements(span.module) for span in self.spans)

    def parameter_tensors(self) -> list[Parameter]:
        """As the model registers them, or in the order of the layer list."""
        groups = self.groups or ((span.module.parameters, len(span.names)) for span in self.spans)
        return [parameter for parameters, count in groups for _ in range(count) for parameter in parameters]


def ranks_on_node(plan: ResolvedPlan, program: Program) -> int:
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
    by = list(program.order.carried.net_by)
    if program.kept is not None:
        by = list(map(int.__add__, by, program.kept.between.net_by))
    for span in program.spans if program.states else ():
        for category, size in enumerate(module_states(span.module, program.states)):
            by[category] += size * len(span.names)
    for hold in (*program.extra, *program.late_extra):
        by[hold.category] += hold.bytes
    total = sum(by)
    return Excursion(total, total, tuple(by), tuple(by), "static")


def end_of_gradients(excursion: Excursion) -> Excursion:
    """The end of the gradients that ``excursion`` leaves behind."""
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
    """The requested bytes of one steady iteration, the largest of three: between iterations, while micro-batches run,
    and the step behind them."""
    order, kept, micro = program.order, static(program), program.order.whole
    during, optimizer = (kept, _step(program, micro)) if program.kept is None else _kept(program.kept, order.carried)
    iterating, stepping = during.net + micro.peak, during.net + micro.net + optimizer.peak
    peak, peak_by, place = kept.net, kept.net_by, kept.place
    if iterating > peak:
        peak, peak_by, place = iterating, tuple(map(int.__add__, during.net_by, micro.peak_by)), micro.place
    if stepping > peak:
        by = map(int.__add__, during.net_by, micro.net_by)
        peak, peak_by, place = stepping, tuple(map(int.__add__, by, optimizer.peak_by)), optimizer.place
    backward = max(kept.net, iterating)
    return Folded(kept.net, peak, peak_by, place, stepping, backward, during.net + order.after_forward)


def _kept(kept: Kept, carried: Excursion) -> tuple[Excursion, Excursion]:
    """What is held throughout micro-batches, and the step behind them."""
    return carried.then(kept.during), kept.optimizer


def _step(program: Program, micro: Excursion) -> Excursion:
    """The step behind the micro-batches, with which their gradients end."""
    some = change(min(program.gradients_kept, micro.net_by[Category.GRADIENTS]), Category.GRADIENTS)
    parts = fold_once(program.step), end_of_gradients(micro), some, fold_once(program.late_step), end_of_gradients(some)
    whole = compose(parts)
    assert micro.net + whole.net == 0, (
        f"stage {program.stage}: an iteration leaves {micro.net + whole.net} bytes behind"
    )
    return whole.within("step/optimizer")


def fold_evaluation(program: Program) -> int | None:
    """Peak bytes of a forward pass without a graph, one micro-batch at a time; not known of ``torch``'s pipelines."""
    if program.order.chunks[0].hooks:
        return None
    forward = compose([span.evaluation() for span in program.spans])
    during, appended = program.evaluated
    kept = static(program)
    return max(kept.peak + appended, kept.then(forward).peak + during)


def evaluation_beyond(program: Program, limit: int) -> tuple[str, Hold] | None:
    """The first tensor of ``fold_evaluation``'s forward pass with which more than ``limit`` bytes are live, and its
    module; ``None`` where it is none of the model's."""
    live = static(program).net + program.evaluated[0]
    for span in program.spans:
        for name in span.names:
            for event in span.module.evaluation:
                if isinstance(event, Hold):
                    live += event.bytes
                    if live > limit:
                        return name, event
                elif isinstance(event, Drop):
                    live -= event.bytes
    return None


def drop_all(holds: Sequence[Hold], start: int) -> Tape:
    """A tape that holds ``holds`` one after the other, then drops them. Ids from ``start``."""
    taken = tuple(hold._replace(tensor=start + i) for i, hold in enumerate(holds))
    return (*taken, *(hold.end for hold in taken))
