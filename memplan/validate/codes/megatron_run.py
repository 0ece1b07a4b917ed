"""Megatron-Core in a worker, as its launch scripts start it."""

from __future__ import annotations

import os

from .megatron import training_of
from .megatron_followed import followed

__all__ = ["followed", "training_of"]

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
"""Collectives begin before the products that they are to overlap with (``tensor_parallel/layers.py``)."""
