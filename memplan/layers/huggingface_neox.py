"""GPT-NeoX's layer (``models/gpt_neox/modeling_gpt_neox.py``): attention and MLP side by side, or in turn."""

from __future__ import annotations

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Recorder, Tensor
from .huggingface_parts import Heads, LayerShape, Shared, activation, attention, layer_norm, linear, rotary_one
from .huggingface_phi3 import halves


def neox_rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared, n: int) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: the first ``n`` features of each head turned, of queries and of keys, then the rest
    appended to both."""
    q_rot, q_pass = halves(r, q, n, "query")
    k_rot, k_pass = halves(r, k, n, "key")
    q_out = rotary_one(r, q_rot, shared, "query")
    k_out = rotary_one(r, k_rot, shared, "key")
    q_out = ops.cat_last(r, q_out, q_pass, "query_whole")
    k_out = ops.cat_last(r, k_out, k_pass, "key_whole")
    return q_out, k_out


def neox_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``GPTNeoXAttention.forward``: heads are transposed, then cut into queries, keys and values."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    qkv = ops.copied_gradient(r, qkv, "qkv").view(b, a, s, 3 * d)
    q, k, v = ops.split(r, qkv, [(b, a, s, d)] * 3, "qkv")
    q, k = neox_rotary(r, q, k, shared, spec.rotary_features)
    out, weights = attention(r, Heads(q, False), Heads(k, False), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def neox_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def neox_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GPTNeoXLayer.forward``."""
    spec = shape.spec
    normed = layer_norm(r, hidden, "attention_norm")
    attended, _ = neox_attention(r, normed, shared, shape)
    del normed
    attended = ops.dropout(r, attended, spec.hidden_dropout, "attention_output_dropout")
    if spec.blocks == "sequential":
        attended = ops.add(r, attended, hidden, "residual_attention")
    normed = layer_norm(r, attended if spec.blocks == "sequential" else hidden, "mlp_norm")
    fed = neox_mlp(r, normed, spec)
    del normed
    fed = ops.dropout(r, fed, spec.hidden_dropout, "mlp_dropout")
    if spec.blocks == "sequential":
        hidden = ops.add(r, fed, attended, "residual_mlp")
    else:
        hidden = ops.add(r, ops.add(r, fed, attended, "blocks_sum"), hidden, "residual")
    return hidden
