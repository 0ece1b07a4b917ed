"""Phi 3 (``models/phi3/modeling_phi3.py``): Llama's layer with fused projections and partial rotary positions.

Tables of stretched positions are as large; LongRoPE makes its second set of frequencies, half a head of fp32 numbers,
while nothing else is there (``modeling_rope_utils.py``, ``longrope_frequency_update``): it is left out.
"""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import CORE_GPT, LLAMA, reads
from ..layers.huggingface import (
    Heads,
    LayerShape,
    Shared,
    activation,
    attention,
    halves,
    linear,
    rms_norm,
    rotary_one,
)
from ..plan.spec import ModelSpec
from .base import NO_BIASES, Config, Family, Submodules, key
from .llama import CONSTANTS, KEYS_BUT_BIASES, LLAMA_FAMILY, SILU, SUBMODULES, head_by_head, llama_embedding


def heads_of(r: Recorder, x: Tensor, name: str, shape: LayerShape) -> Tensor:
    """``x.view(b, s, a, d).transpose(1, 2)``."""
    b, s, d = shape.b, shape.s, shape.spec.head_dim
    heads = x.shape[-1] // d
    if heads > 1 and (name != "value" or head_by_head(shape)[name]):
        x = ops.copied_gradient(r, x, name)
    return x.view(b, heads, s, d)


def phi3_rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared, n: int) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: the first ``n`` features of each head turned, and the rest, perhaps none, appended."""
    q_rot, q_pass = halves(r, q, n, "query")
    k_rot, k_pass = halves(r, k, n, "key")
    q_out = ops.cat_last(r, rotary_one(r, q_rot, shared, "query", "turned"), q_pass, "query_rotary")
    k_out = ops.cat_last(r, rotary_one(r, k_rot, shared, "key", "turned"), k_pass, "key_rotary")
    return q_out, k_out


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


PHI3 = Family(
    "phi3",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "positions_max": key("max_position_embeddings", default=4096),
            "sliding_window": key("sliding_window", default=None),
            "hidden_dropout": key("resid_pdrop", default=0.0),
            "rotary_fraction": key("rope_parameters.partial_rotary_factor", "partial_rotary_factor", default=1.0),
        },
        constants={**CONSTANTS, **NO_BIASES},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={**reads(LLAMA, "rotary_fraction", "hidden_dropout"), "qk_norm": (False,)},
    layer=phi3_layer,
    embedding=llama_embedding,
    padded=True,
    megatron_core=CORE_GPT,
    modules=LLAMA_FAMILY.modules,
    linear_layers={
        "qkv": "self_attn.qkv_proj",
        "attention_output": "self_attn.o_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    },
    registered=("attention_output", "qkv", "gate_up", "down", "attention_norm", "mlp_norm"),
    submodules={
        **SUBMODULES,
        "layer": Submodules(
            before_forward={"attention_norm": 1, "qkv": 1, "gate_up": 1},
            after_forward={"attention_output": 1, "gate_up": 1, "down": 1},
            before_backward={"down": 3, "attention_output": 2},
            after_backward={"down": 1},
            not_recomputed="attention_norm",
        ),
    },
)

FAMILIES = {"phi3": PHI3}
