"""Falcon 7B's layer (``models/falcon/modeling_falcon.py``): attention and MLP side by side behind one norm.

One key head. The larger Falcons' ``new_decoder_architecture`` and ALiBi are other code.
"""

from __future__ import annotations

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Gradients, Recorder, Shape, Tensor
from .huggingface_parts import (
    Heads,
    LayerShape,
    Shared,
    activation,
    layer_norm,
    linear,
    product,
    repeated,
    rotary,
    weights_before,
)


def taken(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """``x[..., [i], :]``: a copy; the index is a tensor, which is saved.

    The gradient is put into zeros of the size of ``x``: in place, but for fake tensors (``TensorAdvancedIndexing.cpp``,
    ``index_backward``).
    """
    index = r.empty((1,), "int64", f"{name}_index")
    out = r.empty(shape, x.dtype, name)
    whole, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Gradients:
        zeros = r.empty(whole, dtype, f"grad_{name}_zeros")
        return [zeros if r.accumulates_in_place else r.empty(whole, dtype, f"grad_{name}_put")]

    out.node = r.node((x,), (index,), backward)
    return out


def divided_in_place(r: Recorder, x: Tensor) -> Tensor:
    """``x /= c``."""
    shape, dtype = x.shape, x.dtype
    node = r.node((x,), (), lambda r, gradients: [r.empty(shape, dtype, "grad_scores_divided")])
    return Tensor(x.storage, shape, dtype, node)


def added_in_place(r: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """``x += y``."""

    def backward(r: Recorder, gradients: Gradients) -> Gradients:
        gradient = gradients[0]
        assert gradient is not None
        return [gradient, gradient.alias()]

    return Tensor(x.storage, x.shape, x.dtype, r.node((x, y), (), backward))


def with_one_head(r: Recorder, x: Heads, y: Tensor, names: tuple[str, str], shape: Shape, name: str) -> Tensor:
    """``matmul`` with the one key head, which it expands itself, behind autocast's casts."""
    cast_x, cast_y = ops.entering(r, "matmul", x.tensor, y, name=f"{name}_operand")
    heads = repeated(r, Heads(cast_y, True), x.tensor.shape[1], names[1])
    return product(r, Heads(cast_x, x.transposed), heads, names, shape, name)


def falcon_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``FalconAttention.forward``, eager; no dropout of the probabilities."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    q = ops.slice_last(r, qkv, a * d, "query").view(b, a, s, d)
    k = taken(r, qkv, (b, 1, s, d), "key")
    v = taken(r, qkv, (b, 1, s, d), "value")
    q, k = rotary(r, q, k, shared)
    weights = with_one_head(r, Heads(q, True), k, ("query", "key"), (b, a, s, s), "scores")
    weights = divided_in_place(r, weights)
    weights = ops.softmax(r, ops.add_constant(r, weights, "scores_masked", shared.mask), "probabilities")
    out = with_one_head(r, Heads(weights, False), v, ("", "value"), (b, a, s, d), "context")
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def falcon_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = activation(r, linear(r, hidden, "up", spec.ffn, spec.mlp_bias), spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def falcon_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``FalconDecoderLayer.forward``."""
    _before = weights_before(r, shape)
    spec = shape.spec
    residual = hidden
    normed = layer_norm(r, hidden, "attention_norm")
    attended, _ = falcon_attention(r, normed, shared, shape)
    fed = falcon_mlp(r, normed, spec)
    fed = added_in_place(r, fed, attended)
    dropped = ops.dropout(r, fed, spec.hidden_dropout, "blocks_dropout")
    return ops.add(r, residual, dropped, "residual")
