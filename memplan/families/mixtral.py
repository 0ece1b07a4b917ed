"""Mixtral (``models/mixtral/modeling_mixtral.py``): Mistral's layer with experts in place of its MLP."""

from __future__ import annotations

from ..layers import experts
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import MIXTURE
from ..layers.huggingface import LayerShape
from ..plan.releases import SORTED_ONCE, STACKED_EXPERTS
from ..values import replace
from .base import NO_BIASES, ROUTER_LOSS, Config, key
from .llama import ATTENTION, CONSTANTS, KEYS_BUT_BIASES, LLAMA_FAMILY, SILU, SUBMODULES

MIXTURE_SUBMODULES = {
    **SUBMODULES,
    "layer": replace(
        SUBMODULES["layer"],
        before_backward={**SUBMODULES["layer"].before_backward, experts.MODULE: 1},
        leaf=experts.MODULE,
    ),
}
"""Of layers with experts, and with an MLP, whose submodules run where there is one."""


NO_LEAF = {
    **SUBMODULES,
    "layer": replace(
        SUBMODULES["layer"],
        before_forward={**SUBMODULES["layer"].before_forward, experts.ROUTER: 1},
        before_backward={**SUBMODULES["layer"].before_backward, experts.EXPERTS: 2},
        parts=(experts.ROUTER, experts.EXPERTS, experts.ACTIVATION),
    ),
}
"""Where DeepSpeed takes the block of experts for no leaf module (``zero/leaf_module_config.py``)."""

SHARED_LAYERS = {
    **{name: LLAMA_FAMILY.linear_layers[name] for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
"""Of dense layers, and of experts that take every token."""
NO_LEAF_SHARED = {
    **NO_LEAF,
    "layer": replace(
        NO_LEAF["layer"],
        before_forward={**NO_LEAF["layer"].before_forward, "query_down": 1, "shared_gate": 1},
        after_forward={"gate": 1, "shared_gate": 1},
        before_backward={**SUBMODULES["layer"].before_backward, "shared_down": 3},
        after_backward={"up": 1, "shared_up": 1},
    ),
}
"""With them, which run last, and queries that may have a rank of their own."""
SHARED_REGISTERED = ("experts", "router", *SHARED_LAYERS, "attention_norm", "mlp_norm")


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``MixtralSparseMoeBlock.forward``."""
    if shape.transformers < STACKED_EXPERTS:
        return experts.looped(r, x, shape, ("w1", "w3", "w2"))
    return experts.mixture(r, x, shape, experts.fp32_weights)


MIXTRAL = replace(
    LLAMA_FAMILY,
    name="mixtral",
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=8),
            "positions_max": key("max_position_embeddings", default=131_072),
            "sliding_window": key("sliding_window", default=None),
            "experts": key("num_local_experts", default=8),
            "expert_top_k": key("num_experts_per_tok", default=2),
            "expert_ffn": key("intermediate_size"),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={**CONSTANTS, **NO_BIASES},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"router_jitter_noise": 0.0},
    ),
    covers=MIXTURE,
    mixture=mixture,
    linear_layers={name: LLAMA_FAMILY.linear_layers[name] for name in ATTENTION[:4]},
    registered=(*ATTENTION, "router", "experts", "attention_norm", "mlp_norm"),
    since=(4, 48),
    not_followed=(STACKED_EXPERTS, SORTED_ONCE),
    submodules=MIXTURE_SUBMODULES,
)

FAMILIES = {"mixtral": MIXTRAL}
