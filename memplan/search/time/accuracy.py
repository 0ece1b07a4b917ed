"""How far predicted steps were from measured ones: medians of ``benchmarks/timing.py``, as in docs/timing.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PUBLISHED_ERRORS: Mapping[str, float] = MappingProxyType(
    {"a100-40gb": 0.028, "a100-80gb": 0.026, "h100-80gb": 0.079, "b200": 0.085}
)
"""Median of the absolute relative errors of dense steps in 16 bits, by GPU."""


def published_error(gpu: str) -> float:
    """Median relative error of a step's time on ``gpu``; the largest published one where no step on it was compared."""
    return PUBLISHED_ERRORS.get(gpu, max(PUBLISHED_ERRORS.values()))
