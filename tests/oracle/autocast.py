"""CUDA's autocast on CPU tensors, as ``memplan trace`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from memplan.trace.autocast import cast_by_autocast, cuda_autocast as autocast_under_lists, cuda_lists, policies

__all__ = ["cast_by_autocast", "cuda_autocast", "cuda_lists", "policies"]


@contextmanager
def cuda_autocast(dtype: str | None) -> Iterator[None]:
    """``torch.autocast`` in ``dtype`` (``bf16`` or ``fp16``); ``None`` is none."""
    with cuda_lists() if dtype is not None else nullcontext(), autocast_under_lists(dtype):
        yield
