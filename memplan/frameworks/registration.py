"""The order in which models of transformers 5.x register parameters, where it is not that in which they run.

It decides how parameters lie in the buffers of a framework that flattens or shards them (``named_parameters()``
of ``models/*/modeling_*.py``: the order in which ``__init__`` makes submodules). Names are those of the recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ATTENTION = ("query", "key", "value", "attention_output", "query_norm", "key_norm")
_LLAMA = (*_ATTENTION, "gate", "up", "down", "attention_norm", "mlp_norm")

LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt2": (),
        "gpt": (),
        "bert": (),
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen3": _LLAMA,
        "qwen2": _LLAMA,
        "phi3": ("attention_output", "qkv", "gate_up", "down", "attention_norm", "mlp_norm"),
        "gemma2": (
            *("query", "key", "value", "attention_output", "gate", "up", "down"),
            *("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
        ),
        "opt": ("key", "value", "query", "attention_output", "attention_norm", "up", "down", "mlp_norm"),
        "gpt_neox": ("attention_norm", "mlp_norm", "qkv", "attention_output", "up", "down"),
        "gptj": ("attention_norm", "key", "value", "query", "attention_output", "up", "down"),
        "falcon": ("qkv", "attention_output", "up", "down", "attention_norm"),
        "torchtitan": (*_ATTENTION, "gate", "down", "up", "attention_norm", "mlp_norm"),
    }
)
"""Modules of a layer by family; empty where they register as they run."""

NORM_BEFORE_LAYERS = frozenset({"opt"})
"""Families whose final norm registers before their layers."""


def place(name: str, family: str) -> int:
    """Where the parameter called ``name`` is among those of its layer, or of all that no layer holds, where a tied
    head's weight is the embedding's. Those of one place are in the order in which they are named."""
    order = ("word", *LAYERS.get(family, ()))
    module = name.rpartition(".")[0]
    return order.index(module) if module in order else len(order)
