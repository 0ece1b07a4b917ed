"""DeepSeek V2 and V3 (``models/deepseek_v2/modeling_deepseek_v2.py``, ``deepseek_v3``), and Kimi K2, which is a V3:
latent attention, experts, and shared experts beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..layers.coverage import CORE_GPT
from ..plan.node import Scalar
from .base import NO_BIASES, Config, Family, key
from .llama import CONSTANTS, KEYS, SILU

DEEPSEEK = {
    **{name: KEYS[name] for name in ("layers", "hidden", "heads", "ffn", "vocab", "tied_embeddings")},
    "attention_dropout": KEYS["attention_dropout"],
    "experts": key("n_routed_experts"),
    "expert_ffn": key("moe_intermediate_size"),
    "router_scaling": key("routed_scaling_factor"),
    "latent_kv_rank": key("kv_lora_rank"),
    "nope_head_dim": key("qk_nope_head_dim"),
    "rope_head_dim": key("qk_rope_head_dim"),
    "value_head_dim": key("v_head_dim"),
    "router_aux_loss": key("aux_loss_alpha", default=None),
}
LATENT: Mapping[str, Scalar] = {**CONSTANTS, **NO_BIASES, "qk_norm": True, "router_balancing": "seq_aux_loss"}

V2 = Family(
    "deepseek_v2",
    config=Config(
        keys={
            **DEEPSEEK,
            "positions_max": key("max_position_embeddings", default=2048),
            "expert_top_k": key("num_experts_per_tok"),
            "router_groups": key("n_group", default=None),
            "router_group_top_k": key("topk_group", default=None),
            "first_dense": key("first_k_dense_replace", default=0),
            "shared_experts": key("n_shared_experts", default=2),
            "latent_q_rank": key("q_lora_rank", default=1536),
        },
        constants={**LATENT, "router_score_first": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"attention_bias": False, "mlp_bias": False},
    ),
    megatron_core=CORE_GPT,
)

V3 = replace(
    V2,
    name="deepseek_v3",
    config=Config(
        keys={
            **DEEPSEEK,
            "positions_max": key("max_position_embeddings", default=4096),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "router_groups": key("n_group", default=8),
            "router_group_top_k": key("topk_group", default=4),
            "first_dense": key("first_k_dense_replace", default=3),
            "shared_experts": key("n_shared_experts", default=1),
            "latent_q_rank": key("q_lora_rank", default=1536),
        },
        constants={**LATENT, "router_score": "sigmoid", "router_expert_bias": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"attention_bias": False},
        published_in=("fp8",),
    ),
)

KIMI_K2 = replace(V3, name="kimi_k2")

FAMILIES = {"deepseek_v2": V2, "deepseek_v3": V3, "kimi_k2": KIMI_K2}
