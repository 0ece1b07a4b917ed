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

_LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "qkv_down_proj")
MODULES = (
    *(f"self_attention.linear_{name}" for name in ("qkv", "proj", *_LATENT)),
    *(f"{name}.linear_fc{at}" for name in ("mlp", "mlp.shared_experts") for at in (1, 2)),
    *("mlp.fc1_latent_proj", "mlp.fc2_latent_proj", "mixer.in_proj", "mixer.out_proj"),
)
"""Linear layers that may be in 16 bits alone."""
EXPERTS = tuple(f"mlp.experts.{name}linear_fc{at}" for name in ("", "local_experts.0.") for at in (1, 2))
"""Those of experts, of a grouped product or one by one."""


@lru_cache(maxsize=4096)
def wide_modules(patterns: tuple[str, ...], layer: int) -> frozenset[str]:
    """Those in 16 bits of the ``layer``-th of a stage's layers, from 0 in each chunk: names are those of the modules of
    one stage (``GPTModel.__init__``, ``named_modules``)."""
    found = set[str]()
    for module in (*MODULES, *EXPERTS):
        name = f"decoder.layers.{layer}.{module}"
        first = next((one for one in patterns if fnmatch(name, one.rpartition("=")[0])), "")
        if first.endswith(f"={WIDE}"):
            found.add(module)
    return frozenset(found)


FURTHER = f"mtp.*={WIDE}"
"""Multi-token prediction in 16 bits, whatever its modules are called."""


def widens_further(patterns: Sequence[str]) -> bool:
    """Whether every linear layer of multi-token prediction is in 16 bits."""
    return FURTHER in patterns and all(one.endswith(f"={WIDE}") for one in patterns[: patterns.index(FURTHER)])


def names_layers(patterns: Sequence[str]) -> bool:
    """Whether layers of a stage differ."""
    return bool(patterns) and len({wide_modules(tuple(patterns), layer) for layer in range(MOST_LAYERS)}) > 1
