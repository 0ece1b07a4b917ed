"""What an error says of memory that ran out: how much was asked for, and how much was there.

PyTorch's message has what was allocated when the request failed (``CUDACachingAllocator.cpp``, ``malloc``); by the time
that the error is caught, autograd has given back what it held.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated")
_FULL = re.compile(r"out of memory|STATUS_ALLOC_FAILED|DefaultCPUAllocator", re.IGNORECASE)
"""The caching allocator's, CUDA's and NCCL's words, those of cuBLAS and cuDNN, and of PyTorch's CPU allocator."""


@dataclass(frozen=True, slots=True)
class Full:
    """Bytes, each ``None`` where the message does not have it."""

    failing: int | None
    """Of the request, to two decimals of its unit."""
    allocated: int | None
    reserved: int | None


def is_full(message: str) -> bool:
    return _FULL.search(message) is not None


def full(message: str) -> Full:
    allocated, unallocated = _bytes(_ALLOCATED, message), _bytes(_UNALLOCATED, message)
    reserved = None if allocated is None or unallocated is None else allocated + unallocated
    return Full(_bytes(_ASKED, message), allocated, reserved)


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None
