"""``scaled_dot_product_attention`` by the kernel that CUDA takes, with what PyTorch does around it.

``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` chooses (``select_sdp_backend``), and
``aten/src/ATen/native/transformers/attention.cpp`` pads, masks and falls back. cuDNN's attention, which PyTorch prefers
on Hopper and Blackwell with cuDNN from 9.15, keeps tensors of the same sizes as flash attention.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from .autocast import cast_by_autocast

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
