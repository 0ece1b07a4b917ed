"""Which GPU of memplan's table a device is, by the name that its driver gives it and its memory."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..gpus import GPUS

NEAR = 0.06
"""Part by which a device's memory may differ from the table's: of names like H100 there are several sizes."""
_MEMORY = re.compile(r"-\d+gb$")


def gpu_of(name: str, total: int) -> str | None:
    """The table's name of ``NVIDIA A100-SXM4-80GB`` with ``total`` bytes; ``None`` where no row is like it."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [gpu for gpu, row in GPUS.items() if row.title == name or _is_like(gpu, words)]
    near = [gpu for gpu in fitting if _distance(gpu, total) <= NEAR]
    return min(near, key=lambda gpu: (-len(_model(gpu)), _distance(gpu, total)), default=None)


def _model(gpu: str) -> list[str]:
    return _MEMORY.sub("", gpu).split("-")


def _is_like(gpu: str, words: Iterable[str]) -> bool:
    return set(_model(gpu)) <= set(words)


def _distance(gpu: str, total: int) -> float:
    return abs(GPUS[gpu].capacity_bytes / total - 1)
