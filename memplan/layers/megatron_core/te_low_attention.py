"""cuDNN's attention in 8 bits (``--fp8-dot-product-attention``), with delayed scaling or the scale of each tensor.

Transformer Engine 2.18, ``dot_product_attention/backends.py`` (``FusedAttnFunc``), ``utils.py``
(``combine_and_quantize``, ``combine_and_dequantize``) and ``csrc/extensions/attention.cpp``. Queries, keys and values
are cast as one tensor, and saved so; with delayed scaling so is the context, whose copy in 16 bits goes out, while with
a tensor's own scale the kernel writes 16 bits, which are saved (``NVTE_DPA_FP8CS_O_in_F16``). Scores and their
gradients are scaled by numbers of earlier steps either way. cuDNN's front end takes no workspace
(``sdpa_fp8_bwd.h``); what the engine inside cuDNN asks for is not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..autograd import Gradients, Recorder, Tensor
from ..work import Operator
from .precision import BYTE, Part
from .shape import CoreShape

OLDEST = (2, 18)
"""Before it statistics are two tensors, or the layout of copies is another."""
RECIPES = ("delayed", "tensorwise")
HISTORY = 1
"""Amaxes kept of scores where a tensor's own scale is used (``NVTE_DPA_FP8DS_AMAX_HISTLEN``)."""


def fused(
    r: Recorder, qkv: tuple[Tensor, Tensor, Tensor], lengths: list[Tensor], shape: CoreShape, done: Operator
) -> Tensor:
    """The context (s, b, a d) from q, k, v (s, b, a, d), which are parts of one tensor or contiguous."""
    q, k, v = qkv
    assert shape.low is not None
    (s, b, a, _), d_v, dtype, low = q.shape, v.shape[-1], q.dtype, shape.low
    delayed, packed = low.recipe == "delayed", q.storage is k.storage
    likes, like_out = [one.shape for one in qkv], (s, b, a, d_v)
    whole = (sum(map(prod, likes)),)
    joined = [] if packed else [r.empty(whole, dtype, "qkv_joined")]
    copy = low.quantised(r, whole, "qkv", rows=True, columns=False)
    joined.clear()
    number = [r.empty((1,), "fp32", "scores_scale_inverse")]
    if delayed:
        narrow = low.quantised(r, like_out, "context", rows=True, columns=False)
        kept = [*narrow.rows, *narrow.shared]
        narrow.clear()
    else:
        number.append(r.empty((1,), "fp32", "context_amax"))
        kept = [r.empty(like_out, dtype, "context")]
    rng_state = r.empty((2,), "int64", "rng_state")
    statistics = r.empty((b, a, s, 1), "fp32", "softmax_statistics")
    number.clear()
    out = r.empty(like_out, dtype, "context") if delayed else kept[0]
    scale = r.empty((1,), "fp32", "scores_scale")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = low.quantised(r, like_out, "grad_context", rows=True, columns=False)
        numbers = [r.empty((1,), "fp32", name) for name in ("scores_scale_inverse", "grad_scores_scale_inverse")]
        sizes = [whole] if packed else likes
        made = [r.empty(one, BYTE if delayed else dtype, "grad_qkv") for one in sizes]
        scales = [r.empty((1,), "fp32", "grad_qkv_scale_inverse" if delayed else "grad_qkv_amax") for _ in likes]
        numbers.clear()
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
        return [Tensor(part.storage, like, dtype) for part, like in zip(parts, likes, strict=True)]

    assert done.forward is not None
    assert done.backward is not None
    work = Operator((low.work(whole, 1), *done.forward), (low.work(like_out, 1), *done.backward))
    saved = (*copy.rows, *copy.shared, *kept, *lengths, statistics, rng_state, scale)
    copy.clear()
    kept.clear()
    return Tensor(out.storage, out.shape, dtype, r.node(qkv, saved, backward, work=work)).view(s, b, a * d_v)


def state(shape: CoreShape) -> tuple[Part, ...]:
    """Scales and amaxes of nine tensors forward and six backward, which each layer's attention keeps
    (``DelayedScalingRecipeState``; three products, ``init_fp8_metadata``)."""
    if shape.low is None:
        return ()
    history = shape.low.history if shape.low.recipe == "delayed" else HISTORY
    return tuple(
        part
        for count in (9, 6)
        for part in (Part("scale", (count,), "fp32"), Part("amax_history", (history, count), "fp32"))
    )
