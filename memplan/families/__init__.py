"""The model families. To add one is to add a file with its value in ``FAMILIES``, and its line in ``ROOMS``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from .base import Family

ROOMS = {
    "gpt2": ".gpt2",
    "gpt": ".gpt2",
    "gpt_bigcode": ".gpt_bigcode",
    "bert": ".bert",
    "t5": ".t5",
    "bloom": ".bloom",
    "llama": ".llama",
    "mistral": ".llama",
    "ministral3": ".ministral3",
    "qwen3": ".llama",
    "qwen2": ".llama",
    "phi3": ".phi3",
    "gemma": ".gemma",
    "gemma2": ".gemma2",
    "gemma3_text": ".gemma3",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), ".gemma4"),
    "exaone4": ".exaone4",
    **dict.fromkeys(("olmo2", "olmo3"), ".olmo3"),
    **dict.fromkeys(("cohere", "cohere2"), ".cohere"),
    "smollm3": ".smollm3",
    "seed_oss": ".seed_oss",
    "starcoder2": ".starcoder2",
    "opt": ".opt",
    "gpt_neox": ".gpt_neox",
    "gptj": ".gptj",
    "falcon": ".falcon",
    "mixtral": ".mixtral",
    "qwen2_moe": ".qwen2_moe",
    "qwen3_moe": ".qwen3_moe",
    "qwen3_next": ".qwen3_next",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ".qwen3_5"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), ".deepseek"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ".deepseek_v32"),
    "gpt_oss": ".gpt_oss",
    "muse_glimmer": ".muse_glimmer",
    **dict.fromkeys(("glm", "glm4"), ".glm4"),
    "glm4_moe": ".glm4_moe",
    "dots1": ".dots1",
    "ernie4_5": ".ernie4_5",
    "glm4_moe_lite": ".glm4_moe_lite",
    "minimax_m2": ".minimax_m2",
    "llama4_text": ".llama4",
    "llama4": ".llama4",
    "olmoe": ".olmoe",
    "granite": ".granite",
    "granitemoe": ".granitemoe",
    "granitemoehybrid": ".granitemoehybrid",
    "nemotron-nas": ".nemotron_nas",
    **dict.fromkeys(("hybrid", "nemotron_h", "mamba2"), ".hybrid"),
}
"""The module of each family; loaded when a plan names it."""


@cache
def family(name: str) -> Family:
    """The family ``name``; of an architecture that is in no room nothing is known but its name."""
    if name not in ROOMS:
        return Family(name)
    found: Family = import_module(ROOMS[name], __package__).FAMILIES[name]
    return found


def families() -> Iterator[Family]:
    """Every family that has a room: for errors and documents, since it imports all of them."""
    return map(family, ROOMS)


__all__ = ["ROOMS", "Family", "families", "family"]
