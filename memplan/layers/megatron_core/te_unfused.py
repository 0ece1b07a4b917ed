"""``UnfusedDotProductAttention`` of Transformer Engine (``dot_product_attention/backends.py``, ``softmax.py``).

Matrix products and a fused scale-mask-softmax on (b, a, s, s). Shapes: s sequence, b micro-batch, a heads on this
rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.errors import PlanError
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor
from . import te_facts
from .shape import CoreShape


def core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """(s, b, a d) from q, k, v (s, b, a, d). The mask and the scores live until the module returns."""
    s, b, a, d = q.shape
    if not softmax_is_fused(s, b * a, q.dtype):
        problem = "unfused attention of Transformer Engine outside its softmax kernel's sizes is not covered"
        raise PlanError("batch.seq", s, problem)
    mask = causal_mask(r, s, shape.te) if shape.spec.causal else padding_mask(r, b, s, shape.te)
    if k.shape[2] < a:
        k = ops.expanded(r, k, q.shape, "key_repeated", copies=True)
        v = ops.expanded(r, v, q.shape, "value_repeated", copies=True)
    size = (b * a, s, s)
    scratch = [r.empty(size, q.dtype, "matmul_result")]
    scores = _scaled_product(r, q, k, size)
    scratch.clear()
    probabilities = _softmax(r, scores, in_place=te_facts.softmax_backward_in_place(shape.te))
    if not shape.spec.causal:
        probabilities = _masked(r, probabilities, mask[0])
    probabilities = ops.dropout(r, probabilities, shape.spec.attention_dropout, "attention_dropout")
    context = ops.matmul(r, probabilities, v, (b * a, s, d), "context")
    return ops.contiguous(r, context, (s, b, a * d), "context_contiguous")


def softmax_is_fused(s: int, batches: int, dtype: str) -> bool:
    """``FusedScaleMaskSoftmax.is_kernel_available`` for s queries and keys and b a batches."""
    rows = 4 if s > 128 else 8  # get_batch_per_block
    return dtype != "fp32" and 16 < s < 16384 and s % 8 == 0 and batches % 4 == 0 and s % rows == 0


def _scaled_product(r: Recorder, q: Tensor, k: Tensor, size: Shape) -> Tensor:
    """``baddbmm(beta=0, alpha=scale)``: saves both factors; each gradient is a product, then scaled out of place."""
    dtype, likes = q.dtype, (q.shape, k.shape)

    def gradient(r: Recorder, name: str, like: Shape) -> Tensor:
        product = r.empty(like, dtype, f"grad_{name}_unscaled")
        scaled = r.empty(like, dtype, f"grad_{name}")
        del product
        return scaled

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [gradient(r, name, like) for name, like in zip("qk", likes, strict=True)]

    node = r.node((q, k), (q, k), backward)
    out = r.empty(size, dtype, "scores")
    out.node = node
    return out


def _softmax(r: Recorder, scores: Tensor, *, in_place: bool) -> Tensor:
    """``ScaledMaskedSoftmax``: saves its result; backward may write over the incoming gradient."""
    out = r.empty(scores.shape, scores.dtype, "probabilities")
    like, dtype = scores.shape, scores.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return gradients if in_place else [r.empty(like, dtype, "grad_scores")]

    out.node = r.node((scores,), (out,), backward)
    return out


def _masked(r: Recorder, x: Tensor, mask: Tensor) -> Tensor:
    """``masked_fill`` with zeros where rows are padding: saves the mask."""
    out = r.empty(x.shape, x.dtype, "probabilities_masked")
    like, dtype = x.shape, x.dtype
    out.node = r.node((x,), (mask,), lambda r, gradients: [r.empty(like, dtype, "grad_probabilities_masked")])
    return out


# -- masks ------------------------------------------------------------------------------------------


def causal_mask(r: Recorder, s: int, te: tuple[int, int]) -> list[Tensor]:
    """``get_full_mask``: (1, 1, s, s) booleans, by way of three int32 matrices, made in every forward."""
    distance = _distance(r, s)
    left, right = (r.empty((1, 1, s, s), "int32", f"window_{side}") for side in ("left", "right"))
    mask = _outside(r, (1, 1, s, s), te)
    del left, right, distance
    return [mask]


def padding_mask(r: Recorder, b: int, s: int, te: tuple[int, int]) -> list[Tensor]:
    """``get_full_mask`` of a padding mask (b, 1, 1, s): (b, 1, s, s), and lengths that stay as long."""
    full = (b, 1, s, s)
    padded = r.empty(full, "bool", "padding")
    kept = r.empty(full, "bool", "padding_not")
    lengths = [r.empty((b,), "int64", f"lengths_{part}") for part in ("q", "kv")]
    distance = _distance(r, s)
    left, right = _window(r, b, full, "left"), _window(r, b, full, "right")
    outside = _outside(r, full, te)
    mask = r.empty(full, "bool", "mask")
    del padded, kept, distance, left, right, outside
    return [mask, *lengths]


def _distance(r: Recorder, s: int) -> Tensor:
    """Query minus key position, int32 (1, 1, s, s)."""
    rows, columns = r.empty((s,), "int32", "rows"), r.empty((s,), "int32", "columns")
    distance = r.empty((1, 1, s, s), "int32", "distance")
    del rows, columns
    return distance


def _window(r: Recorder, b: int, full: Shape, side: str) -> Tensor:
    difference = r.empty((b,), "int64", f"window_{side}_difference")
    end = r.empty((b,), "int64", f"window_{side}_end")
    del difference
    window = r.empty(full, "int64", f"window_{side}")
    del end
    return window


def _outside(r: Recorder, full: Shape, te: tuple[int, int]) -> Tensor:
    """Where a key is outside the window: booleans, up to 2.5 by way of int64 (``te_facts.mask_in_int64``)."""
    if te_facts.mask_in_int64(te):
        return _outside_int64(r, full)
    at_most = r.empty(full, "bool", "left_at_most_0")
    below = r.empty(full, "bool", "right_below_0")
    within = r.empty(full, "bool", "right_not_below_0")
    del below
    inside = r.empty(full, "bool", "inside_window")
    del at_most, within
    outside = r.empty(full, "bool", "outside_window")
    del inside
    return outside


def _outside_int64(r: Recorder, full: Shape) -> Tensor:
    parts = []
    for side in ("left", "right"):
        condition = r.empty(full, "bool", f"{side}_condition")
        scalars = [r.empty((), "int64", value) for value in ("one", "zero")]
        parts.append(r.empty(full, "int64", f"{side}_one_or_zero"))
        del condition, scalars
    difference = r.empty(full, "int64", "inside_window")
    parts.clear()
    mask = r.empty(full, "bool", "outside_window")
    del difference
    return mask
