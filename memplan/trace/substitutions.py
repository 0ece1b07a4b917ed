"""Where a CPU-only PyTorch behaves unlike CUDA's, and what a trace puts in its place.

Each substitution is one entry of ``SUBSTITUTIONS``, so that a report can list them. Functions are replaced here;
what one operator returns or does in place is replaced where operators are seen (``storages``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .attention import fused_attention

SUBSTITUTIONS = (
    "dropout is native_dropout, whose mask has one byte an element (CUDA's fused kernel)",
    "scaled_dot_product_attention is the flash-attention operator where PyTorch would take it, else the "
    "memory-efficient one, else plain operators, with the outputs that they save",
    "softmax and log_softmax of fp16 with dtype=float32 convert within their kernel",
    "rms_norm is one operator that saves its input and the reciprocal deviation in fp32",
    "layer_norm and batch_norm of 16-bit tensors give their statistics in fp32",
    "logsigmoid saves no buffer",
    "sums of gradients that meet, gradients of indexing and gather, and the bias of a linear layer on a strided or "
    "four-dimensional input are added in place",
    "counters of optimizer steps are on the host unless the implementation is fused",
    "autocast is the CPU's, with CUDA's lists of operators (ATen/autocast_mode.h); GradScaler applies every step",
    "DistributedDataParallel's all-reduce gives buckets back as they were (the fake process group returns nothing)",
    "4-bit weights are ordinary parameters beside bitsandbytes' own state, and gemm_4bit is the product of a "
    "dequantised weight, as on CUDA where it has no kernel of its own",
    "numbers that Adafactor reads back from the device are one",
    "fewer key heads are handed to attention's kernel as they are (TRANSFORMERS_SDPA_FORCE_GQA), and rows are of one "
    "sequence each, which transformers looks for in positions",
)


class NotOnCudaError(Exception):
    """A layer that CUDA runs by a kernel whose saved tensors are not known here."""


@contextmanager
def cuda_behaviour() -> Iterator[None]:
    """PyTorch's functions as CUDA runs them."""
    functional: Any = torch.nn.functional
    with ExitStack() as stack:
        for owner, name, made in (
            (functional, "dropout", _dropout(functional.dropout)),
            (functional, "scaled_dot_product_attention", fused_attention),
            (functional, "linear", _linear(functional.linear)),
            (functional, "rms_norm", _rms_norm(functional.rms_norm)),
            (torch, "rms_norm", _rms_norm(torch.rms_norm)),
            *((torch.Tensor, name, _converting(getattr(torch.Tensor, name))) for name in _HALF_TO_FLOAT),
            *((torch, name, _converting(getattr(torch, name))) for name in _HALF_TO_FLOAT),
            *((torch._VF, name, _refused(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        ):
            stack.enter_context(patch.object(owner, name, made))
        yield


@contextmanager
def cuda_behaviour_of_real() -> Iterator[None]:
    """Of those functions the ones that CPU tensors can be put through, and give right values."""
    functional: Any = torch.nn.functional
    with (
        patch.object(functional, "dropout", _dropout(functional.dropout)),
        patch.object(functional, "linear", _linear(functional.linear)),
    ):
        yield


def _refused(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotOnCudaError(f"{name} is cuDNN's on CUDA, and how much that keeps for backward is not known")

    return refused


def _dropout(dropout: Any) -> Callable[..., torch.Tensor]:
    def native_dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """As ``is_fused_kernel_acceptable`` (``Dropout.cpp``) has it."""
        if not training or inplace or not 0.0 < p < 1.0 or not input.numel():
            return dropout(input, p, training, inplace)  # type: ignore[no-any-return]
        return torch.native_dropout(input, p, True)[0]

    return native_dropout


_HALF_TO_FLOAT = {"softmax": torch._softmax, "log_softmax": torch._log_softmax}


def _converting(original: Any) -> Callable[..., torch.Tensor]:
    """``SoftMax.cpp``: on CUDA a softmax of fp16 that is asked for in fp32 makes no copy of its input."""
    kernel = _HALF_TO_FLOAT[original.__name__]

    def softmax(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dim, dtype = (args[at] if len(args) > at else kwargs.get(name) for at, name in enumerate(("dim", "dtype")))
        if input.dtype is torch.float16 and dtype is torch.float32 and isinstance(dim, int):
            return kernel(input, dim, True)
        return original(input, *args, **kwargs)  # type: ignore[no-any-return]

    return softmax


def _linear(linear: Any) -> Callable[..., torch.Tensor]:
    def added_in_place(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``Linear.cpp``: one kernel for a matrix or a whole (b, s, h), else a product and then the bias, in place;
        which becomes a sum apart while a mode sees operators."""
        in_one = input.dim() == 2 or (input.dim() == 3 and input.is_contiguous())
        wraps = is_traceable_wrapper_subclass(input) or is_traceable_wrapper_subclass(weight)
        others = wraps or torch.is_autocast_enabled(input.device.type)
        if bias is None or in_one or others:
            return linear(input, weight, bias)  # type: ignore[no-any-return]
        return linear(input, weight).add_(bias)  # type: ignore[no-any-return]

    return added_in_place


class _FusedRmsNorm(torch.autograd.Function):
    """``_fused_rms_norm`` (``aten/src/ATen/native/cuda/layer_norm_kernel.cu``, ``derivatives.yaml``)."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, rows: int, weight: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        wide = torch.float64 if input.dtype is torch.float64 else torch.float32
        deviation = torch.empty(*input.shape[:-rows], *(1,) * rows, dtype=wide, device=input.device)
        ctx.save_for_backward(input, weight, deviation)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        needs_input, _, needs_weight = ctx.needs_input_grad
        grad_input = torch.empty_like(input, memory_format=torch.contiguous_format) if needs_input else None
        return grad_input, None, torch.empty_like(weight) if needs_weight else None


def _rms_norm(original: Any) -> Callable[..., torch.Tensor]:
    def rms_norm(
        input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        """Of a tensor (…, normalized_shape)."""
        if is_traceable_wrapper_subclass(input):
            apart: torch.Tensor = original(input, normalized_shape, weight, eps)
            return apart
        rows = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
        fused: torch.Tensor = _FusedRmsNorm.apply(input, rows, weight)  # type: ignore[no-untyped-call]
        return fused

    return rms_norm
