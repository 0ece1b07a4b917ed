"""Context parallelism of attention in 8 bits: Transformer Engine 2.18, ``dot_product_attention/context_parallel.py``.

With delayed scaling and a tensor's own scale queries, keys and values are cast before they travel, in bytes, and with
delayed scaling the context and gradients come back so; MXFP8 casts where it multiplies, and 16 bits travel.

Shapes as in ``te_context``: s sequence on this rank, b micro-batch, a heads, d head size; q, k, v are (s, b, a, d).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..autograd import Gradients, Recorder, Shape, Tensor
from ..work import Operator
from .precision import BYTE, Low
from .shape import CoreShape
from .te_context import a2a_after, a2a_before, a2a_work
from .te_low_attention import by_sequence, cast, low_of

Three = tuple[Tensor, Tensor, Tensor]


def a2a(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndQKVOA2A``: whole sequences of a/cp heads. Saves what attention takes and gives, in the order
    after the exchange, which with MXFP8 are casts of what arrived."""
    low, cp, dtype, (s, b, a, _) = low_of(shape), shape.cp, q.dtype, q.shape
    delayed, by_block = low.recipe == "delayed", low.recipe == "mxfp8"
    likes, like_out = (q.shape, k.shape, v.shape), (*q.shape[:-1], v.shape[-1])
    whole = (sum(map(prod, likes)),)
    sent = [q, k, v] if by_block else []
    copy = [] if by_block else _joined_cast(r, whole, dtype, low)
    if not by_block:
        sent = [Tensor(copy[0].storage, like, BYTE) for like in likes]
    arrived = a2a_before(r, sent, "qkv")
    sent.clear()
    kept = by_sequence(r, [_of_heads(like, cp) for like in likes], "qkv", low) if by_block else [*arrived, *copy[1:]]
    number = [] if by_block else [r.empty((1,), "fp32", "scores_scale_inverse")]
    out = cast(r, like_out, "context", low) if delayed else [r.empty(like_out, dtype, "context_of_heads")]
    rng_state = r.empty((2,), "int64", "rng_state")
    statistics = r.empty((b, a // cp, s * cp, 1), "fp32", "softmax_statistics")
    number.clear()
    context = a2a_after(r, out[:1], "context")[0]
    if delayed:
        context = r.empty(like_out, dtype, "context")
    scales = [r.empty((1,), "fp32", "scale_cloned") for _ in range(3 * delayed)]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        (given, *_) = gradients
        assert given is not None
        grad = [given] if by_block else cast(r, like_out, "grad_context", low)
        there = a2a_before(r, [Tensor(grad[0].storage, like_out, dtype if by_block else BYTE)], "grad_context")
        grad = by_sequence(r, [_of_heads(like_out, cp)], "grad_context", low) if by_block else grad
        made = [r.empty(one, BYTE if delayed else dtype, "grad_of_heads") for one in likes]
        back = a2a_after(r, made, "grad_qkv")
        if not delayed:
            return list(back)
        joined = [r.empty(whole, BYTE, "grad_qkv_joined")]
        wide = r.empty(whole, dtype, "grad_qkv_wide")
        joined.clear()
        del there, grad, made, back
        return [Tensor(wide.storage, like, dtype) for like in likes]

    done, copies = a2a_work(q, k, v, shape, 1.0 if by_block else 0.5), 2 if by_block else 1
    assert done.forward is not None
    assert done.backward is not None
    work = Operator((low.work(whole, copies), *done.forward), (low.work(like_out, copies), *done.backward))
    saved = (*kept, *out, statistics, rng_state, *scales)
    node = r.node((q, k, v), saved, backward, work=work)
    return Tensor(context.storage, like_out, dtype, node)


def _joined_cast(r: Recorder, whole: Shape, dtype: str, low: Low) -> list[Tensor]:
    joined = [r.empty(whole, dtype, "qkv_joined")]
    copy = cast(r, whole, "qkv", low)
    joined.clear()
    return copy


def _of_heads(like: Shape, cp: int) -> Shape:
    s, b, a, d = like
    return s * cp, b, a // cp, d
