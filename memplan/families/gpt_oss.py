"""gpt-oss (``models/gpt_oss/modeling_gpt_oss.py``): experts with biases and a clamped gate, windows in every second
layer, and attention sinks. Its weights are published in MXFP4; training takes them in 16 bits."""

from __future__ import annotations

from ..layers.coverage import CORE_GPT
from .base import Config, Family, key
from .llama import CONSTANTS, KEYS

GPT_OSS = Family(
    "gpt_oss",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_bias": key("attention_bias", default=True),
            "attention_output_bias": key("attention_bias", default=True),
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=64),
            "positions_max": key("max_position_embeddings", default=131_072),
            "sliding_window": key("sliding_window", default=128),
            "experts": key("num_local_experts", default=128),
            "expert_top_k": key("num_experts_per_tok", default=4),
            "expert_ffn": key("intermediate_size"),
            "activation_clamp": key("swiglu_limit", default=7.0),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
        },
        constants={
            **CONSTANTS,
            "activation": "quick_geglu",
            "mlp_bias": True,
            "alternating_windows": True,
            "attention_sinks": True,
        },
        refused={"hidden_act": "silu"},
        published_in=("mxfp4",),
    ),
    megatron_core=CORE_GPT,
)

FAMILIES = {"gpt_oss": GPT_OSS}
