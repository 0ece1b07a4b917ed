"""Where a CPU-only PyTorch behaves unlike CUDA's, and what a trace puts in its place.

Each substitution is one entry of ``SUBSTITUTIONS``, so that a report can list them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .autocast import cast_by_autocast

SUBSTITUTIONS = (
    "dropout is native_dropout, whose mask has one byte an element (CUDA's fused kernel)",
    "scaled_dot_product_attention is the flash-attention operator where PyTorch would take it, else the "
    "memory-efficient one, with the outputs that they save",
    "layer_norm of 16-bit tensors gives its statistics in fp32",
    "counters of optimizer steps are on the host unless the implementation is fused",
    "autocast is the CPU's, with CUDA's lists of operators (ATen/autocast_mode.h); GradScaler applies every step",
    "DistributedDataParallel's all-reduce gives buckets back as they were (the fake process group returns nothing)",
    "4-bit weights are ordinary parameters beside bitsandbytes' own state, and gemm_4bit is the product of a "
    "dequantised weight, as on CUDA where it has no kernel of its own",
    "numbers that Adafactor reads back from the device are one",
)

LARGEST_FLASH_HEAD = 256
"""Features of a head (``sdp_utils.cpp``, ``check_head_dim_size_flash``)."""


@contextmanager
def cuda_behaviour() -> Iterator[None]:
    """Dropout and scaled-dot-product attention as CUDA runs them."""
    functional: Any = torch.nn.functional
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def native_dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0 or inplace:
            return dropout(input, p, training, inplace)  # type: ignore[no-any-return]
        return torch.native_dropout(input, p, True)[0]

    functional.dropout, functional.scaled_dot_product_attention = native_dropout, fused_attention
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention


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
    """``scaled_dot_product_attention`` by the kernel that CUDA takes (``sdp_utils.cpp``, ``select_sdp_backend``):
    flash for 16-bit heads of up to 256 features without a mask, else memory-efficient. The latter takes as many
    key heads as query heads and a mask in the dtype of the scores."""
    operators: Any = torch.ops.aten
    query, key, value = cast_by_autocast(query, key, value)
    if attn_mask is not None:
        (attn_mask,) = cast_by_autocast(attn_mask)
    is_16_bit = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and is_16_bit and query.shape[-1] <= LARGEST_FLASH_HEAD:
        flash = operators._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-2], query.shape[-2], key.shape[-2])
    wants_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    efficient = operators._scaled_dot_product_efficient_attention
    return efficient(  # type: ignore[no-any-return]
        query, key, value, attn_mask, wants_gradient, dropout_p, is_causal, scale=scale
    )[0]
