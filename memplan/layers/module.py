"""A module's recipe, run and folded: the unit that stages and schedules are composed of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..tape.events import (
    GRAD_OUTPUT,
    INPUT,
    Category,
    Drop,
    Excursion,
    Hold,
    Hook,
    Scope,
    Tape,
    fold,
    fold_once,
    renamed,
    rounded,
)
from ..values import dataclass, replace
from .autograd import ITEMSIZE, Leaf, Recorder, Shape, Tensor, size_of
from .kernels import Kernels
from .tuning import Packed, Tuning
from .work import NO_CALLS, Attention, Calls, Exchange, Kernel, Product, Scan

if TYPE_CHECKING:
    from .megatron_core.precision import Low

STALE = -3
"""Id of a tensor that an earlier micro-batch left in a slot and that this one displaces."""

LEFT = Scope.CALLER.id()
"""Ids from here down are of tensors that a module left in its caller's variables."""

SHARED = -10
"""Ids at and below are of tensors that one module of a stage makes and several read."""


@dataclass(frozen=True)
class Parameter:
    """A parameter tensor as one rank holds it."""

    name: str
    shape: Shape
    dtype: str | None = None
    """Where not all parameters of a plan have the same."""
    trained: bool = True
    """Not frozen: it has a gradient and optimizer states."""
    four_bit: Packed | None = None
    """How it is stored if it is quantised."""
    expert: bool = False
    """Ranks that share it are those of an expert, not of the layer around it."""
    low: Low | None = None
    """In what products read it, where that is not the parameter itself."""
    gathered: str | None = None
    """The dtype in which shards of it are gathered, where that is not the one of compute."""

    @cached_property
    def elements(self) -> int:
        n = 1
        for dim in self.shape:
            n *= dim
        return n

    @property
    def decays(self) -> bool:
        """Whether its weights decay where a script leaves biases and norms out: transformers'
        ``Trainer.get_decay_parameter_names`` tells by name, for biases of experts are matrices and attention's sinks a
        vector."""
        return not any(word in self.name.lower() for word in ("bias", "norm"))

    def bytes(self, dtype: str) -> int:
        """Bytes of a tensor of this shape, rounded."""
        return rounded(self.elements * ITEMSIZE[dtype])


@dataclass(frozen=True, eq=False)
class Tapes:
    """Forward and backward of one module for one micro-batch.

    ``input`` and ``grad_output`` are dropped in it, ``output`` and ``grad_input`` are left behind.
    """

    forward: Tape
    backward: Tape
    output: int
    """Id of the output; 0 where there is none (a loss)."""
    grad_input: int
    """Id of the input's gradient; 0 where there is none (an embedding)."""
    end: Tape = ()
    """When the whole model's forward has ended: what autocast's cache alone still held is dropped."""
    output_dtype: str = ""
    """Of the output."""
    contexts: tuple[int, ...] = ()
    """Ids of tensors that end with the graph (``Recorder.keeps_in_context``), and not within the module."""

    @cached_property
    def forward_fold(self) -> Excursion:
        return fold_once(self.forward)

    @cached_property
    def end_fold(self) -> Excursion:
        return fold_once(self.end)

    @cached_property
    def backward_fold(self) -> Excursion:
        return fold_once(self.backward)


Counted = tuple[tuple[Kernel, int], ...]
"""Kernels, and how often each runs."""


@dataclass(frozen=True, eq=False, slots=True)
class Passes:
    """What the kernels of one module do for one micro-batch. One object for equal modules, so that
    caches need not look inside."""

    forward: Counted = ()
    backward: Counted = ()
    parameters: tuple[Parameter, ...] = ()
    forward_replayed: Calls = NO_CALLS
    """What CUDA graphs call in the host's place,"""
    backward_replayed: Calls = NO_CALLS

    @property
    def flops(self) -> float:
        """Of products and attention."""
        kernels = (*self.forward, *self.backward)
        return sum(times * one.flops for one, times in kernels if isinstance(one, Product | Attention | Scan))


NO_PASSES = Passes()


@lru_cache(maxsize=4096)
def run_again(once: Passes) -> Passes:
    """The same where backward runs the whole forward pass again before it (``CheckpointFunction``)."""
    replayed = once.forward_replayed.plus(once.backward_replayed)
    return replace(once, backward=once.forward + once.backward, backward_replayed=replayed)


