"""Hybrids of Mamba-2, attention, MLP and experts, one block a layer, as Megatron-Core has them; of transformers, whose
layers no recipe covers, the configurations of Nemotron-H (``models/nemotron_h``) and Mamba-2 (``models/mamba2``)."""

from __future__ import annotations

from collections.abc import Mapping

from ..layers.coverage import CORE_HYBRID
from ..plan.errors import Scalar
from ..values import replace
from .base import NO_BIASES, Config, Family, key

HYBRID = Family("hybrid", megatron_core=CORE_HYBRID, shards=False)

CONSTANTS: Mapping[str, Scalar] = {
    **NO_BIASES, "norm": "rmsnorm", "positions": "none", "embedding_dropout": 0.0, "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
MIXER = {
    "hidden": key("hidden_size"),
    "vocab": key("vocab_size"),
    "tied_embeddings": key("tie_word_embeddings", default=False),
    "mamba_groups": key("n_groups", "mamba_n_groups"),
}
SAME: Mapping[str, Scalar] = {"use_bias": False, "use_conv_bias": True, "conv_kernel": 4}
"""What the recipe of a Mamba-2 layer is written for."""

NEMOTRON_H = replace(
    HYBRID,
    name="nemotron_h",
    config=Config(
        keys={
            **MIXER,
            "layer_pattern": key("hybrid_override_pattern", "layers_block_type", "layer_types"),
            "layers": key("num_hidden_layers", default=None),
            "heads": key("num_attention_heads"),
            "kv_heads": key("num_key_value_heads"),
            "head_dim": key("head_dim", "attention_head_dim", default=128),
            "ffn": key("intermediate_size"),
            "positions_max": key("max_position_embeddings", default=4096),
            "mamba_heads": key("mamba_num_heads"),
            "mamba_head_dim": key("mamba_head_dim"),
            "mamba_state_dim": key("ssm_state_size"),
            "experts": key("n_routed_experts", default=8),
            "expert_ffn": key("moe_intermediate_size", default=7688),
            "expert_latent": key("moe_latent_size", default=None),
            "expert_top_k": key("num_experts_per_tok", default=2),
            "shared_expert_ffn": key("moe_shared_expert_intermediate_size", default=7688),
            "router_scaling": key("routed_scaling_factor", default=1.0),
            "router_groups": key("n_group", default=1),
            "router_group_top_k": key("topk_group", default=1),
            "mtp_layers": key("num_nextn_predict_layers", default=0),
            "mtp_pattern": key("mtp_hybrid_override_pattern", "mtp_layers_block_type", default=None),
        },
        constants={
            **CONSTANTS,
            "router_score": "sigmoid",
            "router_expert_bias": True,
            "router_dtype": "fp32",
            "router_balancing": "seq_aux_loss",
        },
        activation=key("mlp_hidden_act", default="relu2"),
        activations=("relu2", "gelu", "silu"),
        refused={
            **SAME,
            "attention_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
        },
    ),
)

MAMBA2 = replace(
    HYBRID,
    name="mamba2",
    config=Config(
        keys={
            **MIXER,
            "layers": key("num_hidden_layers"),
            "heads": key("num_heads"),
            "head_dim": key("head_dim"),
            "mamba_heads": key("num_heads"),
            "mamba_head_dim": key("head_dim"),
            "mamba_state_dim": key("state_size"),
        },
        constants={**CONSTANTS, "activation": "relu2", "positions_max": 1 << 20},
        refused=SAME,
    ),
)
"""Nothing but Mamba-2 layers: sizes of attention and MLP are there, and unused."""

FAMILIES = {"hybrid": HYBRID, "nemotron_h": NEMOTRON_H, "mamba2": MAMBA2}
