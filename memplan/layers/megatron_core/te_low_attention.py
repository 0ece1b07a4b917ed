"""cuDNN's attention in 8 bits (``fp8_dot_product_attention``): delayed scaling, a tensor's own scale, or MXFP8.

Transformer Engine 2.18, ``dot_product_attention/backends.py`` (``FusedAttnFunc``), ``utils.py``
(``combine_and_quantize``, ``mxfp8_quantize_fast_path``, ``combine_and_dequantize``) and
``csrc/extensions/attention.cpp``. Queries, keys and values are cast as one tensor, and saved so; with delayed scaling
so is the context, whose copy in 16 bits goes out, while with a tensor's own scale and MXFP8 the kernel writes 16 bits,
which are saved (``NVTE_DPA_FP8CS_O_in_F16``). Scores and their gradients are scaled by numbers of earlier steps, those
of MXFP8 inside the kernel. MXFP8 casts each tensor in both orientations. cuDNN's front end takes no workspace
(``sdpa_fp8_bwd.h``); what the engine inside cuDNN asks for is not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ..autograd import Backward, Gradients, Recorder, Shape, Tensor
from ..work import Operator
from .precision import BYTE, MX, Low, Part, up
from .shape import CoreShape

OLDEST = (2, 18)
"""Before it statistics are two tensors, or the layout of copies is another."""


def fused(
    r: Recorder,
    qkv: tuple[Tensor, Tensor, Tensor],
    lengths: list[Tensor],
    sinks: list[Tensor],
    shape: CoreShape,
    done: Operator,
    wide: Backward,
) -> Tensor:
    """The context (s, b, a d) from q, k, v (s, b, a, d), which are parts of one tensor or contiguous, and sinks
    (1, a, 1, 1) of heads, if they have them. Where gradients are computed in 16 bits, ``wide`` does that, of inputs and
    a context that are saved so."""
    (q, k, v), has_sinks = qkv, len(sinks)
    (s, b, a, _), d_v, dtype, low = q.shape, v.shape[-1], q.dtype, low_of(shape)
    delayed, packed, by_block = low.recipe == "delayed", q.storage is k.storage, low.recipe == "mxfp8"
    likes, like_out = [one.shape for one in qkv], (s, b, a, d_v)
    whole = (sum(map(prod, likes)),)
    if by_block:
        copy = by_head(r, likes, dtype, low) if packed else by_sequence(r, likes, "qkv", low)
    else:
        joined = [] if packed else [r.empty(whole, dtype, "qkv_joined")]
        copy = cast(r, whole, "qkv", low)
        joined.clear()
    number = [] if by_block else [r.empty((1,), "fp32", "scores_scale_inverse")]
    if delayed:
        kept = cast(r, like_out, "context", low)
    else:
        number += [] if by_block else [r.empty((1,), "fp32", "context_amax")]
        kept = [r.empty(like_out, dtype, "context")]
    rng_state = r.empty((2,), "int64", "rng_state")
    statistics = r.empty((b, a, s, 1), "fp32", "softmax_statistics")
    number.clear()
    out = r.empty(like_out, dtype, "context") if delayed else kept[0]
    scale = [] if by_block else [r.empty((1,), "fp32", "scores_scale")]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = by_sequence(r, [like_out], "grad_context", low) if by_block else cast(r, like_out, "grad_context", low)
        names = () if by_block else ("scores_scale_inverse", "grad_scores_scale_inverse")
        numbers = [r.empty((1,), "fp32", name) for name in names]
        sizes = [whole] if packed else likes
        made = [r.empty(one, BYTE if delayed else dtype, "grad_qkv") for one in sizes]
        name = "grad_qkv_scale_inverse" if delayed else "grad_qkv_amax"
        scales = [] if by_block else [r.empty((1,), "fp32", name) for _ in likes]
        numbers.clear()
        of_sinks = [r.empty((1, a, 1, 1), "fp32", "grad_sinks") for _ in range(has_sinks)]
        if not delayed:
            scales.clear()
        else:
            together = [] if packed else [r.empty(whole, BYTE, "grad_qkv_joined")]
            wide = r.empty(whole, dtype, "grad_qkv_wide")
            together.clear()
            made = [wide]
            del wide
        grad.clear()
        parts = [made[at % len(made)] for at in range(len(likes))]
        return [*(Tensor(part.storage, like, dtype) for part, like in zip(parts, likes, strict=True)), *of_sinks]

    copies = 2 if by_block else 1
    work = done.after((low.work(whole, copies),), (low.work(like_out, copies),))
    low_backward = shape.low_attention is None or shape.low_attention.backward
    if not low_backward:
        copy, kept = [*qkv], [out]
        scale.clear()
    saved = (*copy, *kept, *lengths, statistics, rng_state, *sinks, *scale)
    copy.clear()
    kept.clear()
    node = r.node((*qkv, *sinks), saved, backward if low_backward else wide, work=work)
    return Tensor(out.storage, out.shape, dtype, node).view(s, b, a * d_v)


def low_of(shape: CoreShape) -> Low:
    """The quantisation of attention, which may be another than that of linear layers (``NVTE_DPA_FP8_RECIPE``)."""
    assert shape.low is not None
    assert shape.low_attention is not None
    return replace(shape.low, recipe=shape.low_attention.recipe)


def cast(r: Recorder, like: Shape, name: str, low: Low) -> list[Tensor]:
    copy = low.quantised(r, like, name, rows=True, columns=False)
    return [*copy.rows, *copy.shared]


EACH = (True, True, True)


def by_sequence(
    r: Recorder,
    likes: Sequence[Shape],
    name: str,
    low: Low,
    rows: Sequence[bool] = EACH,
    columns: Sequence[bool] = EACH,
) -> list[Tensor]:
    """Tensors (s, b, a, d) in both orientations, or in those that each is wanted in. Their scales, of each orientation
    in one buffer, are put in the order of heads, and then in that of products (``mxfp8_quantize_fast_path``)."""
    wanted = list(zip(likes, rows, columns, strict=False))
    copies = [low.quantised(r, (s, b * a * d), name, rows=row, columns=column) for (s, b, a, d), row, column in wanted]
    sizes = (
        sum(b * a * s * up(d // MX, 4) for (s, b, a, d), row, _ in wanted if row),
        sum(b * a * s // MX * up(d, 128) for (s, b, a, d), _, column in wanted if column),
    )
    moved = [r.empty((size,), BYTE, f"{name}_scales_by_head") for size in sizes]
    ordered = [r.empty((size,), BYTE, f"{name}_scales_ordered") for size in sizes]
    moved.clear()
    return [*(part for copy in copies for part in (*copy.rows[:1], *copy.columns[:1])), *ordered]


def by_head(r: Recorder, likes: Sequence[Shape], dtype: str, low: Low) -> list[Tensor]:
    """Tensors that are parts of one, put in the order (b, a, s, d) before (``transpose_to_bhsd_htd_pytorch``)."""
    moved = [r.empty((b, a, s, d), dtype, "qkv_by_head") for s, b, a, d in likes]
    copies = [low.quantised(r, like.shape, "qkv", rows=True, columns=True) for like in moved]
    moved.clear()
    return [part for copy in copies for part in (*copy.rows, *copy.columns)]


def state(shape: CoreShape) -> tuple[Part, ...]:
    """Scales and amaxes of nine tensors forward and six backward, which each layer's attention keeps
    (``DelayedScalingRecipeState``; three products, ``init_fp8_metadata``); of MXFP8 there are none."""
    if shape.low is None or shape.low_attention is None or shape.low_attention.recipe == "mxfp8":
        return ()
    history = shape.low_attention.history
    return tuple(
        part
        for count in (9, 6)
        for part in (Part("scale", (count,), "fp32"), Part("amax_history", (history, count), "fp32"))
    )
