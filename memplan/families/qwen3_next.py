"""Qwen3-Next (``models/qwen3_next/configuration_qwen3_next.py``): gated delta nets, every fourth layer gated attention,
and experts. Megatron-Core has its layers (``--experimental-attention-variant gated_delta_net``); of transformers' no
recipe covers them."""

from __future__ import annotations

from collections.abc import Mapping

from ..layers.coverage import CORE_GPT
from ..plan.errors import Scalar
from .base import Config, Family, key
from .llama import CONSTANTS, KEYS, SILU

DELTA = {
    **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
    "attention_output_bias": KEYS["attention_bias"],
    "head_dim": key("head_dim", default=256),
    "positions_max": key("max_position_embeddings", default=32_768),
    "rotary_fraction": key("partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=0.25),
    "linear_interval": key("full_attention_interval", default=4),
    "linear_key_heads": key("linear_num_key_heads", default=16),
    "linear_value_heads": key("linear_num_value_heads", default=32),
    "linear_key_head_dim": key("linear_key_head_dim", default=128),
    "linear_value_head_dim": key("linear_value_head_dim", default=128),
    "linear_conv_kernel": key("linear_conv_kernel_dim", default=4),
}
GATED: Mapping[str, Scalar] = {**CONSTANTS, "mlp_bias": False, "qk_norm": True, "attention_gate": True}

QWEN3_NEXT = Family(
    "qwen3_next",
    megatron_core=CORE_GPT,
    shards=False,
    config=Config(
        keys={
            **DELTA,
            "kv_heads": key("num_key_value_heads", default=2),
            "experts": key("num_experts", default=512),
            "expert_top_k": key("num_experts_per_tok", default=10),
            "expert_ffn": key("moe_intermediate_size", default=512),
            "shared_expert_ffn": key("shared_expert_intermediate_size", default=512),
            "router_normalises": key("norm_topk_prob", default=True),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
        },
        constants={**GATED, "shared_expert_gate": True},
        activation=SILU,
        activations=("silu", "swish"),
    ),
)

FAMILIES = {"qwen3_next": QWEN3_NEXT}
