"""CUDA graphs of a rank's layers (``megatron/core/transformer/cuda_graphs.py``, ``TECudaGraphHelper``; Transformer
Engine's ``pytorch/graph.py``, ``_make_graphed_callables``) or of a whole iteration (``core/full_cuda_graph.py``).

What a graph's kernels allocate lies in a memory pool of its own, which nothing else takes from: here, tensors of
another stream. Passes of all micro-batches are captured in the schedule's order, so that the pool grows to what the
captured parts of layers hold at once.

What stays of layers' graphs besides: a set of inputs for every layer and micro-batch that is between its forward and
its backward, taken over by later ones of layers with the same inputs (``_get_sample_arguments``), in bf16, and where
attention is captured a mask (b, 1, s, s); a set of the outputs' gradients for each kind of layer; the last gradient of
an input. Captures run on a stream of their own, and trial runs before them on another: matrix products that go through
PyTorch's cuBLAS have workspaces there.

Every layer of a hybrid has one block and is captured alone; the layers that predict further tokens are one
``HybridStack``, which no graph runs (``_layer_is_graphable``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from ...tape.events import Category, Hold
from ..autograd import Recorder, Shape, Tensor
from ..counting import GRAPHS
from ..gradients import viewed
from ..module import hold_bytes
from ..work import NOTHING
from .shape import CoreShape

POOL = GRAPHS
"""Stream of what lies in the graphs' pool."""

STEP_POOL = 9
"""The same of the optimizer's step (``full_cuda_graph.py``, ``get_graph_pool``: a pool for each capture)."""

STREAMS = 2
"""On which captures and trial runs before them are."""

POSTPROCESS = "moe_postprocess"
"""What follows experts in a layer, where a graph of Megatron-Core's own runs it."""


STACK = "stack"
"""The layers of a hybrid that predict one token further: a graph each of Megatron-Core's own, none of TE's."""


def parts_of_own(modules: Sequence[str], *, hybrid: bool) -> tuple[str, ...] | None:
    """Parts that graphs of Megatron-Core's own run where ``modules`` are named (``TransformerLayer``,
    ``MoETransformerLayer`` and ``MambaLayer.create_mcore_cudagraph_manager``).

    A layer of GPT is one graph, whether its attention or its MLP is named, and none with parts of its experts alone.
    Of a hybrid's experts two graphs are made: up to the sorted rows, and from what came back to the output.
    """
    if not hybrid:
        return ("attn", "mlp", "moe") if not modules or {"attn", "mlp"} & {*modules} else None
    if not modules:
        return ("attn", "mlp", "moe", "mamba", STACK)
    partial = ("moe_router", "moe_preprocess", POSTPROCESS) if {"moe_router", "moe_preprocess"} & {*modules} else ()
    return (*(one for one in modules if one not in partial), *partial, STACK)


@contextmanager
def captured(r: Recorder, shape: CoreShape, part: str) -> Iterator[None]:
    """A part of a layer, which a graph may run."""
    outer = r.pool
    if runs(shape, part):
        r.pool = POOL
    yield
    r.pool = outer


def runs(shape: CoreShape, part: str) -> bool:
    """A graph runs the part; all parts, where none are named."""
    return shape.graphs is not None and (not shape.graphs or part in shape.graphs)


def copied(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """What attention outside of graphs made, as a graph behind it reads it: a copy, among the static inputs (``kept``).
    Neither ``Graphed.forward`` of Transformer Engine's ``graph.py`` nor the graph keeps the original, which ends when
    the layer returns (``_te_cuda_graph_replay``)."""
    if shape.graphs is None or attends(shape) or not graphed(shape):
        return hidden
    copy = r.outside(hidden.shape, hidden.dtype)
    copy.node = r.node((hidden,), (), viewed(hidden), work=NOTHING)
    return copy


_OF_KIND = {"M": ("mamba",), "*": ("attn",), "-": ("mlp",), "E": ("moe", "moe_router"), "G": ("attn",)}


def blocks(shape: CoreShape) -> tuple[str, ...]:
    """Parts of a layer like this one."""
    if shape.kind:
        return _OF_KIND.get(shape.kind, ())
    return ("attn", "moe", "moe_router") if shape.experts is not None else ("attn", "mlp")


def graphed(shape: CoreShape) -> bool:
    """A graph runs the layer, or parts of it."""
    return any(runs(shape, part) for part in blocks(shape))


def attends(shape: CoreShape) -> bool:
    """A graph runs the layer's attention, and so has a mask among its inputs."""
    return "attn" in blocks(shape) and runs(shape, "attn")


@lru_cache(maxsize=1024)
def kept(kinds: frozenset[CoreShape], with_mask: int, without_mask: int, cublas: tuple[Hold, ...]) -> tuple[Hold, ...]:
    """Static tensors of graphs of layers of these kinds, of which so many with and without attention are between
    their forward and their backward at once."""
    every = sorted(kinds, key=str)
    if not every:
        return ()
    shape = every[0]
    hidden = _hold("graph_input", shape.hidden, "bf16")
    mask = _hold("graph_mask", (shape.b, 1, shape.s, shape.s * shape.cp), "bool")
    found = [hidden, mask] * with_mask + [hidden] * without_mask
    for size, dtype in {outputs(one) for one in every}:
        found += [_hold("graph_output_gradient", one, dtype) for one in size]
    found.append(_hold("graph_input_gradient", shape.hidden, shape.dtype))
    unfused = any(attends(one) and one.attention == "unfused" for one in every)
    return (*found, *cublas * (STREAMS if unfused else 0))


def outputs(shape: CoreShape) -> tuple[tuple[Shape, ...], str]:
    """Shapes of a layer's outputs that have a gradient: of one whose experts run outside, the residual, the input of
    the experts, its probabilities, and the output of shared experts (``MoECudaGraphPartialCaptureSignal``). The input
    is projected, if it is, within ``moe_preprocess``."""
    experts = shape.experts is not None and runs(shape, "moe_router") and not runs(shape, "moe")
    if not experts:
        return (shape.hidden,), shape.dtype
    s, b, _ = shape.hidden
    taken = (s, b, shape.spec.expert_hidden) if runs(shape, "moe_preprocess") else shape.hidden
    wide = [shape.hidden] * (1 + bool(shape.spec.shared_expert_ffn))
    return (taken, *wide, (s * b, shape.spec.experts)), shape.dtype


def _hold(name: str, size: Shape, dtype: str) -> Hold:
    return Hold(0, hold_bytes(size, dtype), Category.BUFFERS, name, size, dtype)
