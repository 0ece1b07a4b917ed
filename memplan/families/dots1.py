"""dots.llm1 (``models/dots1/modeling_dots1.py``): Qwen 3's attention, and DeepSeek V3's experts (``Dots1MoE``)."""

from __future__ import annotations

from ..plan.releases import LIBRARIES
from ..values import replace
from .base import key
from .glm4_moe import CONFIG, COVERED, GLM4_MOE
from .llama import KEYS

DOTS1 = replace(
    GLM4_MOE,
    name="dots1",
    config=replace(
        CONFIG,
        keys={
            **{name: given for name, given in CONFIG.keys.items() if name not in ("rotary_fraction", "qk_norm")},
            **{name: KEYS[name] for name in ("attention_bias", "positions_max")},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=32),
            "experts": key("n_routed_experts"),
            "expert_top_k": key("num_experts_per_tok"),
            "shared_experts": key("n_shared_experts"),
            "first_dense": key("first_k_dense_replace", default=0),
        },
        constants={
            **{name: value for name, value in CONFIG.constants.items() if name != "attention_output_bias"},
            "qk_norm": True,
        },
        refused={"max_window_layers": 62},
        wanted={"norm_topk_prob": (True,)},
    ),
    covers={
        **{name: values for name, values in COVERED.items() if name != "attention_output_bias"},
        "rotary_fraction": (1.0,),
        "qk_norm": (True,),
        "sliding_window": (None,),
    },
    rotary=None,
    projecting=None,
    lora_targets=None,
    since=LIBRARIES["transformers"].newest,
)
"""Layers from the ``max_window_layers``-th on have a window, of which the model that is published has none. Its report,
arXiv 2506.05767, says no weight of a balancing loss: it is GLM 4.5's."""

FAMILIES = {"dots1": DOTS1}
