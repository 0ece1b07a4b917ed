"""``TEFusedMLP`` (``megatron/core/extensions/transformer_engine.py``): a dense MLP as a chain of Transformer Engine's
operations (``pytorch/ops``: norm, ``BasicLinear``, activation, ``BasicLinear``, ``ReduceScatter`` or ``AllReduce``),
which is one node of autograd (``fuser.py``).

Saved are the input, the norm's statistics and output, the activation's input and its output. In backward each ends as
soon as its operation is done (``clear_tensor_data``), but the input, which is not the chain's own.

Shapes: s sequence, b micro-batch, h hidden; f the inner width on this rank, twice that before SwiGLU; s / t under
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ...tape.events import Category
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..work import Operator, Stream
from . import te
from .shape import CoreShape

OLDEST = (2, 8)
"""Before it operations end later."""
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
COMMUNICATION = Category.COMMUNICATION_BUFFERS


def runs(shape: CoreShape) -> bool:
    """Models with experts take layers from a specification without such an MLP (``get_gpt_decoder_layer_specs``); their
    experts are another chain (``grouped_chain``)."""
    return shape.fuses_operations and not shape.spec.experts


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What this recipe does not cover of ``shape``."""
    if not runs(shape):
        return
    spec = shape.spec
    others = {
        "local layers": shape.implementation == "local",
        "hybrids, BERT or T5, which have none": bool(spec.layer_pattern) or spec.family in ("bert", "t5"),
        "8 or 4 bits": shape.low is not None,
        "biases of MLPs": spec.mlp_bias,
        f"{spec.activation} in MLPs": spec.activation not in ("swiglu", "gelu"),
        "MLPs in chunks": shape.mlp_chunks > 1,
        "multi-token prediction": spec.mtp_layers > 0,
        "CUDA graphs of layers": shape.graphs is not None,
        "Transformer Engine before 2.8": shape.te < OLDEST,
    }
    yield from (f"Transformer Engine's fuser of operations with {name}" for name, applies in others.items() if applies)


def mlp(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """(s, b, h), or (s/t, b, h) with sequence parallelism, to the same; the norm is in it."""
    spec, dtype, like = shape.spec, x.dtype, x.shape
    h, f = spec.hidden, spec.ffn // shape.t
    wide = 2 * f if spec.gated else f
    gathers, whole = shape.sequence_parallel, (shape.s, shape.b, h)
    layer_norm = spec.norm == "layernorm"
    names = ("weight", "bias") if layer_norm else ("weight",)
    scales = [r.parameter(f"{FC1}.layer_norm.{name}", (h,), dtype) for name in names]
    first = r.parameter(f"{FC1}.weight", (wide, h), dtype)
    second = r.parameter(f"{FC2}.weight", (h, f), dtype)

    kinds = ("mean", "rsigma") if layer_norm else ("rsigma",)
    statistics = [r.empty((prod(like[:-1]),), "fp32", f"{FC1}.layer_norm_{kind}") for kind in kinds]
    normed = [r.empty(like, dtype, f"{FC1}.layer_norm")]
    total = [r.empty(whole, dtype, f"{FC1}_input_gathered", COMMUNICATION)] if gathers else []
    inner = [r.empty((*whole[:-1], wide), dtype, FC1)]
    total.clear()
    activated = [r.empty((*whole[:-1], f), dtype, f"{FC1}_activation")]
    sizes: tuple[Shape, Shape] = first.shape, second.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        again = [r.empty(whole, dtype, f"grad_{FC2}_gathered", COMMUNICATION)] if gathers else []
        of_activated = [r.empty((*whole[:-1], f), dtype, f"grad_{FC2}_input")]
        made = [_weight(r, sizes[1], dtype, FC2, shape)]
        activated.clear()
        again.clear()
        of_inner = [r.empty((*whole[:-1], wide), dtype, f"grad_{FC1}_activation")]
        inner.clear()
        of_activated.clear()
        again = [r.empty(whole, dtype, f"{FC1}_input_gathered", COMMUNICATION)] if gathers else []
        of_whole = [r.empty(whole, dtype, f"grad_{FC1}_input")]
        of_normed = [r.empty(like, dtype, f"grad_{FC1}_scattered")] if gathers else [*of_whole]
        made.insert(0, _weight(r, sizes[0], dtype, FC1, shape))
        of_whole.clear()
        again.clear()
        normed.clear()
        of_inner.clear()
        grad = r.empty(like, dtype, f"grad_{FC1}.layer_norm_input")
        of_scales = [r.empty((h,), dtype, f"grad_{FC1}.layer_norm_parameter") for _ in kinds]
        statistics.clear()
        of_normed.clear()
        return [grad, *of_scales, *made]

    for held in (statistics, normed, inner, activated):
        r.keeps_apart(held)
    node = r.node((x, *scales, first, second), (x,), backward, work=_work(r, like, shape, wide, f))
    product = r.empty(whole, dtype, FC2)
    if gathers:
        product = r.empty(like, dtype, f"{FC2}_scattered")
    return product.by(node)


def _weight(r: Recorder, size: Shape, dtype: str, name: str, shape: CoreShape) -> Tensor | None:
    """A weight's gradient; with gradient accumulation fusion it is added to ``main_grad``, and a dummy stands in."""
    return None if shape.gradient_fusion else r.empty(size, dtype, f"grad_{name}_weight")


def _work(r: Recorder, like: Shape, shape: CoreShape, wide: int, f: int) -> Operator:
    tokens, h, dtype = shape.s * shape.b, shape.spec.hidden, shape.dtype
    column = shape.ranks.column(tokens, wide, h, dtype, shape.added(r.summed))
    row = shape.ranks.row(tokens, h, f, dtype, shape.added(r.summed))
    normed, inner, out = (size_of(size, dtype) for size in (like, (tokens, wide), (tokens, f)))
    row = row.after((Stream(inner + out),), ()).then((), (Stream(2 * inner + out),))
    return te.behind_norm(column.then(row.forward or (), ()).after((), row.backward or ()), normed)
