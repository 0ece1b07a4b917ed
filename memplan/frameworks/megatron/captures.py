"""CUDA graphs of layers whose captures are a moment of their own, with no other activations in memory.

``megatron/core/transformer/cuda_graphs.py``. Transformer Engine's are captured before the first iteration with
``--cuda-graph-warmup-steps 0`` (``megatron/training/training.py``, ``train``), Megatron-Core's own behind the passes of
the first one, which run without graphs (``pipeline_parallel/schedules.py``: ``create_cudagraphs``). Passes are
captured of the parts that graphs run alone, in the schedule's order; there are no optimizer states yet. What graphs'
kernels allocate lies in their pool for good and counts as allocated no more, so that iterations allocate what is
outside of graphs. Each capture empties the allocator's cache first (``torch.cuda.graph``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ...layers.autograd import ITEMSIZE
from ...layers.megatron_core import block
from ...layers.megatron_core.graphs import POOL, POSTPROCESS
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Module, Tapes, hold_bytes
from ...schedules.megatron_fold import PASSES, MegatronOrder, reduced
from ...schedules.megatron_schedule import trace
from ...tape.events import GRAD_OUTPUT, INPUT, ZERO, Category, Drop, Event, Excursion, Hold, Tape, change
from ...tape.program import Chunk, Program, Span
from ...values import NamedTuple, dataclass, replace

APART = frozenset({"attn", "moe_router", "moe_preprocess"})
"""Parts behind which a layer goes on, so that neither its output nor its input's gradient is a graph's own."""

THERE = ("graph_", "cublas_workspace", "te_cublas_workspace", "rotary_", "self_attention")
"""Beginnings of the names of static tensors that captures of attention make or need."""


SEGMENTS = 2 << 20
"""Bytes to a multiple of which large segments are taken."""


def separable(shape: CoreShape) -> bool:
    """Whether what graphs of Transformer Engine's allocate can be told from the rest, module by module."""
    return bool(shape.graphs) and APART.issuperset(shape.graphs or ()) and not shape.spec.layer_pattern


def captured_first(program: Program, shape: CoreShape) -> Program:
    """``program`` with captures as part of its beginning, and iterations without what lies in the graphs' pool."""
    order, kept = program.order, program.kept
    assert isinstance(order, MegatronOrder)
    assert kept is not None
    divided = [_Divided(chunk) for chunk in order.chunks]
    held = _captured(order, [(one.inside.passes.forward, one.inside.passes.backward) for one in divided])
    there = sum(one.bytes for one in kept.workspaces if isinstance(one, Hold) and _is_there(one.name, shape))
    return _behind(program, divided, held, kept.construction.excursion.net + there + held.peak)


@dataclass(frozen=True)
class Captures:
    """What decides how Megatron-Core's own graphs are captured."""

    shape: CoreShape
    gradients: str
    """Dtype of the gradient buffers."""
    tried: bool
    """A layer runs before it is captured (``num_warmup_steps``, or recompute)."""


def captured_behind(program: Program, given: Captures) -> Program:
    """``program`` with a first iteration without graphs and their captures as part of its beginning
    (``_CudaGraphRunner.create_fwd_graph``, ``create_bwd_graph``).

    Beside what layers hold, the pool has copies of inputs and of gradients that no graph made, and in forward passes
    the mask. Outside of it are, while a layer is captured, copies of its gradients, and what it takes when it is tried.
    """
    order, kept = program.order, program.kept
    assert isinstance(order, MegatronOrder)
    assert kept is not None
    divided = [_Divided(chunk) for chunk in order.chunks]
    pooled = [_own_passes(one, given) for one in divided]
    beside = [_around(forward, _beside(one, given)) for one, (forward, _) in zip(divided, pooled, strict=True)]
    every = _captured(order, [(forward, pooled[at][1]) for at, forward in enumerate(beside)])
    there = kept.construction.excursion.net + kept.workspaces.excursion.net
    return _behind(program, divided, _captured(order, pooled), there + max(order.whole.peak, every.peak))


