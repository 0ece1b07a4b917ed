"""A step of a real optimizer on fake CUDA tensors: what it keeps, and what it takes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.layers.module import Parameter

from .tracer import Change, Follow, Trace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TracedStep:
    """What the first step left behind, and what the second one did, on the device."""

    states: int
    """Bytes, storages rounded."""
    managed: int
    """Bytes in unified memory."""
    second: list[Change]


class FollowDevice(Follow):  # type: ignore[no-untyped-call]
    """Follows what PyTorch's allocator has on the device."""

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.device.type == "cuda":
            super().adopt(tensor, op)


Make = Callable[[list[torch.nn.Parameter]], Sequence[Any]]
"""Optimizers over parameters, in the order in which they step."""


def traced(make: Make, parameters: Sequence[Parameter], dtype: str) -> TracedStep:
    """Two steps of the optimizers that ``make`` returns.

    Numbers read back from the device are one, and ``copy_``, which takes no memory, does nothing.
    """
    trace, managed = Trace(), _Managed()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with on_no_device(), fake, FollowDevice(trace) as follow:
        tensors = [torch.nn.Parameter(torch.zeros(p.shape, dtype=DTYPES[dtype], device="cuda")) for p in parameters]
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        managed.follow = follow
        with _without_kernels(managed):
            before = trace.live
            optimizers = make(tensors)
            for optimizer in optimizers:
                optimizer.step()
            states, done = trace.live - before, len(trace.changes)
            for optimizer in optimizers:
                optimizer.step()
            second = trace.changes[done:]
            assert trace.live == before + states
    return TracedStep(states, managed.bytes, second)


@contextmanager
def on_no_device() -> Iterator[None]:
    item = patch.object(torch.Tensor, "item", lambda tensor: 1.0)
    copy = patch.object(torch.Tensor, "copy_", lambda tensor, source: tensor)
    with item, copy:
        yield


class _Managed:
    """``get_paged``: counted here, and not followed."""

    def __init__(self) -> None:
        self.bytes = 0
        self.follow: FollowDevice | None = None

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.bytes += torch.Size(shape).numel() * dtype.itemsize
        assert self.follow is not None
        with patch.object(self.follow, "adopt", lambda tensor, op: None):
            return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def _without_kernels(managed: _Managed) -> Iterator[None]:
    """Kernels that work in place and know no fake tensors do nothing: fused SGD's, and bitsandbytes'."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return

    if find_spec("bitsandbytes") is None:
        with patch.object(torch, "_fused_sgd_", nothing):
            yield
        return
    import bitsandbytes.functional as functional  # type: ignore[import-not-found, unused-ignore]
    from bitsandbytes.optim import optimizer  # type: ignore[import-not-found, unused-ignore]

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "_fused_sgd_", nothing))
        for name in ("optimizer_update_32bit", "optimizer_update_8bit_blockwise", "fill", "prefetch_tensor"):
            stack.enter_context(patch.object(functional, name, nothing))
        stack.enter_context(patch.object(optimizer, "sync_gpu", nothing))
        stack.enter_context(patch.object(functional, "get_paged", managed))
        stack.enter_context(patch.object(functional, "create_dynamic_map", lambda signed: torch.zeros(256)))
        yield
