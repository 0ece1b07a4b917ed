"""``megatron/core/transformer/mlp.py``, ``MLP.forward``.

Shapes: s sequence, b micro-batch, f the inner width on this rank (ffn / t; twice that before SwiGLU).
"""

from __future__ import annotations

from .. import ops
from ..autograd import Recorder, Tensor
from . import fusions, local, te
from .shape import CoreShape

FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"


def mlp(r: Recorder, hidden: Tensor, shape: CoreShape, norm_name: str = "") -> tuple[Tensor, Tensor | None]:
    """(s, b, h) to (s, b, h) and the bias that is not added yet. With ``norm_name`` the first
    projection has the norm in it."""
    has_bias = shape.spec.mlp_bias
    f = shape.spec.ffn // shape.t * (2 if shape.spec.activation == "swiglu" else 1)
    if norm_name:
        x, bias = te.norm_column_linear(r, hidden, FC1, norm_name, f, shape, bias=has_bias, skip_bias=True)
    elif shape.implementation == "local":
        x, bias = local.column_linear(r, hidden, FC1, f, shape, bias=has_bias, skip_bias=True)
    else:
        x, bias = te.column_linear(r, hidden, FC1, f, shape, bias=has_bias, skip_bias=True)
    gated = shape.spec.activation == "swiglu"
    if shape.bias_activation_fusion and gated:
        x = fusions.bias_swiglu(r, x, bias, FC1)
    elif shape.bias_activation_fusion and bias is not None:
        x = fusions.bias_gelu(r, x, bias, FC1)
    else:
        if bias is not None:
            x = ops.add(r, x, bias, f"{FC1}_bias")
        x = fusions.swiglu(r, x, FC1) if gated else fusions.gelu(r, x, FC1)
    row_linear = local.row_linear if shape.implementation == "local" else te.row_linear
    return row_linear(r, x, FC2, shape, bias=has_bias)