@lru_cache(maxsize=4096)
def regrouped(once: Passes, factor: int) -> Passes:
    """The same on a rank that has so many times the experts, each with as many times fewer rows: on as many times fewer
    ranks that share them."""

    if factor == 1:
        return once

    def of(counted: Counted) -> Counted:
        return tuple([(_regrouped(kernel, factor), times) for kernel, times in counted])

    experts = tuple(one for one in once.parameters if one.expert)
    parameters = once.parameters + (factor - 1) * experts
    return replace(once, forward=of(once.forward), backward=of(once.backward), parameters=parameters)


def _regrouped(kernel: Kernel, factor: int) -> Kernel:
    if isinstance(kernel, Product):
        return kernel.regrouped(factor)
    if isinstance(kernel, Exchange) and kernel.axis == "experts":
        return kernel._replace(bytes=kernel.bytes / factor)
    return kernel


@lru_cache(maxsize=1 << 14)
def grown(two: Passes, four: Passes, b: int) -> Passes | None:
    """Of ``b`` sequences, an even number, from those of 2 and of 4: each size of a kernel grows by as much for every
    sequence. ``None`` where 4 have other kernels than 2."""
    slopes = _slopes(two, four)
    if slopes is None:
        return None
    steps = b // 2 - 1

    def of(counted: Counted, slopes: Sequence[Any]) -> Counted:
        return tuple(
            [
                (kernel if slope is None else _along(kernel, slope, steps), times)
                for (kernel, times), slope in zip(counted, slopes, strict=True)
            ]
        )

    return replace(two, forward=of(two.forward, slopes[0]), backward=of(two.backward, slopes[1]))


@lru_cache(maxsize=4096)
def _slopes(two: Passes, four: Passes) -> tuple[list[Any], list[Any]] | None:
    """Of each kernel, what two sequences more add to its sizes: ``None`` to all of them, else size by size."""
    every = [[(type(one), times) for one, times in (*work.forward, *work.backward)] for work in (two, four)]
    if every[0] != every[1] or len(two.forward) != len(four.forward):
        return None

    def of(first: Counted, second: Counted) -> list[Any]:
        return [_slope(one, other) for (one, _), (other, _) in zip(first, second, strict=True)]

    return of(two.forward, four.forward), of(two.backward, four.backward)


def _slope(x: Any, y: Any) -> Any:
    if x == y or isinstance(x, str):
        return None
    if isinstance(x, tuple):
        return [_slope(one, other) for one, other in zip(x, y, strict=True)]
    return y - x


def _along(x: Any, slopes: list[Any], steps: int) -> Any:
    """A kernel, or what it holds, so many steps of ``slopes`` further."""
    found = [
        one if slope is None else _along(one, slope, steps) if isinstance(slope, list) else one + slope * steps
        for one, slope in zip(x, slopes, strict=True)
    ]
    return tuple.__new__(type(x), found)


@lru_cache(maxsize=4096)
def joined(*modules: Passes) -> Passes:
    """Of modules that run one after the other."""
    return Passes(
        tuple(one for module in modules for one in module.forward),
        tuple(one for module in modules for one in module.backward),
        tuple(one for module in modules for one in module.parameters),
        NO_CALLS.plus(*(module.forward_replayed for module in modules)),
        NO_CALLS.plus(*(module.backward_replayed for module in modules)),
    )


Change = Callable[[Tape], Tape]


@dataclass(frozen=True, eq=False)
class Module:
    """One entry of a rank's layer list, in every role that it plays.

    ``first`` leaves gradients behind, ``steady`` adds to them, ``evaluation`` has no graph.
    """

    name: str
    first: Tapes
    steady: Tapes
    evaluation: Tape
    parameters: tuple[Parameter, ...]
    left: tuple[Hold, ...] = ()
    """Tensors in the variables of a caller, alive after this module until a later one returns."""
    shares: tuple[Hold, ...] = ()
    """Tensors made here for several modules to read, under their shared ids."""
    saved_shared: frozenset[int] = frozenset()
    """Ids of shared tensors that this module keeps until its backward."""
    slot: int = 0
    """Id of the tensor that stays in a slot until a later micro-batch displaces it; 0 where there is none."""
    work: Passes = NO_PASSES
    """Where it was asked for (``Options.counts``)."""

    @cached_property
    def evaluation_fold(self) -> Excursion:
        return fold_once(self.evaluation)

    def changed(self, forward: Change | None = None, backward: Change | None = None) -> Module:
        """The module whose tapes ``forward`` has changed, those of evaluation, too, and ``backward``."""

        def tapes(own: Tapes) -> Tapes:
            onward = forward(own.forward) if forward else own.forward
            return replace(own, forward=onward, backward=backward(own.backward) if backward else own.backward)

        steady = tapes(self.steady)
        first = steady if self.first is self.steady else tapes(self.first)
        evaluation = forward(self.evaluation) if forward else self.evaluation
        return replace(self, first=first, steady=steady, evaluation=evaluation)

    @cached_property
    def largest_id(self) -> int:
        """Of the module's own tensors."""
        tapes = (self.first.forward, self.first.backward, self.steady.backward, self.evaluation)
        ids = (event.tensor for tape in tapes for event in tape if isinstance(event, Hold | Drop))
        return max(ids, default=0)


