"""GLM 4.7 Flash (``models/glm4_moe_lite/modular_glm4_moe_lite.py``): DeepSeek V3's latent attention and experts. A
layer of multi-token prediction, which checkpoints have behind the last, is not among ``layers``."""

from __future__ import annotations

from ..values import replace
from .base import Config, key
from .deepseek import DEEPSEEK, LATENT, V3
from .llama import SILU

GLM4_MOE_LITE = replace(
    V3,
    name="glm4_moe_lite",
    classifies=False,
    config=Config(
        keys={
            **{name: key for name, key in DEEPSEEK.items() if name != "router_aux_loss"},
            "positions_max": key("max_position_embeddings", default=202_752),
            "expert_top_k": key("num_experts_per_tok", default=4),
            "router_groups": key("n_group", default=1),
            "router_group_top_k": key("topk_group", default=1),
            "mlp_kinds": key("mlp_layer_types", default=None),
            "shared_experts": key("n_shared_experts", default=1),
            "latent_q_rank": key("q_lora_rank", default=768),
        },
        constants={**LATENT, "router_score": "sigmoid", "router_expert_bias": True, "router_aux_loss": 0.0001},
        activation=SILU,
        activations=("silu", "swish"),
        refused={
            **{"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True, "first_k_dense_replace": 1},
            **dict.fromkeys(("partial_rotary_factor", "rope_parameters.partial_rotary_factor"), 1.0),
        },
    ),
)
"""The balancing loss is weighed as GLM 4.5's, whose report (arXiv 2508.06471, section 2.4) is the last to say it."""

FAMILIES = {"glm4_moe_lite": GLM4_MOE_LITE}
