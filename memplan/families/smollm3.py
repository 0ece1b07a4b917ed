"""SmolLM 3 (``models/smollm3/modeling_smollm3.py``): Llama's layer, in every fourth layer without positions."""

from __future__ import annotations

from ..layers.coverage import LLAMA, reads
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import Config, key
from .llama import CONSTANTS, KEYS, LLAMA_FAMILY, SILU

SMOLLM3 = replace(
    LLAMA_FAMILY,
    name="smollm3",
    kernels=(),
    since=LIBRARIES["transformers"].newest,
    config=Config(
        keys={
            **KEYS,
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=4),
            "positions_max": key("max_position_embeddings", default=32_768),
            "nope_interval": key("no_rope_layer_interval", default=4),
            "tied_embeddings": key("tie_word_embeddings", default=True),
        },
        constants=CONSTANTS,
        activation=SILU,
        activations=("silu", "swish"),
        refused={"use_sliding_window": False},
    ),
    covers={**reads(LLAMA, "nope_interval"), "qk_norm": (False,), "sliding_window": (None,)},
    megatron_core=None,
    lora_targets=None,
)

FAMILIES = {"smollm3": SMOLLM3}
