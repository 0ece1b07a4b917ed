"""Granite with experts (``models/granitemoe/modeling_granitemoe.py``): Llama's layer with factors of the embedding, of
each block's output and of logits, and experts in place of its MLP."""

from __future__ import annotations

from .base import Config, Family, key
from .llama import CONSTANTS, KEYS, SILU

GRANITE_MOE = Family(
    "granitemoe",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "experts": key("num_local_experts", default=8),
            "expert_top_k": key("num_experts_per_tok", default=2),
            "expert_ffn": key("intermediate_size"),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
        },
        constants={
            **CONSTANTS,
            "mlp_bias": False,
            "embedding_scale": True,
            "residual_scale": True,
            "logit_scale": True,
        },
        activation=SILU,
        activations=("silu", "swish"),
    ),
)

FAMILIES = {"granitemoe": GRANITE_MOE}