def _behind(program: Program, divided: Sequence[_Divided], held: Excursion, peak: int) -> Program:
    assert isinstance(program.order, MegatronOrder)
    return replace(
        program,
        order=replace(program.order, chunks=tuple(one.outside for one in divided)),
        initialisation=max(program.initialisation or 0, peak),
        set_aside=-(-held.peak // SEGMENTS) * SEGMENTS,
    )


def _captured(order: MegatronOrder, passes: Sequence[tuple[Excursion, Excursion]]) -> Excursion:
    """Forward and backward ``passes`` of each chunk in the schedule's order."""
    held = ZERO
    for what, chunk, _, tensor in trace(reduced(order.schedule)):
        if tensor is None and what in PASSES:
            held = held.then(passes[chunk][what == "backward"])
    return held


def _own_passes(divided: _Divided, given: Captures) -> tuple[Excursion, Excursion]:
    """What a micro-batch's passes through a chunk have in the pool."""
    shape, passes = given.shape, divided.inside.passes
    hidden = hold_bytes(shape.hidden, shape.dtype)
    partial = POSTPROCESS in (shape.graphs or ())
    copied, received = hidden * divided.inputs, hidden * divided.gradients * (1 + partial)
    apart = 0 if shape.gradient_fusion else max((_weights(one, shape.dtype) for one in divided.layers), default=0)
    behind = _mask(shape) + hidden * partial * (divided.inputs > 0)
    forward, backward = _around(passes.forward, behind), _around(passes.backward, received + apart)
    return _changed(copied).then(forward), backward.then(_changed(-copied))


def _beside(divided: _Divided, given: Captures) -> int:
    """Bytes outside of the pool while a layer is captured: its gradients again, and copies of what it is given and
    makes, or what it takes when it is tried, less what it has in the pool later."""
    copies = 2 * hold_bytes(given.shape.hidden, given.shape.dtype) + _mask(given.shape)
    most = 0
    for layer in divided.layers:
        tapes, size = layer.steady, _weights(layer, given.gradients)
        if given.tried:
            size += copies + max(0, tapes.forward_fold.then(tapes.backward_fold).peak - tapes.forward_fold.net)
        most = max(most, size)
    return most


def _mask(shape: CoreShape) -> int:
    return hold_bytes((shape.b, 1, shape.s, shape.s * shape.cp), "bool") if shape.attention_mask else 0


def _weights(layer: Module, dtype: str) -> int:
    return sum(one.elements for one in layer.parameters) * ITEMSIZE[dtype]


def _changed(size: int) -> Excursion:
    return change(size, Category.ACTIVATIONS)


def _around(passes: Excursion, size: int) -> Excursion:
    """``passes`` while so many bytes more are held."""
    return _changed(size).then(passes).then(_changed(-size))


def _is_there(name: str, shape: CoreShape) -> bool:
    attention = block.dummy_gradients(replace(shape, kind="*", experts=None, graphs=None))
    dummies = {f"te_dummy_weight_gradient_{'x'.join(map(str, size))}" for size in attention}
    return name.startswith(THERE) or name in dummies


class _Own(NamedTuple):
    """Which of what a module shares with its neighbours lies in the graphs' pool."""

    module: Module
    given: bool
    makes: bool
    graded: bool
    returns: bool

    def divided(self, *, pooled: bool) -> Module:
        """The module with the tensors in the graphs' pool alone, or with the others."""
        module = self.module
        tapes = {id(one): self._tapes(one, pooled=pooled) for one in (module.first, module.steady)}
        return replace(module, first=tapes[id(module.first)], steady=tapes[id(module.steady)])

    def _tapes(self, tapes: Tapes, *, pooled: bool) -> Tapes:
        inside = _pooled(tapes)
        for id, lies in ((tapes.output, self.makes), (tapes.grad_input, self.returns)):
            if not lies:
                inside.discard(id)
        inside |= {id for id, lies in ((INPUT, self.given), (GRAD_OUTPUT, self.graded)) if lies}
        forward, backward = (_events(tape, inside, pooled=pooled) for tape in (tapes.forward, tapes.backward))
        if not pooled and _begins_in_graph(tapes):
            forward, backward = _copied(forward, backward)
        output, grad_input = (
            0 if lies is not pooled and (lies or id > 0) else id
            for id, lies in ((tapes.output, self.makes), (tapes.grad_input, self.returns))
        )
        return replace(tapes, forward=forward, backward=backward, output=output, grad_input=grad_input)


def _begins_in_graph(tapes: Tapes) -> bool:
    first = next((one for one in tapes.forward if isinstance(one, Hold)), None)
    return first is not None and first.stream == POOL


def _copied(forward: Tape, backward: Tape) -> tuple[Tape, Tape]:
    """A graph reads a copy of its input, which itself ends when the module returns (``Graphed.forward``,
    ``_CudagraphReplayNode.forward``: neither saves it)."""
    ends = tuple(one for one in backward if isinstance(one, Drop) and one.tensor == INPUT)
    return (*forward, *ends), tuple(one for one in backward if one not in ends)


def _pooled(tapes: Tapes) -> set[int]:
    return {one.tensor for one in (*tapes.forward, *tapes.backward) if isinstance(one, Hold) and one.stream == POOL}


def _events(tape: Iterable[Event], inside: set[int], *, pooled: bool) -> Tape:
    """Those of tensors that are ``inside``, or the others; the allocator serves what goes to other stages as usual."""
    kept = [event for event in tape if (event.tensor in inside) is pooled]
    return tuple([one._replace(stream=0) if isinstance(one, Hold) and one.stream == POOL else one for one in kept])


class _Divided:
    """A chunk, with the tensors in the graphs' pool apart from the others. What it exchanges with other stages is
    outside."""

    def __init__(self, chunk: Chunk) -> None:
        rows = [(span.module, name) for span in chunk.spans for name in span.names]
        modules = [module for module, _ in rows]
        made = list(_lies(modules, backward=False))
        returned = list(_lies(modules[::-1], backward=True))[::-1]
        owns = [
            _Own(module, given, makes, graded, returns)
            for module, (given, makes), (graded, returns) in zip(modules, made, returned, strict=True)
        ]
        graphed = [own for own in owns if _pooled(own.module.steady)]
        self.layers = {id(own.module): own.module for own in graphed}.values()
        """Modules of which graphs run parts."""
        self.inputs = sum(not own.given for own in graphed)
        """Graphs whose input no other one made;"""
        self.gradients = sum(not own.graded for own in graphed)
        """and the same of the gradient of the output."""
        names = [name for _, name in rows]
        self.inside, self.outside = (_part(chunk, owns, names, pooled=pooled) for pooled in (True, False))


def _lies(modules: Sequence[Module], *, backward: bool) -> Iterator[tuple[bool, bool]]:
    """Of each module in the order of a pass, whether what it is given lies in the pool, and what it hands on."""
    made = [one.steady.grad_input if backward else one.steady.output for one in modules]
    whole = [bool(one.steady.forward and one.steady.backward) for one in modules]
    ends = [one == 0 and runs for one, runs in zip(made, whole, strict=True)]
    makes = [one not in (0, GRAD_OUTPUT if backward else INPUT) for one in made]
    last = max((place for place, one in enumerate(makes) if one), default=-1)
    leaves, at = last >= 0 and not any(ends[last:]), False
    for place, module in enumerate(modules):
        given = at
        if makes[place]:
            at = made[place] in _pooled(module.steady) and not (leaves and place == last)
        elif ends[place]:
            at = False
        yield given, at


def _part(chunk: Chunk, owns: Sequence[_Own], names: Sequence[str], *, pooled: bool) -> Chunk:
    parts = {own: own.divided(pooled=pooled) for own in set(owns)}
    rows = groupby(zip(owns, names, strict=True), key=lambda row: row[0])
    return replace(chunk, spans=tuple(Span(parts[own], tuple(name for _, name in group)) for own, group in rows))
