"""OLMoE (``models/olmoe/modeling_olmoe.py``): Llama's layer with one norm over all heads of queries and one over all
of keys, and experts in place of its MLP."""

from __future__ import annotations

from .base import Config, Family, key
from .llama import CONSTANTS, KEYS, SILU

OLMOE = Family(
    "olmoe",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "positions_max": key("max_position_embeddings", default=4096),
            "experts": key("num_experts", default=64),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "expert_ffn": key("intermediate_size"),
            "router_normalises": key("norm_topk_prob", default=False),
            "router_aux_loss": key("router_aux_loss_coef", default=0.01),
        },
        constants={**CONSTANTS, "mlp_bias": False, "qk_norm": True, "qk_norm_over": "heads"},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"clip_qkv": None},
    ),
)

FAMILIES = {"olmoe": OLMOE}
