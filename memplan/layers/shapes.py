"""Sizes of tensors."""

from __future__ import annotations

from math import prod

ITEMSIZE = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "fp8": 1}
"""Bytes of one element."""

Shape = tuple[int, ...]


def size_of(shape: Shape, dtype: str) -> int:
    """Bytes that a tensor requests, before rounding."""
    return prod(shape) * ITEMSIZE[dtype]
