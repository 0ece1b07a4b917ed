"""CUDA graphs of a rank's layers (``megatron/core/transformer/cuda_graphs.py``, ``TECudaGraphHelper``; Transformer
Engine's ``pytorch/graph.py``, ``_make_graphed_callables``) or of a whole iteration (``core/full_cuda_graph.py``).

What a graph's kernels allocate lies in a memory pool of its own, which nothing else takes from: here, tensors of
another stream. Passes of all micro-batches are captured in the schedule's order, so that the pool grows to what the
captured parts of layers hold at once.

What stays of layers' graphs besides: a set of inputs for every layer and micro-batch that is between its forward and
its backward, taken over by later ones (``_get_sample_arguments``), in bf16, and where attention is captured a mask (b,
1, s, s); a set of the outputs' gradients for each kind of layer; the last gradient of an input. Captures run on a
stream of their own, and trial runs before them on another: matrix products that go through PyTorch's cuBLAS have
workspaces there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ...tape.events import Category, Hold
from ..autograd import Recorder, Shape
from ..module import hold_bytes
from .shape import CoreShape

POOL = 8
"""Stream of what lies in the graphs' pool."""

STREAMS = 2
"""On which captures and trial runs before them are."""


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


def blocks(shape: CoreShape) -> tuple[str, ...]:
    """Parts of a layer like this one."""
    return ("attn", "moe", "moe_router") if shape.experts is not None else ("attn", "mlp")


@lru_cache(maxsize=1024)
def kept(kinds: frozenset[CoreShape], in_flight: int, cublas: tuple[Hold, ...]) -> tuple[Hold, ...]:
    """Static tensors of graphs of layers of these kinds."""
    graphed = sorted((one for one in kinds if any(runs(one, part) for part in blocks(one))), key=str)
    if not in_flight or not graphed:
        return ()
    shape = graphed[0]
    attends = runs(shape, "attn")
    inputs: list[tuple[str, Shape, str]] = [("input", shape.hidden, "bf16")]
    if attends:
        inputs.append(("mask", (shape.b, 1, shape.s, shape.s * shape.cp), "bool"))
    found = [_hold(f"graph_{name}", size, dtype) for name, size, dtype in inputs] * in_flight
    for size, dtype in {outputs(one) for one in graphed}:
        found += [_hold("graph_output_gradient", one, dtype) for one in size]
    found.append(_hold("graph_input_gradient", shape.hidden, shape.dtype))
    return (*found, *cublas * (STREAMS if attends and shape.attention == "unfused" else 0))


def outputs(shape: CoreShape) -> tuple[tuple[Shape, ...], str]:
    """Shapes of a layer's outputs that have a gradient: of one whose experts run outside, the residual, the input of
    the experts, its probabilities, and the output of shared experts (``MoECudaGraphPartialCaptureSignal``)."""
    experts = shape.experts is not None and runs(shape, "moe_router") and not runs(shape, "moe")
    if not experts:
        return (shape.hidden,), shape.dtype
    s, b, _ = shape.hidden
    return (*[shape.hidden] * (2 + bool(shape.spec.shared_expert_ffn)), (s * b, shape.spec.experts)), shape.dtype


def _hold(name: str, size: Shape, dtype: str) -> Hold:
    return Hold(0, hold_bytes(size, dtype), Category.BUFFERS, name, size, dtype)
