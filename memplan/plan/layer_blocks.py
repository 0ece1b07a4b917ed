"""Layers that differ from one another in attention and MLP, as a search of architectures leaves them (Puzzle,
arXiv 2411.19146; Megatron-Core's ``transformer/heterogeneous/heterogeneous_config.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import Field

NONE, LINEAR = "none", "linear"
OTHERS = (NONE, LINEAR)
"""What stands in place of attention or an MLP: nothing, or one linear layer behind a norm."""

_PART = r"(?:[1-9]\d{0,8}|none|linear)"

BlockText = Annotated[str, Field(pattern=rf"^{_PART}:{_PART}$")]


class LayerBlock(NamedTuple):
    """One layer."""

    kv_heads: int
    """Of its attention; 0 where there is none."""
    ffn: int
    """Width of its MLP; 0 where there is none."""
    attention: str = ""
    """What stands in place of attention (``OTHERS``), if anything does,"""
    mlp: str = ""
    """and in place of the MLP."""

    @property
    def replaced(self) -> tuple[str, str]:
        return self.attention, self.mlp


@lru_cache(maxsize=4096)
def block_of(text: str) -> LayerBlock:
    """``KV_HEADS:FFN``, either of which may be ``none`` or ``linear``."""
    attention, _, mlp = text.partition(":")
    kv_heads, ffn = (0 if part in OTHERS else int(part) for part in (attention, mlp))
    return LayerBlock(kv_heads, ffn, *(part if part in OTHERS else "" for part in (attention, mlp)))


def kinds_of(blocks: Sequence[str]) -> tuple[str, ...]:
    """Blocks that differ, each once, in the order of layers."""
    return tuple(dict.fromkeys(blocks))
