"""Granite (``models/granite/modeling_granite.py``): Llama with factors of the embedding, of each block's output and of
logits. Its attention's own factor takes the place of ``1 / sqrt(d)``."""

from __future__ import annotations

from functools import partial

from ..layers.coverage import LLAMA, reads
from ..values import replace
from .base import Config
from .llama import CONSTANTS, KEYS, LLAMA_FAMILY, SILU, llama_embedding

SCALES = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), True)
NO_MEGATRON_CORE = "Megatron-Core multiplies no block's output by a number (residual_scale)"

GRANITE = replace(
    LLAMA_FAMILY,
    name="granite",
    classifies=False,
    config=Config(
        keys={**KEYS, "attention_output_bias": KEYS["attention_bias"]},
        constants={**CONSTANTS, **SCALES},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={**reads(LLAMA, *SCALES), **dict.fromkeys(SCALES, (True,))},
    logits_to_keep=(4, 48),
    embedding=partial(llama_embedding, scales_first=True),
    megatron_core=None,
    kernels=("unsloth",),
    no_megatron_core=NO_MEGATRON_CORE,
)

FAMILIES = {"granite": GRANITE}
