"""Mixtral (``models/mixtral/modeling_mixtral.py``): Mistral's layer with experts in place of its MLP."""

from __future__ import annotations

from ..layers.coverage import CORE_GPT
from .base import NO_BIASES, Config, Family, key
from .llama import CONSTANTS, KEYS_BUT_BIASES, SILU

MIXTRAL = Family(
    "mixtral",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=8),
            "positions_max": key("max_position_embeddings", default=131_072),
            "sliding_window": key("sliding_window", default=None),
            "experts": key("num_local_experts", default=8),
            "expert_top_k": key("num_experts_per_tok", default=2),
            "expert_ffn": key("intermediate_size"),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
        },
        constants={**CONSTANTS, **NO_BIASES},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    megatron_core=CORE_GPT,
)

FAMILIES = {"mixtral": MIXTRAL}
