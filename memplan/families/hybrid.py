"""Hybrids of Mamba-2, attention, MLP and experts, one block a layer, as Megatron-Core has them."""

from __future__ import annotations

from ..layers.coverage import CORE_HYBRID
from .base import Family

HYBRID = Family("hybrid", megatron_core=CORE_HYBRID, shards=False)

FAMILIES = {"hybrid": HYBRID}
