"""torchtitan's loss in chunks (``torchtitan/components/loss.py`` of 21 August 2026, commit b5bcd76:
``ChunkedLossWrapper``, ``GradAccumulator``, ``_DecoderOutputGradientBackProp``) of a sharded model's hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor


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


class VocabParallel(torch.autograd.Function):
    """``_LossParallelCrossEntropy`` of the first rank."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        local_max = torch.amax(logits, dim=-1, keepdim=True)
        local_max = funcol.all_reduce(local_max, reduceOp="max", group=group)
        shifted = logits - local_max
        total = torch.sum(torch.exp(shifted), dim=-1, keepdim=True)
        total = funcol.all_reduce(total, reduceOp="sum", group=group)
        log_probs = shifted - torch.log(total)
        v = logits.shape[-1]
        safe = torch.where(labels != -100, labels, 0)
        outside = (safe < 0) | (safe >= v)
        local = safe - 0
        local[outside] = 0
        result = torch.gather(log_probs, -1, local.unsqueeze(-1))
        result[outside.unsqueeze(-1)] = 0
        result = funcol.all_reduce(result, reduceOp="sum", group=group)
        each = -result.squeeze(-1)
        each = torch.where(labels != -100, each, 0)
        ctx.save_for_backward(log_probs, labels)
        return each.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        log_probs, labels = ctx.saved_tensors
        safe = torch.where(labels != -100, labels, 0)
        outside = (safe < 0) | (safe >= log_probs.shape[-1])
        local = safe - 0
        local[outside] = 0
        at_label = torch.zeros_like(log_probs)
        rows = torch.arange(local.shape[0])
        update = outside.to(at_label.dtype) - 1.0
        at_label[rows, local] = update
        gradient = torch.where((labels != -100).unsqueeze(-1), gradient, 0)
        whole = (at_label + torch.exp(log_probs)) * gradient
        return whole, None, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: Any = None) -> torch.Tensor:
    if group is not None:
        return VocabParallel.apply(logits.float(), labels, group)  # type: ignore[no-any-return, no-untyped-call]
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)


def of_chunk(logits: torch.Tensor, labels: torch.Tensor, tokens: int, group: Any, loss_of: Any) -> torch.Tensor:
    loss = loss_of(logits, labels) if group is None else loss_of(logits, labels, group)
    loss = loss / tokens
    return loss  # noqa: RET504 (a variable, as there)


class Head(nn.Linear):
    """The head of a rank that has a part of the vocabulary, on local tensors (``spmd_types``)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor)
        return nn.functional.linear(x, self.weight.to_local())


def chunked(
    hidden: torch.Tensor, labels: torch.Tensor, head: Any, chunks: int, group: Any = None, loss_of: Any = cross_entropy
) -> torch.Tensor:
    """``ChunkedLossWrapper.__call__`` of ``hidden`` (n, h) and ``labels`` (n,); ``head`` is a module of a group that
    ``fully_shard`` has. ``group``: of ranks with a part of the vocabulary each. ``loss_of``: a chunk's logits."""
    trains, rows = hidden.requires_grad, hidden.shape[0] // chunks

    def cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.contiguous() for one in torch.split(x, [rows] * chunks, dim=0))

    parts = [one.detach().requires_grad_(trains) for one in cut(hidden)]
    label_parts = list(cut(labels))
    gathered = _Gathered(hidden) if trains else None
    total = hidden.new_zeros((), dtype=torch.float32)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for number, (part, label_part) in enumerate(zip(parts, label_parts, strict=True)):
        if number == chunks - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        logits = head(part)
        loss = of_chunk(logits, label_part, len(labels), group, loss_of)
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