@dataclass(slots=True)
class Run:
    """What a recipe gives back: its output, and what its caller still holds."""

    output: Tensor | None
    left: list[Tensor] = field(default_factory=list)
    shared: dict[int, Tensor | None] = field(default_factory=dict)
    """By the id under which other modules know them."""
    until_end: list[Tensor] = field(default_factory=list)
    """Dropped when the micro-batch's forward has ended (logits in the model's output)."""
    given: list[Tensor] = field(default_factory=list)
    """What hooks handed to the module, which they hold until those behind its forward have run."""
    slot: Tensor | None = None
    """Displaces a tensor that an earlier micro-batch left (``STALE``), and stays until it is displaced."""
    loss: Tensor | None = None
    converted: list[Tensor] = field(default_factory=list)
    """Like ``until_end``, and cast to fp32 first, once autocast has ended,"""
    measured: Callable[[Recorder, Tensor], None] | None = None
    """behind which a training loop computes this of the first of them, without a graph."""


Recipe = Callable[[Recorder, Tensor], Run]
"""Of a module that has no input, it takes a tensor of nothing."""
RecorderKind = TypeVar("RecorderKind", bound=Recorder)


@dataclass(frozen=True, slots=True)
class Interface:
    """The input that a recipe expects, if any."""

    shape: Shape | None
    dtype: str
    requires_grad: bool = True
    category: Category = Category.ACTIVATIONS
    """What the input is for,"""
    gradient: Category = Category.TEMPORARIES
    """and the gradient of the output."""
    begins: bool = True
    """Hooks before its forward run first; else the recipe says where."""


@dataclass(frozen=True, slots=True)
class Options:
    """How autograd behaves; see ``layers.autograd``."""

    accumulates_in_place: bool = True
    drops_gradient: bool = True
    """The gradient of the output ends here; ``False`` where a caller keeps it."""
    kernel_workspaces: bool = False
    """Also what kernels allocate inside, which fake tensors do not show."""
    threads: int = 0
    """With it, buffers of sums on a GPU that runs so many threads at a time; 0: unknown, and none."""
    masks_first: bool = True
    """With it, dropout makes its mask before its output."""
    keeps_input: bool = False
    """The input ends elsewhere: a schedule keeps it."""
    consumes_gradients: bool = False
    """Parameters' gradients end as soon as they have arrived: a hook adds them to a static buffer."""
    autocast: str | None = None
    """The dtype in which autocast computes,"""
    parameters: str | None = None
    """and that of parameters then."""
    converts_outputs: bool = False
    """Logits are cast to fp32 once autocast has ended."""
    tuning: Tuning | None = None
    """What is trained, where that is not every parameter."""
    kernels: Kernels | None = None
    """What runs in the place of the model's Python operators."""
    seams: bool = False
    """Tapes have seams where a framework's hooks run."""
    counts: Literal["", "first", "later"] = ""
    """What kernels do is recorded, of the first micro-batch or of a later one, and no other role,"""
    summed: str | None = None
    """with the dtype of static buffers that gradients are added to, if that is not the gradients' own."""
    pool: int = 0
    """The stream whose memory a module takes, where it is not the main one."""
    holds_input: bool = False
    """A module's caller holds its input until hooks behind its forward have run."""
    casts_given: bool = False
    """Hooks before a layer's forward cast what it is handed to its dtype."""


