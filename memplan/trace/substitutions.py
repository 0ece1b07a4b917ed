"""``scaled_dot_product_attention`` by the kernel that CUDA takes, with what PyTorch does around it.

``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` chooses (``select_sdp_backend``), and
``aten/src/ATen/native/transformers/attention.cpp`` pads, masks and falls back. cuDNN's attention, which PyTorch prefers
on Hopper and Blackwell with cuDNN from 9.15, keeps tensors of the same sizes as flash attention.

Each substitution is one entry of ``SUBSTITUTIONS``, so that a report can list them. Functions are replaced here;
what one operator returns or does in place is replaced where operators are seen (``storages``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .autocast import cast_by_autocast
from .operators import note_moved

LARGEST_FLASH_HEAD = 256
"""Features of a head (``check_head_dim_size_flash``)."""
FLASH_MULTIPLE = 8
"""What the features of a head are padded to (``pad_last_dim``)."""
MASK_MULTIPLE = 16
"""What a row of a mask is padded to for the memory-efficient kernel (``pad_bias``)."""


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of ``query`` (b, a, s, d) over ``key`` and ``value``, on an A100 or later: flash where it can, else
    memory-efficient, else plain operators."""
    query, key, value = cast_by_autocast(query, key, value)
    if attn_mask is not None:
        (attn_mask,) = cast_by_autocast(attn_mask)
    if _flash_can(query, key, value, attn_mask, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = _as_scores(attn_mask, query.dtype)
    if _efficient_can(query, value) and not (enable_gqa and key.shape[-3] != query.shape[-3]):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flash_can(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> bool:
    features = {one.shape[-1] for one in (query, key, value)}
    return (
        mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and len(features) == 1
        and max(features) <= LARGEST_FLASH_HEAD
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention
    features = query.shape[-1]
    lacks = -features % FLASH_MULTIPLE
    if lacks:
        scale = 1 / sqrt(features) if scale is None else scale
        query, key, value = (torch.nn.functional.pad(one, (0, lacks)) for one in (query, key, value))
    out: torch.Tensor = operator(query, key, value, p, is_causal, False, scale=scale)[0]
    return out[..., :features] if lacks else out


def _efficient_can(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Rows are of whole words of 16 bytes (``check_head_dim_size_mem_efficient``)."""
    words = 16 // query.element_size()
    return query.shape[-1] % words == 0 and value.shape[-1] % words == 0


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The log-sum-exp, (b, a, s up to a multiple of 32), is there in training alone."""
    operator: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    wants_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    if mask is not None:
        mask = _aligned(mask.expand(*query.shape[:-1], key.shape[-2]))
    return operator(query, key, value, mask, wants_gradient, p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``preprocess_mask``: rows that are no multiple of 16 are copied, of every head."""
    lacks = -mask.shape[-1] % MASK_MULTIPLE
    if lacks:
        return torch.nn.functional.pad(mask, (0, lacks))[..., : mask.shape[-1]]
    if any(stride % MASK_MULTIPLE for stride in mask.stride()[:3]):
        return mask.contiguous()
    return mask


def _as_scores(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``convert_boolean_attn_mask``: 0 and −∞."""
    zero, never = (torch.scalar_tensor(one, dtype=dtype) for one in (0.0, float("-inf")))
    return torch.where(mask, zero, never)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """``_scaled_dot_product_attention_math``: operator by operator, in fp32, the mask added in place."""
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
        mask = None if mask is None else mask.float()
    factor = sqrt(1 / sqrt(query.shape[-1]) if scale is None else scale)
    query = query * factor
    if is_causal:
        pairs = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = _as_scores(pairs.tril(), query.dtype)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if p > 0.0:
        weights = torch.native_dropout(weights, p, True)[0]
    return torch.matmul(weights, value).to(dtype)


SUBSTITUTIONS = (
    "dropout is native_dropout, whose mask has one byte an element (CUDA's fused kernel)",
    "scaled_dot_product_attention is the flash-attention operator where PyTorch would take it, else the "
    "memory-efficient one, else plain operators, with the outputs that they save",
    "softmax and log_softmax of fp16 with dtype=float32 convert within their kernel",
    "rms_norm is one operator that saves its input and the reciprocal deviation in fp32",
    "layer_norm and batch_norm of 16-bit tensors give their statistics in fp32",
    "logsigmoid saves no buffer",
    "grouped products take fp16 and fp32, too",
    "sums of gradients that meet, gradients of indexing and gather, and the bias of a linear layer on a strided or "
    "four-dimensional input are added in place",
    "counters of optimizer steps are on the host unless the implementation is fused",
    "autocast is the CPU's, with CUDA's lists of operators (ATen/autocast_mode.h); GradScaler applies every step",
    "DistributedDataParallel's all-reduce gives buckets back as they were (the fake process group returns nothing)",
    "4-bit weights are ordinary parameters beside bitsandbytes' own state, and gemm_4bit is the product of a "
    "dequantised weight, as on CUDA where it has no kernel of its own",
    "maps of 8-bit values, which bitsandbytes reads back when it computes them, are any 256 numbers",
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
        note_moved(input, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        needs_input, _, needs_weight = ctx.needs_input_grad
        grad_input = torch.empty_like(input, memory_format=torch.contiguous_format) if needs_input else None
        note_moved(input, gradient, gradient, *(() if grad_input is None else (grad_input,)), kernels=2)
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
