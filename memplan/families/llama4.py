"""Llama 4 (``models/llama4/modeling_llama4.py``), the part that reads text: Scout and Maverick. Three layers of four
have rotary positions and see their chunk alone; experts, or every second layer's, beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from ..layers.coverage import CORE_GPT
from .base import Config, Family, key
from .llama import CONSTANTS, KEYS, SILU

LLAMA4_TEXT = Family(
    "llama4_text",
    classifies=False,
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=128),
            "ffn": key("intermediate_size_mlp", default=16_384),
            "positions_max": key("max_position_embeddings", default=131_072),
            "attention_chunk": key("attention_chunk_size", default=8192),
            "nope_interval": key("no_rope_layer_interval", default=4),
            "qk_norm": key("use_qk_norm", default=True),
            "experts": key("num_local_experts", default=16),
            "expert_top_k": key("num_experts_per_tok", default=1),
            "expert_ffn": key("intermediate_size", default=8192),
            "shared_expert_ffn": key("intermediate_size", default=8192),
            "expert_layers": key("moe_layers", default=None),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
        },
        constants={
            **CONSTANTS,
            "mlp_bias": False,
            "qk_norm_over": "head_without_weight",
            "router_score": "sigmoid",
            "router_weighs_inputs": True,
        },
        activation=SILU,
        activations=("silu", "swish"),
    ),
    megatron_core=CORE_GPT,
)

FAMILIES = {
    "llama4_text": LLAMA4_TEXT,
    "llama4": replace(
        LLAMA4_TEXT, name="llama4", megatron_core=None, config=Config(keys={}, constants={}, text_part="llama4_text")
    ),
}
