"""Liger's and Apple's losses on fake tensors: their own Python code, with kernels that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.loss.loss_utils import ForCausalLMLoss

from .optimizer_step import DTYPES, on_no_device
from .tracer import Change, Follow, Trace

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states (b, s, h), head weight (v, h) and labels (b, s)."""


@dataclass(frozen=True)
class Sizes:
    """b sequences of s tokens, hidden size h, vocabulary v."""

    b: int
    s: int
    h: int
    v: int
    dtype: str
    weight: str = ""
    """Dtype of the head's weight, where it is not that of hidden states."""

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, weight and labels."""
        dtype, stored = DTYPES[self.dtype], DTYPES[self.weight or self.dtype]
        return (
            torch.zeros((self.b, self.s, self.h), dtype=dtype),
            torch.zeros((self.v, self.h), dtype=stored),
            torch.zeros((self.b, self.s), dtype=torch.int64),
        )


@dataclass(frozen=True)
class TracedLoss:
    """Changes from hidden states to the loss, and from its gradient to theirs.

    The caller lets go of the hidden states when the loss is there; the gradients stay.
    """

    forward: list[Change]
    backward: list[Change]


def traced_loss(loss: Loss, sizes: Sizes, *, trained: bool = True, backward: bool = True) -> TracedLoss:
    """``loss`` of one micro-batch under autograd, unless there is no ``backward``; the weight is frozen unless
    ``trained``."""
    trace = Trace()
    with on_no_device(), _without_kernels(), FakeTensorMode(allow_non_fake_inputs=True), Follow(trace):
        leaf, weight, labels = sizes.tensors()
        leaf.requires_grad_()
        weight.requires_grad_(trained)
        hidden = leaf * 2.0 if backward else leaf.detach() * 2.0
        start = len(trace.changes)
        with torch.set_grad_enabled(backward):
            computed = loss(hidden, weight, labels)
        del hidden
        middle = len(trace.changes)
        if not backward:
            return TracedLoss(trace.changes[start:middle], [])
        computed.backward()  # type: ignore[no-untyped-call]
        changes = trace.changes[middle:]
        taken = next(change for change in reversed(changes) if change.op == "aten.mul.Tensor" and change.sign > 0)
        handed_over = changes[changes.index(taken) + 1]
        assert (handed_over.sign, handed_over.bytes) == (-1, taken.bytes)
        return TracedLoss(trace.changes[start:middle], [c for c in changes if c not in (taken, handed_over)])


def liger(*, fp32: bool, capability: tuple[int, int]) -> Loss:
    """Liger's loss as ``LigerForCausalLMLoss`` calls it."""
    module = _on_cpu("liger_kernel.ops.fused_linear_cross_entropy")
    module.liger_cross_entropy_kernel = _Kernel()

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)
        shifted = labels[..., 1:].contiguous()
        accumulator = torch.float32 if fp32 else None
        with patch.object(torch.cuda, "get_device_capability", lambda device: capability):
            computed = module.LigerFusedLinearCrossEntropyFunction.apply(
                hidden.view(-1, hidden.shape[-1]),
                weight,
                shifted.view(-1),
                *(None, None, -100, 0.0, 0.0, "mean", None, False),
                accumulator,
            )
        return computed[0]  # type: ignore[no-any-return]

    return loss


def _on_cpu(name: str) -> Any:
    """A module whose code takes the CPU for CUDA: fake CUDA tensors have no autograd in a build without it."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    module = ModuleType(name)
    module.__file__ = spec.origin
    source = Path(spec.origin).read_text().replace('"cuda"', '"cpu"')
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


class _Kernel:
    """Stands for a Triton kernel: ``kernel[grid](…)``."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` as CUDA composes it (``native/cuda/Equal.cpp``)."""
    (one == other).all()
    return True


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Of a mask without zeros."""
    return torch.empty((mask.numel(), mask.dim()), dtype=torch.int64, device=mask.device)


@contextmanager
def _without_kernels() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "equal", _equal))
        stack.enter_context(patch.object(torch.Tensor, "nonzero", _nonzero))
        stack.enter_context(patch.object(torch.Tensor, "data_ptr", lambda tensor: 0))
        stack.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda: True))
        yield


def cut_is_forked() -> bool:
    """Whether the cut cross entropy that is installed is Axolotl's, which gathers weights of ZeRO-3 again."""
    from cut_cross_entropy.cce import CCEParams  # type: ignore[import-not-found, unused-ignore]

    return "zero3_params" in CCEParams.__dataclass_fields__


def cut(*, fp32: bool) -> Loss:
    """Cut cross entropy as ``apply_lce`` calls it, with tokens shifted; in Axolotl's fork by that itself."""
    from cut_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        cce,
        cce_backward,
        cce_lse_forward,
        indexed_dot,
    )

    def sort(average: torch.Tensor) -> torch.Tensor:
        return torch.argsort(average).to(torch.int32)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if cut_is_forked():
            from cut_cross_entropy.transformers.utils import (  # type: ignore[import-not-found, unused-ignore]
                PatchOptions,
                apply_lce,
            )

            options = PatchOptions("cce", "mean", "auto", fp32, fp32, True, True, False)
            return apply_lce(hidden, weight, labels, options)  # type: ignore[no-any-return]
        computed, _ = cce.cce_linear_cross_entropy(
            hidden, weight, labels, shift=True, accum_e_fp32=fp32, accum_c_fp32=fp32
        )
        return computed  # type: ignore[no-any-return]

    # For good: backward looks them up, too.
    for where, name, stand_in in (
        (cce_backward, "_cce_backward_kernel", _Kernel()),
        (cce_lse_forward, "_cce_lse_forward_kernel", _Kernel()),
        (indexed_dot, "_indexed_neg_dot_forward_kernel", _Kernel()),
        (cce, "sort_logit_avg", sort),
    ):
        setattr(where, name, stand_in)
    return loss


def chunked(chunks: int) -> Loss:
    """Head and cross entropy part by part, each with its backward at once, as torchtitan's trainer has it."""

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, hidden.shape[-1])
        gathered = torch.zeros_like(tokens, dtype=torch.float32)
        total = tokens.new_zeros((), dtype=torch.float32)
        for part, x, y in zip(
            gathered.chunk(chunks), tokens.detach().chunk(chunks), labels.view(-1).chunk(chunks), strict=True
        ):
            x.requires_grad_()
            logits = torch.nn.functional.linear(x, weight)
            one = torch.nn.functional.cross_entropy(logits.float(), y, reduction="sum") / len(tokens)
            total = total + one.detach()
            one.backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            part.copy_(x.grad.to(torch.float32))
            x.grad = None
        made: torch.Tensor = _Hands.apply(tokens, gathered.to(tokens.dtype), total)  # type: ignore[no-untyped-call]
        return made

    return loss


def last_tokens(kept: int) -> Loss:
    """The end of transformers' ``forward`` with ``logits_to_keep`` and labels of the same tokens."""

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden[:, slice(-kept, None), :], weight)
        made: torch.Tensor = ForCausalLMLoss(logits, labels[:, -kept:].clone(), weight.shape[0])
        return made

    return loss


class _Hands(torch.autograd.Function):
    """Gives a loss whose backward hands out a gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0], None, None
