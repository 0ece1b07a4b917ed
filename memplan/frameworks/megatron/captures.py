"""CUDA graphs of layers that are captured before the first iteration (``--cuda-graph-warmup-steps 0``).

``megatron/training/training.py`` (``train``) calls ``create_cudagraphs`` of ``core/transformer/cuda_graphs.py`` first:
passes of all micro-batches are captured, of the parts that graphs run alone, in the schedule's order. Nothing else is
there yet, neither other activations nor optimizer states. What graphs' kernels allocate lies in their pool for good and
counts as allocated no more, so that iterations allocate what is outside of graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...layers.megatron_core import block
from ...layers.megatron_core.graphs import POOL
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Module, Tapes
from ...schedules.megatron_fold import PASSES, MegatronOrder, reduced
from ...schedules.megatron_schedule import trace
from ...tape.events import ZERO, Event, Hold, Tape
from ...tape.program import Chunk, Program, Span

APART = frozenset({"attn", "moe_router", "moe_preprocess"})
"""Parts behind which a layer goes on, so that neither its output nor its input's gradient is a graph's own."""

THERE = ("graph_", "cublas_workspace", "te_cublas_workspace", "rotary_", "self_attention")
"""Beginnings of the names of static tensors that captures of attention make or need."""


SEGMENTS = 2 << 20
"""Bytes to a multiple of which large segments are taken."""


def separable(shape: CoreShape) -> bool:
    """Whether what graphs allocate can be told from the rest, module by module."""
    return bool(shape.graphs) and APART.issuperset(shape.graphs or ()) and not shape.spec.layer_pattern


def captured_first(program: Program, shape: CoreShape) -> Program:
    """``program`` with captures as part of its beginning, and iterations without what lies in the graphs' pool."""
    order, kept = program.order, program.kept
    assert isinstance(order, MegatronOrder)
    assert kept is not None
    inside = [_part(chunk, pooled=True) for chunk in order.chunks]
    held = ZERO
    for what, chunk, _, tensor in trace(reduced(order.schedule)):
        if tensor is None and what in PASSES:
            passes = inside[chunk].passes
            held = held.then(passes.forward if what == "forward" else passes.backward)
    there = sum(one.bytes for one in kept.workspaces if isinstance(one, Hold) and _is_there(one.name, shape))
    peak = kept.construction.excursion.net + there + held.peak
    outside = tuple(_part(chunk, pooled=False) for chunk in order.chunks)
    return replace(
        program,
        order=replace(order, chunks=outside),
        initialisation=max(program.initialisation or 0, peak),
        set_aside=-(-held.peak // SEGMENTS) * SEGMENTS,
    )


def _is_there(name: str, shape: CoreShape) -> bool:
    attention = block.dummy_gradients(replace(shape, kind="*", experts=None, graphs=None))
    dummies = {f"te_dummy_weight_gradient_{'x'.join(map(str, size))}" for size in attention}
    return name.startswith(THERE) or name in dummies


def _part(chunk: Chunk, *, pooled: bool) -> Chunk:
    """``chunk`` with the tensors in the graphs' pool alone, or with the others."""
    spans = tuple(Span(_part_of(span.module, pooled=pooled), span.names) for span in chunk.spans)
    return replace(chunk, spans=spans)


def _part_of(module: Module, *, pooled: bool) -> Module:
    tapes = {id(one): _tapes(one, pooled=pooled) for one in (module.first, module.steady)}
    return replace(module, first=tapes[id(module.first)], steady=tapes[id(module.steady)])


def _tapes(tapes: Tapes, *, pooled: bool) -> Tapes:
    inside = {one.tensor for one in (*tapes.forward, *tapes.backward) if isinstance(one, Hold) and one.stream == POOL}
    forward, backward = (_events(tape, inside, pooled=pooled) for tape in (tapes.forward, tapes.backward))
    return replace(tapes, forward=forward, backward=backward)


def _events(tape: Iterable[Event], inside: set[int], *, pooled: bool) -> Tape:
    return tuple(event for event in tape if (event.tensor in inside) is pooled)