def build(
    name: str, recipe: Recipe, interface: Interface, options: Options, present: frozenset[str] = frozenset()
) -> Module:
    """Runs ``recipe`` in each role. Parameters named in ``present`` have a gradient already in the first one."""
    return recorded(name, recipe, interface, options, partial(recorder_of, Recorder, options, present), present)[0]


def forward_alone(recipe: Recipe, interface: Interface, options: Options) -> tuple[tuple[Parameter, ...], int]:
    """Of what ``build`` makes: the parameters, and the bytes that ``steady.forward`` leaves. No other role is run."""
    recorder = recorder_of(Recorder, options, frozenset(), False, True)
    tapes, _ = _tapes("", recipe, interface, recorder, options, backward=False)
    return _parameters(recorder, options), fold(tapes.forward).net


def recorder_of(
    kind: type[RecorderKind],
    options: Options,
    present: frozenset[str],
    first: bool,
    grad_enabled: bool,
    **own: Any,
) -> RecorderKind:
    """A recorder of a ``kind``, with fields of its ``own``."""
    return kind(
        accumulates_in_place=options.accumulates_in_place,
        first=first,
        present=present if grad_enabled else frozenset(),
        kernel_workspaces=options.kernel_workspaces and grad_enabled,
        threads=options.threads,
        masks_first=options.masks_first,
        consumes_gradients=options.consumes_gradients and grad_enabled,
        grad_enabled=grad_enabled,
        autocast=options.autocast,
        stored=options.parameters,
        tuning=options.tuning,
        kernels=options.kernels,
        counts=bool(options.counts),
        closed=bool(options.counts),
        summed=options.summed,
        pool=options.pool,
        **{"seams": options.seams, **own},
    )


def recorded(
    name: str,
    recipe: Recipe,
    interface: Interface,
    options: Options,
    make: Callable[[bool, bool], RecorderKind],
    present: frozenset[str] = frozenset(),
) -> tuple[Module, RecorderKind]:
    """As ``build`` with recorders of a kind: ``make(first micro-batch, with a graph)``. Also the first of them."""
    recorder = make(options.counts != "later", True)
    first, run = _tapes(name, recipe, interface, recorder, options)
    parameters = _parameters(recorder, options, present)
    if options.counts:
        forward, backward = recorder.work[: recorder.forwards], recorder.work[recorder.forwards :]
        replayed = (recorder.forward_replayed, recorder.replayed.plus(recorder.forward_replayed.times(-1)))
        work = Passes(tuple(Counter(forward).items()), tuple(Counter(backward).items()), parameters, *replayed)
        return Module(name, first, first, (), parameters, work=work), recorder
    steady = _tapes(name, recipe, interface, make(False, True), options)[0] if recorder.tells_first else first
    evaluation = _evaluation_tape(name, recipe, interface, make(False, False), options)
    made = Module(
        name,
        first,
        steady,
        evaluation,
        parameters,
        tuple(_hold(first, id) for id in range(LEFT, LEFT - len(run.left), -1)),
        tuple(_hold(first, id) for id in run.shared),
        frozenset(id for id in recorder.saved_outside if id <= SHARED),
        run.slot,
    )
    return made, recorder


def _parameters(recorder: Recorder, options: Options, present: frozenset[str] = frozenset()) -> tuple[Parameter, ...]:
    leaves = (leaf for leaf in recorder.parameters.values() if leaf.name not in present)
    return tuple(_parameter(leaf, options.tuning is not None) for leaf in leaves)


