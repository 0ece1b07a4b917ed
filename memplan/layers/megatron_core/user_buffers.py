"""Buffers through which tensor-parallel ranks exchange beside products (``--tp-comm-overlap``): Transformer Engine's
user buffers (``pytorch/module/base.py``, ``initialize_ub``; ``comm_gemm_overlap.cpp``), which lie outside of PyTorch.

One of s b h elements for every exchange of a layer, by its default way: those that are gathered are in 8 bits with fp8.
Layers in 16 bits beside others have a set of their own. What PyTorch allocates is estimated as without them, though
gathered inputs then lie in these buffers.
"""

from __future__ import annotations

from ..work import ITEMSIZE
from .shape import CoreShape

SOURCE = "Transformer Engine, initialize_ub: one buffer for every exchange of a layer, with its default ways"
GATHERED = (
    "qkv_fprop", "qkv_dgrad", "proj_dgrad", "proj_wgrad", "fc1_fprop", "fc1_dgrad", "fc2_dgrad", "fc2_wgrad",
)  # fmt: skip
REDUCED = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")


def outside(shape: CoreShape) -> int:
    """Bytes of all of them on a rank."""
    elements, wide = shape.s * shape.b * shape.spec.hidden, ITEMSIZE[shape.dtype]
    eight = shape.low is not None and shape.low.recipe != "nvfp4"  # --fp8-format decides
    narrow = 1 if eight else wide
    size = len(GATHERED) * narrow + len(REDUCED) * wide
    if eight and any(shape.sixteen_bit):
        size += (len(GATHERED) + len(REDUCED)) * wide
    return elements * size
