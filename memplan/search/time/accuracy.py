"""How far predicted times were off where somebody has published what was measured.

Median errors of the tables in ``docs/timing.md``, by the GPU that the steps ran on: what a difference between two
predicted times is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...plan.resolved import ResolvedPlan

MEDIAN_ERRORS: Mapping[str, float] = MappingProxyType(
    {"a100-80gb": 0.032, "a100-40gb": 0.032, "h100-80gb": 0.241, "h100-96gb": 0.209, "b200": 0.10}
)
"""As parts of the measured time; the worse where a GPU has two tables."""


def published_error(plan: ResolvedPlan) -> float | None:
    """Of a resolved plan's GPU; ``None`` where nobody has published steps on it."""
    return MEDIAN_ERRORS.get(plan.hardware.gpu or "")
