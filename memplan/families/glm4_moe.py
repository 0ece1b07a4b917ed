"""GLM 4.5 (``models/glm4_moe/modeling_glm4_moe.py``): 355B-A32B and Air, with DeepSeek's router over grouped queries.
A layer of multi-token prediction, which checkpoints have behind the last, is not among ``layers``."""

from __future__ import annotations

from ..layers.coverage import CORE_GPT
from .base import Config, Family, key
from .llama import CONSTANTS, KEYS_BUT_BIASES, SILU

GLM4_MOE = Family(
    "glm4_moe",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "attention_bias": key("attention_bias", default=False),
            "kv_heads": key("num_key_value_heads", default=8),
            "positions_max": key("max_position_embeddings", default=131_072),
            "rotary_fraction": key("partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=0.5),
            "qk_norm": key("use_qk_norm", default=False),
            "experts": key("n_routed_experts", default=128),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "expert_ffn": key("moe_intermediate_size", default=1408),
            "shared_experts": key("n_shared_experts", default=1),
            "first_dense": key("first_k_dense_replace", default=1),
            "router_groups": key("n_group", default=1),
            "router_group_top_k": key("topk_group", default=1),
            "router_scaling": key("routed_scaling_factor", default=1.0),
        },
        constants={
            **CONSTANTS,
            "attention_output_bias": False,
            "mlp_bias": False,
            "router_score": "sigmoid",
            "router_expert_bias": True,
            "router_balancing": "seq_aux_loss",
            "router_aux_loss": 0.0001,
        },
        activation=SILU,
        activations=("silu", "swish"),
        refused={"norm_topk_prob": True},
    ),
    megatron_core=CORE_GPT,
)
"""The balancing loss is weighed as in its report, arXiv 2508.06471, section 2.4."""

FAMILIES = {"glm4_moe": GLM4_MOE}
