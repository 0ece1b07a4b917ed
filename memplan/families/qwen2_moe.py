"""Qwen 2 with experts (``models/qwen2_moe/modeling_qwen2_moe.py``): Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B. Qwen 2's
attention, and Qwen3-Next's block of experts, beside which one that takes every token runs by a gate of its own."""

from __future__ import annotations

from ..layers.autograd import Recorder
from ..layers.coverage import MIXTURE, Allowed, reads
from ..layers.ends import Embedded, causal_mask, positions, rotary_tables, word_embeddings
from ..layers.huggingface import LayerShape, Shared
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .llama import ATTENTION, CONSTANTS, KEYS_BUT_BIASES, LLAMA_FAMILY, SILU
from .mixtral import MIXTURE_SUBMODULES
from .qwen3_next import OPENED, mixture


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Qwen2MoeModel.forward`` up to the first layer: beside the mask of all layers one of a window of no tokens
    (``create_sliding_window_causal_mask``), which sdpa's functions make, too, and no layer takes; it lives until the
    model returns (``causal_mask_mapping``)."""
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    sdpa = "" if shape.package else shape.kernel
    windowed = causal_mask(
        r, replace(shape, spec=shape.spec.model_copy(update={"sliding_window": 1}), masked_kernel=sdpa)
    )
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids), [windowed] if windowed else [])


COVERED: Allowed = {
    **reads(MIXTURE, "shared_expert_ffn"),
    "attention_output_bias": (False,),
    "qk_norm": (False,),
    "shared_expert_gate": (True,),
    "sliding_window": (None,),
}

QWEN2_MOE = replace(
    LLAMA_FAMILY,
    name="qwen2_moe",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "attention_bias": key("qkv_bias", default=True),
            "kv_heads": key("num_key_value_heads", default=16),
            "positions_max": key("max_position_embeddings", default=32_768),
            "experts": key("num_experts", default=60),
            "expert_top_k": key("num_experts_per_tok", default=4),
            "expert_ffn": key("moe_intermediate_size", default=1408),
            "shared_expert_ffn": key("shared_expert_intermediate_size", default=5632),
            "router_normalises": key("norm_topk_prob", default=False),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={**CONSTANTS, "attention_output_bias": False, "mlp_bias": False, "shared_expert_gate": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"use_sliding_window": False},
    ),
    covers=COVERED,
    kernels=(),
    embedding=embedding,
    mixture=mixture,
    linear_layers={**LLAMA_FAMILY.linear_layers, **OPENED},
    lora_targets=None,
    registered=(*ATTENTION, "router", "experts", *OPENED, "gate", "up", "down", "attention_norm", "mlp_norm"),
    since=LIBRARIES["transformers"].newest,
    submodules=MIXTURE_SUBMODULES,
    no_zero3="DeepSpeed takes its block of experts for one module (zero/leaf_module_config.py), whose linear layers' "
    "weights, of the expert that takes every token, are gathered and reduced with all others",
)

FAMILIES = {"qwen2_moe": QWEN2_MOE}
