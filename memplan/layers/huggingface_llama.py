"""Llama's layer (``models/llama/modeling_llama.py``); Mistral's and Qwen 2's are the same, Qwen 3 adds head norms."""

from __future__ import annotations

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Recorder, Tensor
from .huggingface_parts import Heads, LayerShape, Shared, activation, attention, linear, rms_norm, rotary


def llama_projection(r: Recorder, hidden: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """A projection as (b, a, s, d); queries and keys of Qwen 3 are normed per head."""
    spec, b, s, d = shape.spec, shape.b, shape.s, shape.spec.head_dim
    x = linear(r, hidden, name, heads * d, spec.attention_bias)
    if heads > 1 and (name != "value" or not shape.flash):
        x = ops.copied_gradient(r, x, name)
    if name != "value" and spec.qk_norm:
        return rms_norm(r, x.view(b, s, heads, d), f"{name}_norm").view(b, heads, s, d)
    return x.view(b, heads, s, d)


def llama_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec = shape.spec
    q = llama_projection(r, hidden, "query", spec.heads, shape)
    k = llama_projection(r, hidden, "key", spec.kv_heads, shape)
    v = llama_projection(r, hidden, "value", spec.kv_heads, shape)
    q, k = rotary(r, q, k, shared)
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def llama_mlp(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    return linear(r, gated(r, x, spec), "down", spec.hidden, spec.mlp_bias)


def gated(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``act_fn(gate_proj(x)) * up_proj(x)``."""
    gate = activation(r, linear(r, x, "gate", spec.ffn, spec.mlp_bias), spec)
    up = linear(r, x, "up", spec.ffn, spec.mlp_bias)
    return ops.multiply(r, gate, up, "gated")


def llama_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``LlamaDecoderLayer.forward``."""
    residual = hidden
    hidden = rms_norm(r, hidden, "attention_norm")
    hidden, _ = llama_attention(r, hidden, shared, shape)
    hidden = ops.add(r, residual, hidden, "residual_attention")
    residual = hidden
    hidden = rms_norm(r, hidden, "mlp_norm")
    hidden = llama_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life
