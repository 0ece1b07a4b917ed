"""A small independent witness: what real PyTorch code holds, followed on fake tensors.

Runs a training step under ``FakeTensorMode`` and follows storages (not tensors): each is counted
once when it first appears as the output of an operator, at its size rounded up to 512 B, until
Python and autograd let it go. Two of the CPU's behaviours are replaced by CUDA's: dropout through
``native_dropout`` (one-byte mask) and attention through the flash-attention operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def rounded(size: int) -> int:
    return max(512, -(-size // 512) * 512)


@dataclass
class Trace:
    live: int = 0
    peak: int = 0
    peak_op: str = ""
    events: list[tuple[str, int, str, tuple[int, ...], str]] = field(default_factory=list)
    """(+ or −, bytes, operator, shape, dtype)"""

    def reset_peak(self) -> None:
        self.peak, self.peak_op = self.live, ""

    def hold(self, size: int, op: str, shape: tuple[int, ...], dtype: str) -> None:
        self.live += size
        self.events.append(("+", size, op, shape, dtype))
        if self.live > self.peak:
            self.peak, self.peak_op = self.live, op

    def drop(self, size: int, op: str, shape: tuple[int, ...], dtype: str) -> None:
        self.live -= size
        self.events.append(("-", size, op, shape, dtype))


class Follow(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.seen: dict[int, Any] = {}

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        size = rounded(storage.nbytes()) if storage.nbytes() else 0
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.trace.hold(size, op, shape, dtype)
        finalizer = weakref.finalize(storage, self._gone, key, size, op, shape, dtype)
        finalizer.atexit = False
        self.seen[key] = finalizer

    def _gone(self, key: int, size: int, op: str, shape: tuple[int, ...], dtype: str) -> None:
        del self.seen[key]
        self.trace.drop(size, op, shape, dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.adopt(leaf, str(func))
        return out


@contextmanager
def cuda_behaviour() -> Iterator[None]:
    """Dropout and scaled-dot-product attention as CUDA runs them."""
    dropout, sdpa = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention

    def cuda_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0.0:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]

    torch.nn.functional.dropout = cuda_dropout
    torch.nn.functional.scaled_dot_product_attention = flash
    torch.nn.modules.dropout.F.dropout = cuda_dropout
    try:
        yield
    finally:
        torch.nn.functional.dropout = dropout
        torch.nn.functional.scaled_dot_product_attention = sdpa
        torch.nn.modules.dropout.F.dropout = dropout


def fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def run(body: Callable[[Trace, Follow], None]) -> Trace:
    trace = Trace()
    with fake(), cuda_behaviour(), Follow(trace) as follow:
        body(trace, follow)
    return trace
