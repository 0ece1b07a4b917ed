"""Megatron-Core in a worker."""

from __future__ import annotations

from .megatron import training_of
from .megatron_followed import followed

__all__ = ["followed", "training_of"]