def _parameter(leaf: Leaf, tuned: bool) -> Parameter:
    dtype = leaf.dtype if tuned else None
    return Parameter(leaf.name, leaf.shape, dtype, leaf.trained, leaf.four_bit, leaf.expert, leaf.low, leaf.gathered)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Where tensors that outlive the module ended up: ids within it."""

    left: list[int]
    shared: dict[int, int]
    slot: int

    def known(self) -> dict[int, int]:
        """The ids under which other modules drop them."""
        return {id: LEFT - i for i, id in enumerate(self.left)} | {id: known for known, id in self.shared.items()}


def _hold(tapes: Tapes, id: int) -> Hold:
    return next(event for event in tapes.forward if isinstance(event, Hold) and event.tensor == id)


def _input(recorder: Recorder, interface: Interface, *, drops: bool) -> Tensor:
    if interface.shape is None:
        return recorder.outside((0,), interface.dtype)
    return recorder.outside(interface.shape, interface.dtype, interface.category, INPUT, drops=drops)


def _tapes(
    name: str, recipe: Recipe, interface: Interface, recorder: Recorder, options: Options, *, backward: bool = True
) -> tuple[Tapes, _Ids]:
    """The passes of one micro-batch; without ``backward`` the forward pass alone."""
    leaf = None
    x: Tensor | None
    x = _input(recorder, interface, drops=not options.keeps_input)
    if interface.shape is not None and interface.requires_grad:
        x, leaf = recorder.leaf(x)

    def hook(kind: Hook) -> None:
        if options.seams:
            recorder.seam(name, kind)

    if interface.begins:
        hook(Hook.BEFORE_FORWARD)
    run = recipe(recorder, x)
    if not options.holds_input:
        x = None
    run.until_end.clear()
    shared = {known: recorder.hand_over(t) for known, t in run.shared.items() if t is not None}
    slot = recorder.hand_over(run.slot) if run.slot is not None else 0
    ids = _Ids([recorder.hand_over(t) for t in run.left], shared, slot)
    run.left.clear()
    run.shared.clear()
    run.slot = None
    recorder.settle()
    hook(Hook.AFTER_FORWARD)
    x = None
    run.given.clear()
    ended = len(recorder.events)
    if not backward:
        recorder.close()
        return Tapes(recorder.tape(), (), 0, 0), ids
    recorder.casts.clear()
    _convert(recorder, run)
    middle = len(recorder.events)
    recorder.forwards, recorder.forward_replayed = len(recorder.work), recorder.replayed
    output, dtype = 0, ""
    if run.output is not None:
        output, dtype = recorder.hand_over(run.output), run.output.dtype
        if run.output.node is None:
            recorder.close()
            return Tapes(renamed(recorder.tape(), ids.known()), (), output, 0, output_dtype=dtype), ids
        root = [run.output]
        gradient = [
            recorder.outside(root[0].shape, root[0].dtype, interface.gradient, GRAD_OUTPUT, options.drops_gradient)
        ]
        recorder.kept = None if options.drops_gradient else gradient[0].storage
        run.output = None
    else:
        assert run.loss is not None
        root = [run.loss.alias()]
        gradient = [recorder.empty((), run.loss.dtype, "grad_loss")]
    hook(Hook.BEFORE_BACKWARD)
    recorder.backward(root, gradient)
    run.loss = None
    grad_input = 0
    if leaf is not None and leaf.gradient is not None:
        grad_input = recorder.hand_over(leaf.gradient)
    recorder.end_required()
    hook(Hook.AFTER_BACKWARD)
    recorder.close()
    forward = renamed(recorder.tape(0, ended), ids.known())
    contexts = tuple(dict.fromkeys(one.storage.id for one in recorder.contexts))
    recorder.contexts.clear()
    back, end = recorder.tape(middle), recorder.tape(ended, middle)
    return Tapes(forward, back, output, grad_input, end, dtype, contexts), ids


def _convert(recorder: Recorder, run: Run) -> None:
    """Outputs in 16 bits get an fp32 copy, and both end."""
    narrow = [x for x in run.converted if x.dtype != "fp32"]
    copies = [recorder.empty(x.shape, "fp32", "logits_converted", Category.LOGITS) for x in narrow]
    last = copies[:1] or run.converted[:1]
    narrow.clear()
    run.converted.clear()
    if run.measured is not None:
        run.measured(recorder, last[0])
    last.clear()
    copies.clear()


def _evaluation_tape(name: str, recipe: Recipe, interface: Interface, recorder: Recorder, options: Options) -> Tape:
    """Forward without a graph, on a fresh ``recorder`` that records none."""
    recorder.evaluates = True
    x: Tensor | None
    x = _input(recorder, interface, drops=True)
    if options.seams and interface.begins:
        recorder.seam(name, Hook.BEFORE_FORWARD)
    run = recipe(recorder, x)
    if not options.holds_input:
        x = None
    for tensor in (*run.left, *run.shared.values(), run.output, run.slot):
        if tensor is not None:
            recorder.hand_over(tensor)
    run.until_end.clear()
    _convert(recorder, run)
    run.loss = None
    if options.seams:
        recorder.seam(name, Hook.AFTER_FORWARD)
    x = None
    run.given.clear()
    recorder.close()
    return recorder.tape()


def hold_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of a tensor, rounded as a request."""
    return rounded(size_of(shape, dtype))
