"""Rotary position embedding in attention (``megatron/core/models/common/embeddings/rope_utils.py``)."""

from __future__ import annotations

from .. import ops
from ..autograd import Recorder, Tensor
from . import te
from .shape import CoreShape


def embed(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``apply_rotary_pos_emb`` on (s, b, heads, d): Transformer Engine's kernel, or operators."""
    if shape.rope_fusion:
        return te.fused_rope(r, x, name)
    rest = ops.slice_last(r, x, 0, f"{name}_rest")
    cos = _table(r, f"{name}_cos", shape)
    sin = _table(r, f"{name}_sin", shape)
    plain = ops.elementwise(r, f"{name}_times_cos", (x,), (cos,))
    rotated = _rotated(r, x, name, shape.rotary_interleaved)
    rotated = ops.elementwise(r, f"{name}_times_sin", (rotated,), (sin,))
    x = ops.add(r, plain, rotated, f"{name}_embedded")
    del plain, rotated
    return ops.cat_last(r, x, rest, f"{name}_cat")


def _rotated(r: Recorder, x: Tensor, name: str, interleaved: bool) -> Tensor:
    """``_rotate_half``: halves or every second feature, the second negated, put together again."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    if interleaved:
        first, second = (ops.slice_last(r, x, half[-1], f"{name}_{part}") for part in ("even", "odd"))
    else:
        first, second = ops.split(r, x, [half, half], f"{name}_chunk")
    return ops.cat_last(r, ops.scale(r, second, f"{name}_negated"), first, f"{name}_rotated")


def _table(r: Recorder, name: str, shape: CoreShape) -> Tensor:
    """Cosines or sines (s, 1, 1, d): taken in fp32, scaled and cast to the dtype of the queries."""
    size = (shape.s, 1, 1, shape.spec.head_dim)
    whole = [r.empty(size, "fp32", f"{name}_fp32")]
    whole = [r.empty(size, "fp32", f"{name}_scaled")]
    table = r.empty(size, shape.dtype, name)
    whole.clear()
    return table
