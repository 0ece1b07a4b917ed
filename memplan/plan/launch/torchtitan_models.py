"""Sizes that torchtitan's code has by name, where they are those of a built-in model spec.

``torchtitan/models/llama3/__init__.py`` (``llama3_args``; ``llama3_configs`` and ``llama2_configs`` of
``torchtitan/models/llama/__init__.py`` before it). The flavours with which a model is tested have sizes of their own.
"""

from __future__ import annotations

from types import MappingProxyType

SIZED = "2025-07-22"
"""The day from which a model's vocabulary is in the code, and no longer its tokenizer's."""

_DEBUG_SIZES = MappingProxyType({"hidden": 256, "heads": 16, "kv_heads": 16, "head_dim": 16, "ffn": 768})
"""``debugmodel``: ffn = 256 ⌈int(2/3 · 4 · 256) / 256⌉."""

FLAVOURS = MappingProxyType(
    {
        ("llama3", "8B"): "llama-3-8b",
        ("llama3", "70B"): "llama-3-70b",
        ("llama3", "405B"): "llama-3-405b",
        ("llama2", "7B"): "llama-2-7b",
        ("llama2", "70B"): "llama-2-70b",
    }
)
"""Specs by ``model.name`` and ``model.flavor``."""

OTHER_ATTENTION = ("_flex", "_flex_attn", "_varlen", "_varlen_attn")
"""Ends of flavours whose attention is FlexAttention or a kernel for sequences of several lengths."""


def debug_model(day: str) -> dict[str, int]:
    """Sizes of llama3's ``debugmodel``, with the vocabulary where it is in the code: 8 layers until 15 April 2025,
    2000 tokens until 22 September 2025."""
    sizes = {"layers": 8 if day < "2025-04-15" else 6, **_DEBUG_SIZES}
    return {**sizes, "vocab": 2000 if day < "2025-09-22" else 2048} if day >= SIZED else sizes
