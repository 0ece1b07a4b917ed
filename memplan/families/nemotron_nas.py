"""Llama-Nemotron, whose layers a search of architectures made different from one another (arXiv 2505.00949). Its code
is its repository's own (``modeling_decilm.py``); Megatron-Core has it as GPT with heterogeneous layers."""

from __future__ import annotations

from ..layers.coverage import CORE_GPT
from .base import Config, Family
from .llama import CONSTANTS, KEYS, SILU

NEMOTRON_NAS = Family(
    "nemotron-nas",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name not in ("kv_heads", "ffn")},
            "attention_output_bias": KEYS["attention_bias"],
        },
        constants=CONSTANTS,
        activation=SILU,
        activations=("silu",),
        layers_differ=True,
    ),
    no_transformers="transformers has no class of it, and its repository's own code is not run",
    megatron_core=CORE_GPT,
)

FAMILIES = {"nemotron-nas": NEMOTRON_NAS}
