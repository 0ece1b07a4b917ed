"""torchtitan's loss in chunks (``torchtitan/components/loss.py`` of 21 August 2026, commit b5bcd76:
``ChunkedLossWrapper``, ``GradAccumulator``, ``_DecoderOutputGradientBackProp``) of a sharded model's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None, None


class _Gathered:
    """``GradAccumulator``."""

    def __init__(self, like: torch.Tensor) -> None:
        self.buffer = torch.zeros_like(like, dtype=torch.float32)
        self.number = 0

    def add(self, gradient: torch.Tensor) -> None:
        if gradient.dtype != self.buffer.dtype:
            gradient = gradient.to(self.buffer.dtype)
        rows = gradient.shape[0]
        self.buffer[self.number * rows : (self.number + 1) * rows] = gradient
        self.number += 1


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)


def of_chunk(logits: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    loss = cross_entropy(logits, labels)
    loss = loss / tokens
    return loss  # noqa: RET504 (a variable, as there)


def chunked(hidden: torch.Tensor, labels: torch.Tensor, head: nn.Module, chunks: int) -> torch.Tensor:
    """``ChunkedLossWrapper.__call__`` of ``hidden`` (n, h) and ``labels`` (n,); ``head`` is a module of a group that
    ``fully_shard`` has."""
    trains, rows = hidden.requires_grad, hidden.shape[0] // chunks

    def cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.contiguous() for one in torch.split(x, [rows] * chunks, dim=0))

    parts = [one.detach().requires_grad_(trains) for one in cut(hidden)]
    label_parts = list(cut(labels))
    gathered = _Gathered(hidden) if trains else None
    total = hidden.new_zeros((), dtype=torch.float32)
    assert isinstance(head, FSDPModule)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for number, (part, label_part) in enumerate(zip(parts, label_parts, strict=True)):
        if number == chunks - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        logits = head(part)
        loss = of_chunk(logits, label_part, len(labels))
        total = total + loss.detach()
        if gathered is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            assert part.grad is not None
            gathered.add(part.grad)
            part.grad = None
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    if gathered is None:
        return total
    whole = gathered.buffer.to(hidden.dtype)
    return _Handed.apply(hidden, whole, total)  # type: ignore[no-any-return, no-untyped-call]
