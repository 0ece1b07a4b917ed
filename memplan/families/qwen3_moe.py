"""Qwen 3 with experts (``models/qwen3_moe/modeling_qwen3_moe.py``): 30B-A3B and 235B-A22B."""

from __future__ import annotations

from ..layers import experts
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import MIXTURE
from ..layers.huggingface import LayerShape
from ..plan.releases import SORTED_ONCE, STACKED_EXPERTS
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .llama import ATTENTION, CONSTANTS, KEYS, LLAMA_FAMILY, SILU
from .mixtral import MIXTURE_SUBMODULES


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``Qwen3MoeSparseMoeBlock.forward``."""
    if shape.transformers < STACKED_EXPERTS:
        return experts.looped(r, x, shape, ("gate_proj", "up_proj", "down_proj"))
    return experts.mixture(r, x, shape, experts.cast_weights)


QWEN3_MOE = replace(
    LLAMA_FAMILY,
    name="qwen3_moe",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=4),
            "positions_max": key("max_position_embeddings", default=32_768),
            "experts": key("num_experts", "num_local_experts", default=128),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "expert_ffn": key("moe_intermediate_size", default=768),
            "router_normalises": key("norm_topk_prob", default=False),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={**CONSTANTS, "mlp_bias": False, "qk_norm": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"use_sliding_window": False},
    ),
    covers=MIXTURE,
    kernels=("liger",),
    mixture=mixture,
    registered=(*ATTENTION, "experts", "router", "gate", "up", "down", "attention_norm", "mlp_norm"),
    since=(4, 51),
    not_followed=(STACKED_EXPERTS, SORTED_ONCE),
    submodules=MIXTURE_SUBMODULES,
)

FAMILIES = {"qwen3_moe": QWEN3_MOE}
