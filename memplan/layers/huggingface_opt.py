"""OPT's layer (``models/opt/modeling_opt.py``) with its norms before each block."""

from __future__ import annotations

from . import ops
from .autograd import Recorder, Tensor
from .huggingface_parts import Heads, LayerShape, Shared, activation, attention, layer_norm, linear


def opt_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``OPTAttention.forward``: queries are scaled before the product, and scores by 1 behind it."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim

    def copied(x: Tensor, name: str, when: bool) -> Tensor:
        return ops.copied_gradient(r, x, name) if when and not shape.flash else x

    q = ops.scale(r, linear(r, hidden, "query", a * d, spec.attention_bias), "query_scaled")
    q = copied(q, "query", a > 1).view(b, a, s, d)
    strided = b > 1 and not shape.flash
    k = linear(r, hidden, "key", a * d, spec.attention_bias, strided=strided).view(b, a, s, d)
    v = copied(linear(r, hidden, "value", a * d, spec.attention_bias), "value", a > 1).view(b, a, s, d)
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def opt_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``OPTDecoderLayer.forward``, whose second half is over rows of all sequences at once."""
    spec = shape.spec
    residual = hidden
    hidden = layer_norm(r, hidden, "attention_norm")
    hidden, _ = opt_attention(r, hidden, shared, shape)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "attention_output_dropout")
    hidden = ops.add(r, residual, hidden, "residual_attention").view(shape.b * shape.s, spec.hidden)
    residual = hidden
    hidden = layer_norm(r, hidden, "mlp_norm")
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout")
    hidden = ops.add(r, residual, hidden, "residual_mlp").view(shape.b, shape.s, spec.hidden)
    return hidden  # noqa: RET504 - the variable ends its tensor's life
