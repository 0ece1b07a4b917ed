"""Granite with experts (``models/granitemoe/modeling_granitemoe.py``): Llama's layer with factors of the embedding, of
each block's output and of logits, and experts in place of its MLP."""

from __future__ import annotations

from ..layers import experts, ops, selecting
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import MIXTURE, reads
from ..layers.huggingface import LayerShape
from ..plan.releases import SORTED_ONCE
from ..plan.spec import ModelSpec
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .granite import NO_MEGATRON_CORE, SCALES
from .llama import CONSTANTS, KEYS, SILU
from .mixtral import MIXTRAL, NO_LEAF


def router(r: Recorder, hidden: Tensor, spec: ModelSpec) -> experts.Routed:
    """``GraniteMoeTopKRouter.forward``: a softmax over the chosen logits, in fp32."""
    logits = ops.cast(r, experts.logits_of(r, hidden, spec), "fp32", "router_logits_fp32")
    chosen, indices = selecting.top_k(r, logits, spec.expert_top_k, "chosen")
    weights = ops.cast(r, ops.softmax(r, chosen, "chosen_probabilities"), hidden.dtype, "chosen_cast")
    return logits, weights, indices


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``GraniteMoeMoE.forward``."""
    return experts.mixture(r, x, shape, router)


GRANITE_MOE = replace(
    MIXTRAL,
    name="granitemoe",
    classifies=False,
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "experts": key("num_local_experts", default=8),
            "expert_top_k": key("num_experts_per_tok", default=2),
            "expert_ffn": key("intermediate_size"),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={**CONSTANTS, "mlp_bias": False, **SCALES},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={
        **reads(MIXTURE, *SCALES),
        **dict.fromkeys(SCALES, (True,)),
        "qk_norm": (False,),
        "sliding_window": (None,),
        "dense_layers": ((),),
    },
    mixture=mixture,
    megatron_core=None,
    all_linear_of_attention=True,
    kernels=(),
    registered=(*MIXTRAL.registered[:-4], "attention_norm", "mlp_norm", "router", "experts"),
    since=SORTED_ONCE,
    submodules=NO_LEAF,
    not_followed=None,
    no_megatron_core=NO_MEGATRON_CORE,
)

FAMILIES = {"granitemoe": GRANITE_MOE}
