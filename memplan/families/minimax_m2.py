"""MiniMax M2 (``models/minimax_m2/modeling_minimax_m2.py``): Llama's layer with one norm over all heads of queries and
one over all of keys, a part of each head turned, and experts chosen by sigmoids and a bias. Layers that predict further
tokens, which checkpoints have behind the last, are in no class of transformers."""

from __future__ import annotations

from ..layers import experts, ops, selecting
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import MIXTURE, reads
from ..layers.huggingface import LayerShape
from ..plan.spec import ModelSpec
from ..values import replace
from .base import NO_BIASES, ROUTER_LOSS, Config, key
from .glm4_moe import rotary
from .llama import CONSTANTS, KEYS_BUT_BIASES, SILU
from .olmoe import OLMOE


def router(r: Recorder, hidden: Tensor, spec: ModelSpec) -> experts.Routed:
    """``MiniMaxM2TopKRouter.forward``: chosen by scores and a bias without gradient, weighed by the scores alone."""
    logits = experts.logits_of(r, ops.alias(r, hidden), spec)
    wide = ops.cast(r, logits, "fp32", "router_logits_fp32")
    scores = ops.elementwise(r, "router_scores", (wide,), saves_output=True)
    del wide
    biased = ops.add_constant(r, scores, "scores_for_choice")
    _values, indices = selecting.top_k(r, biased, spec.expert_top_k, "chosen")
    weights = experts.normed(r, selecting.gathered(r, scores, indices, "chosen"))
    return logits, weights, indices


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``MiniMaxM2SparseMoeBlock.forward``."""
    return experts.mixture(r, x, shape, router)


MINIMAX_M2 = replace(
    OLMOE,
    name="minimax_m2",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=128),
            "positions_max": key("max_position_embeddings", default=196_608),
            "rotary_fraction": key(
                "rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_dim", default=1.0
            ),
            "experts": key("num_local_experts", "num_experts", default=256),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "expert_ffn": key("intermediate_size"),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={
            **CONSTANTS,
            **NO_BIASES,
            "qk_norm": True,
            "qk_norm_over": "heads",
            "router_score": "sigmoid",
            "router_expert_bias": True,
        },
        activation=SILU,
        activations=("silu", "swish"),
        refused={"router_jitter_noise": 0.0},
        published_in=("fp8",),
    ),
    covers={
        **reads(MIXTURE, "qk_norm_over", "rotary_fraction"),
        "qk_norm": (True,),
        "qk_norm_over": ("heads",),
        "attention_bias": (False,),
        "attention_output_bias": (False,),
        "router_score": ("sigmoid",),
        "router_expert_bias": (True,),
        "sliding_window": (None,),
        "dense_layers": ((),),
    },
    rotary=rotary,
    mixture=mixture,
    lora_targets=None,
)

FAMILIES = {"minimax_m2": MINIMAX_M2}
