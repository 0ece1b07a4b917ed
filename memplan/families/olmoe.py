"""OLMoE (``models/olmoe/modeling_olmoe.py``): Llama's layer with one norm over all heads of queries and one over all
of keys, and experts in place of its MLP."""

from __future__ import annotations

from ..layers.coverage import MIXTURE, reads
from ..plan.releases import SORTED_ONCE
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .llama import CONSTANTS, KEYS, NORMED_FIRST, SILU
from .mixtral import MIXTRAL, NO_LEAF
from .qwen3_moe import QWEN3_MOE

OLMOE = replace(
    QWEN3_MOE,
    name="olmoe",
    classifies=False,
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "positions_max": key("max_position_embeddings", default=4096),
            "experts": key("num_experts", default=64),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "expert_ffn": key("intermediate_size"),
            "router_normalises": key("norm_topk_prob", default=False),
            "router_aux_loss": key("router_aux_loss_coef", default=0.01),
            **ROUTER_LOSS,
        },
        constants={**CONSTANTS, "mlp_bias": False, "qk_norm": True, "qk_norm_over": "heads"},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"clip_qkv": None},
    ),
    covers={**reads(MIXTURE, "qk_norm_over"), "qk_norm": (True,), "qk_norm_over": ("heads",), "dense_layers": ((),)},
    kernels=(),
    projecting=NORMED_FIRST,
    linear_layers=MIXTRAL.linear_layers,
    registered=MIXTRAL.registered,
    since=SORTED_ONCE,
    submodules=NO_LEAF,
    not_followed=None,
)

FAMILIES = {"olmoe": OLMOE}
