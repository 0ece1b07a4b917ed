"""Precision that differs from module to module (Megatron-Core's ``quantization/quant_config.py``): patterns of names,
of which the first that a module's name matches says whether its products are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from .spec import MOST_LAYERS

WIDE, LOW = "16bit", "low"
"""In 16 bits, or as the run has it."""

Text = Annotated[str, Field(pattern=rf"^[^,=\s]{{1,200}}=(?:{WIDE}|{LOW})$")]

MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mixer.in_proj",
    "mixer.out_proj",
)
"""Linear layers of dense layers and hybrids."""


@lru_cache(maxsize=4096)
def wide_modules(patterns: tuple[str, ...], layer: int) -> frozenset[str]:
    """Those in 16 bits of the ``layer``-th of a stage's layers, from 0 in each chunk: names are those of the modules of
    one stage (``GPTModel.__init__``, ``named_modules``)."""
    found = set[str]()
    for module in MODULES:
        name = f"decoder.layers.{layer}.{module}"
        first = next((one for one in patterns if fnmatch(name, one.rpartition("=")[0])), "")
        if first.endswith(f"={WIDE}"):
            found.add(module)
    return frozenset(found)


def names_layers(patterns: Sequence[str]) -> bool:
    """Whether layers of a stage differ."""
    return len({wide_modules(tuple(patterns), layer) for layer in range(MOST_LAYERS)}) > 1
