"""Phi 3's layer (``models/phi3/modeling_phi3.py``): Llama's with fused projections and partial rotary positions."""

from __future__ import annotations

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Recorder, Tensor
from .huggingface_parts import Heads, LayerShape, Shared, activation, attention, linear, rms_norm, rotate_half


def heads_of(r: Recorder, x: Tensor, name: str, shape: LayerShape) -> Tensor:
    """``x.view(b, s, a, d).transpose(1, 2)``."""
    b, s, d = shape.b, shape.s, shape.spec.head_dim
    heads = x.shape[-1] // d
    if heads > 1 and (name != "value" or not shape.flash):
        x = ops.copied_gradient(r, x, name)
    return x.view(b, heads, s, d)


def phi3_rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared, n: int) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: the first ``n`` features of each head turned, and the rest, perhaps none, appended."""

    def turned(x: Tensor, passed: Tensor, name: str) -> Tensor:
        assert shared.cos is not None
        assert shared.sin is not None
        kept = ops.multiply(r, x, shared.cos, f"{name}_cos")
        half = ops.multiply(r, rotate_half(r, x, name), shared.sin, f"{name}_sin")
        total = ops.add(r, kept, half, f"{name}_turned")
        del kept, half
        return ops.cat_last(r, total, passed, f"{name}_rotary")

    q_rot, q_pass = halves(r, q, n, "query")
    k_rot, k_pass = halves(r, k, n, "key")
    q_out = turned(q_rot, q_pass, "query")
    k_out = turned(k_rot, k_pass, "key")
    return q_out, k_out


def halves(r: Recorder, x: Tensor, n: int, name: str) -> tuple[Tensor, Tensor]:
    """``x[..., :n], x[..., n:]``; all of a tensor is an alias of it."""
    d = x.shape[-1]
    first = ops.alias(r, x) if n == d else ops.slice_last(r, x, n, f"{name}_turned")
    return first, ops.slice_last(r, x, d - n, f"{name}_passed")


def phi3_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec = shape.spec
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    q = ops.slice_last(r, qkv, spec.heads * spec.head_dim, "query")
    k = ops.slice_last(r, qkv, spec.kv_heads * spec.head_dim, "key")
    v = ops.slice_last(r, qkv, spec.kv_heads * spec.head_dim, "value")
    q = heads_of(r, q, "query", shape)
    k = heads_of(r, k, "key", shape)
    v = heads_of(r, v, "value", shape)
    q, k = phi3_rotary(r, q, k, shared, spec.rotary_features)
    out, weights = attention(r, Heads(q, False), Heads(k, False), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def phi3_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    """``up * activation(gate)``, both views of one projection."""
    up = linear(r, hidden, "gate_up", 2 * spec.ffn, spec.mlp_bias)
    half = (*up.shape[:-1], spec.ffn)
    gate, up = ops.split(r, up, [half, half], "gate_up")
    up = ops.multiply(r, up, activation(r, gate, spec), "gated")
    return linear(r, up, "down", spec.hidden, spec.mlp_bias)


def phi3_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Phi3DecoderLayer.forward``."""
    spec = shape.spec
    residual = hidden
    hidden = rms_norm(r, hidden, "attention_norm")
    hidden, _ = phi3_attention(r, hidden, shared, shape)
    hidden = ops.add(
        r, residual, ops.dropout(r, hidden, spec.hidden_dropout, "attention_output_dropout"), "residual_attention"
    )
    residual = hidden
    hidden = rms_norm(r, hidden, "mlp_norm")
    hidden = phi3_mlp(r, hidden, spec)
    hidden = ops.add(r, residual, ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout"), "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life
