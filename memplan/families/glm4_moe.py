"""GLM 4.5 (``models/glm4_moe/modeling_glm4_moe.py``): 355B-A32B and Air, with DeepSeek's router over grouped queries.
A layer of multi-token prediction, which checkpoints have behind the last, is not among ``layers``."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import SHARED, Allowed, reads
from ..layers.huggingface import Shared, halves, rotary_one
from ..values import replace
from .base import Config, key
from .deepseek import V3
from .llama import ATTENTION, CONSTANTS, KEYS_BUT_BIASES, LLAMA_FAMILY, NORMED_LAST, SILU
from .mixtral import SHARED_LAYERS, SHARED_REGISTERED


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: as many features of each head turned as the tables have; the rest is appended when both
    are."""
    cos, _ = shared.tables
    q_rot, q_pass = halves(r, q, cos.shape[-1], "query")
    k_rot, k_pass = halves(r, k, cos.shape[-1], "key")
    q_turned = rotary_one(r, q_rot, shared, "query", "turned")
    k_turned = rotary_one(r, k_rot, shared, "key", "turned")
    q_out = ops.cat_last(r, q_turned, q_pass, "query_rotary")
    del q_turned
    return q_out, ops.cat_last(r, k_turned, k_pass, "key_rotary")


CONFIG = Config(
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
)
COVERED: Allowed = {
    **reads(SHARED, "rotary_fraction"),
    "router_score": ("sigmoid",),
    "router_expert_bias": (True,),
    "attention_output_bias": (False,),
}

GLM4_MOE = replace(
    LLAMA_FAMILY,
    name="glm4_moe",
    classifies=False,
    config=CONFIG,
    covers=COVERED,
    rotary=rotary,
    projecting=NORMED_LAST,
    mixture=V3.mixture,
    kernels=(),
    linear_layers={**{n: p for n, p in LLAMA_FAMILY.linear_layers.items() if n in ATTENTION}, **SHARED_LAYERS},
    registered=(*ATTENTION, *SHARED_REGISTERED),
    since=V3.since,
    submodules=V3.submodules,
)
"""The balancing loss is weighed as in its report, arXiv 2508.06471, section 2.4."""

FAMILIES = {"glm4_moe": GLM4_MOE}
