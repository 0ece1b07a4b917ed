"""What stands in place of attention or an MLP in layers that differ (``models/gpt/heterogeneous/
heterogeneous_layer_specs.py``, ``transformer/heterogeneous/linear_replacements.py``): one linear layer behind a norm
(``ColumnParallelLinearGathered``), whose parts of features are put together behind it, or nothing.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...plan.spec import LINEAR, NONE
from ..autograd import Recorder, Tensor
from ..gradients import fresh
from . import local, te
from .mappings import side_by_side
from .shape import CoreShape

ATTENTION, MLP = "self_attention", "mlp"
NORMS = {ATTENTION: "input_layernorm", MLP: "pre_mlp_layernorm"}


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What the recipe does not cover of layers that differ."""
    if not shape.spec.layer_blocks:
        return
    others = {
        "fused operations, whose MLP their specification has not": shape.fuses_operations,
        "norms that return the residual, which their specification has not": shape.norm_takes_residual,
        "Transformer Engine's activation functions, which their specification has not": shape.te_activation,
        "the exchange of tokens beside another micro-batch's computation": shape.overlap is not None,
        "CUDA graphs of layers": shape.graphs is not None,
        "activations on the host": bool(shape.offload),
        "recomputed MLPs or norms": bool({"mlp", "layernorm"} & {*shape.recompute_modules}),
        "an MLP in parts": shape.mlp_chunks > 1,
        "packed sequences": shape.packed > 0,
    }
    yield from (f"layers that differ with {name}" for name, applies in others.items() if applies)


def block(r: Recorder, hidden: Tensor, part: str, kind: str, shape: CoreShape) -> Tensor:
    """In place of ``part``; without anything there is no norm, either, and nothing is added."""
    if kind == NONE:
        return hidden
    assert kind == LINEAR
    n, bias = shape.spec.hidden // shape.t, shape.spec.mlp_bias
    if shape.implementation == "local":
        normed = local.norm(r, hidden, NORMS[part], shape)
        linear = local.column_linear(r, normed, part, n, shape, bias=bias, skip_bias=False)
    else:
        linear = te.norm_column_linear(r, hidden, part, f"{part}.layer_norm", n, shape, bias=bias, skip_bias=False)
    # with sequence parallelism Megatron-Core stops: it pads another dimension than that of features
    out = side_by_side(r, linear[0], part, f"grad_{part}_of_rank", shape.t)
    del linear
    return local.bias_dropout_add(r, out, None, hidden, part, shape)


def is_empty(shape: CoreShape) -> bool:
    return shape.replaced == (NONE, NONE)


def recomputed_nothing(r: Recorder, hidden: Tensor) -> Tensor:
    """A region of empty layers (``tensor_parallel.checkpoint``): its output is its input, put into a tensor of
    one element (``make_viewless_tensor``); its input's gradient is a copy, since others hold the one that came."""
    like, dtype = hidden.shape, hidden.dtype
    r.empty((1,), dtype, "viewless")

    return Tensor(hidden.storage, like, dtype, r.node((hidden,), (), fresh(hidden, "grad_copied")))
