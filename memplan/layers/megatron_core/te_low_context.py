"""Context parallelism of attention in 8 bits: Transformer Engine 2.18, ``dot_product_attention/context_parallel.py``.

With delayed scaling and a tensor's own scale queries, keys and values are cast before they travel, in bytes, and with
delayed scaling the context and gradients come back so; MXFP8 casts where it multiplies, and 16 bits travel.

Shapes as in ``te_context``: s sequence on this rank, b micro-batch, a heads, d head size; q, k, v are (s, b, a, d).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..autograd import Gradients, Recorder, Shape, Tensor
from .precision import BYTE, Low
from .shape import CoreShape
from .te_context import a2a_work, gathers, ring, seen_keys, sinks
from .te_context_parts import (
    COMMUNICATION,
    TEMPORARIES,
    a2a_after,
    a2a_before,
    gather_gradients,
    gathered_keys,
    of_heads,
    ring_gradients,
    sink_shapes,
    sizes,
    trade_gradients,
)
from .te_low_attention import EACH, by_sequence, cast, low_of

ONWARD = (True, True, False), (False, False, True)
BACK = EACH, (True, True, False)
"""Whether rows, and columns, of queries, keys and values are wanted (``combine_and_quantize``)."""


def a2a(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndQKVOA2A``: whole sequences of a/cp heads. Saves what attention takes and gives, in the order
    after the exchange, which with MXFP8 are casts of what arrived."""
    low, cp, dtype, (s, b, a, _) = low_of(shape), shape.cp, q.dtype, q.shape
    delayed, by_block = low.recipe == "delayed", low.recipe == "mxfp8"
    likes, like_out = (q.shape, k.shape, v.shape), (*q.shape[:-1], v.shape[-1])
    whole, every, low_backward = (sum(map(prod, likes)),), sinks(r, shape), has_low_backward(shape)
    of_rank, of_all = sink_shapes(a, shape)
    sent = [q, k, v] if by_block else []
    copy = [] if by_block else _joined_cast(r, whole, dtype, low)
    if not by_block:
        sent = [Tensor(copy[0].storage, like, BYTE) for like in likes]
    arrived = a2a_before(r, sent, "qkv")
    sent.clear()
    own = [r.empty(one, "fp32", "sinks_of_rank") for one in of_rank]
    kept = by_sequence(r, [_of_heads(like, cp) for like in likes], "qkv", low) if by_block else [*arrived, *copy[1:]]
    number = [] if by_block else [r.empty((1,), "fp32", "scores_scale_inverse")]
    out = cast(r, like_out, "context", low) if delayed else [r.empty(like_out, dtype, "context_of_heads")]
    rng_state = r.empty((2,), "int64", "rng_state")
    statistics = r.empty((b, a // cp, s * cp, 1), "fp32", "softmax_statistics")
    number.clear()
    wide_out = [r.empty(like_out, dtype, "context_of_heads")] if delayed and not low_backward else []
    arrived_out = a2a_after(r, out[:1], "context")
    out = wide_out or out
    context = r.empty(like_out, dtype, "context") if delayed else arrived_out[0]
    if low_backward:
        arrived_out.clear()
    if not low_backward and not by_block:
        joined = [r.empty(whole, BYTE, "qkv_joined")]
        kept = [r.empty(whole, dtype, "qkv_of_heads")]
        joined.clear()
    elif not low_backward:
        kept = arrived
    scales = [r.empty((1,), "fp32", "scale_cloned") for _ in range(3 * delayed * low_backward)]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        (given, *_) = gradients
        assert given is not None
        grad = [given] if by_block else cast(r, like_out, "grad_context", low)
        there = a2a_before(r, [Tensor(grad[0].storage, like_out, dtype if by_block else BYTE)], "grad_context")
        grad = by_sequence(r, [_of_heads(like_out, cp)], "grad_context", low) if by_block else grad
        made = [r.empty(one, BYTE if delayed else dtype, "grad_of_heads") for one in likes]
        of_own = [r.empty(one, "fp32", "grad_sinks_of_rank") for one in of_rank]
        back = a2a_after(r, made, "grad_qkv")
        if not delayed:
            made.clear()
        of_sinks = [r.empty(one, "fp32", "grad_sinks") for one in of_all]
        del of_own
        if not delayed:
            return [*back, *of_sinks]
        joined = [r.empty(whole, BYTE, "grad_qkv_joined")]
        wide = r.empty(whole, dtype, "grad_qkv_wide")
        joined.clear()
        del there, grad, made, back
        return [*(Tensor(wide.storage, like, dtype) for like in likes), *of_sinks]

    done, copies = a2a_work(q, k, v, shape, 1.0 if by_block else 0.5), 2 if by_block else 1
    work = done.after((low.work(whole, copies),), (low.work(like_out, copies),))
    saved = (*kept, *out, statistics, rng_state, *own, *scales)
    wide = trade_gradients(likes, like_out, (b, s * cp, a // cp, q.shape[-1]), dtype, shape)
    node = r.node((q, k, v, *every), saved, backward if low_backward else wide, work=work)
    return Tensor(context.storage, like_out, dtype, node)


def p2p(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndKVP2P`` on the last rank of the ring (``te_context.p2p``). Outputs of steps are summed in
    fp32, and so are gradients; with delayed scaling bytes of all steps' gradients are exchanged first."""
    low, cp, dtype, given, trades = low_of(shape), shape.cp // shape.cp_inner, q.dtype, (q, k, v), shape.cp_inner > 1
    if trades:
        heads = (of_heads(one.shape, shape) for one in given)
        q, k, v = (one.view(*like) for one, like in zip(a2a_before(r, [q, k, v], "qkv"), heads, strict=True))
    (s, b, a, _), low_backward = q.shape, has_low_backward(shape)
    delayed, by_block = low.recipe == "delayed", low.recipe == "mxfp8"
    likes, like_out, bsad = (q.shape, k.shape, v.shape), (*q.shape[:-1], v.shape[-1]), sizes(q, shape)
    whole, both = (sum(map(prod, likes)),), (prod(k.shape) + prod(v.shape),)
    sent, narrow = dtype if by_block else BYTE, BYTE if delayed else dtype
    copy = [] if by_block else _joined_cast(r, whole, dtype, low)
    done, copies = ring(q, k, v, bsad, shape, 1.0 if by_block else 0.5), 2 if by_block else 1
    if copy:
        del k, v
    amaxes = [r.empty((2, cp), "fp32", "amaxes_of_steps")]
    buffers = [r.empty(both, sent, "keys_and_values", COMMUNICATION)]
    outs, merged, states, statistics = list[list[Tensor]](), list[Tensor](), list[Tensor](), list[Tensor]()
    for step in range(cp + 1):
        if step < cp - 1:
            buffers.append(r.empty(both, sent, "keys_and_values_received", COMMUNICATION))
        if step < cp:
            keys = [one if step == 0 else _half(one) for one in likes[1:]]
            inside = by_sequence(r, [likes[0], *keys], "qkv_of_step", low, *ONWARD) if by_block else []
            outs.append(
                cast(r, like_out, "context_of_step", low) if delayed else [r.empty(like_out, dtype, "context_of_step")]
            )
            states.append(r.empty((2,), "int64", "rng_state"))
            statistics.append(r.empty((b, a, s, 1), "fp32", "softmax_statistics"))
            inside.clear()
        if step > 0:
            outs[step - 1] = [r.empty(like_out, "fp32", "context_of_step_fp32")]
        if step == 1:
            merged.append(r.empty((b, a, s), "fp32", "softmax_logsumexp"))
    summed = [r.empty(like_out, "fp32", "context_fp32")]
    kept = [r.empty(like_out, dtype, "context_kept")]
    if trades:
        summed = a2a_after(r, summed, "context")
    context = r.empty(like_out, dtype, "context")
    if delayed and low_backward:
        kept = cast(r, like_out, "context", low)
    if not low_backward and not by_block:
        copy, buffers = [q], [r.empty(both, dtype, "keys_and_values_wide")]
    scales = [r.empty((1,), "fp32", "scale_cloned") for _ in range(3 * delayed * low_backward)]
    summed.clear()
    amaxes.clear()

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = [] if by_block else cast(r, like_out, "grad_context", low)
        sums = [
            r.empty((cp, *likes[0]), BYTE, "grad_q_of_steps") if delayed else r.empty(likes[0], "fp32", "grad_q_fp32")
        ]
        passed = [r.empty(both, sent, "keys_and_values_received", COMMUNICATION)]
        passed += [
            r.empty((cp, *both), BYTE, f"grad_keys_and_values_{name}", COMMUNICATION) for name in ("sent", "received")
        ]
        sums += [] if delayed else [r.empty(both, "fp32", "grad_keys_and_values_fp32")]
        amaxes = [r.empty((2, cp), "fp32", "amaxes_of_steps")]
        arrived = gradients[0]
        assert arrived is not None
        sent_back = arrived if by_block else Tensor(grad[0].storage, like_out, BYTE)
        there = a2a_before(r, [sent_back], "grad_context") if trades else []
        del sent_back
        made = list[Tensor]()
        for step in range(cp):
            parts = [likes[0], *(one if step == cp - 1 else _half(one) for one in likes[1:])]
            inside = by_sequence(r, parts, "qkv_of_step", low, *BACK) if by_block else []
            inside += by_sequence(r, [like_out], "grad_context", low) if by_block else []
            made.clear()
            made += [r.empty(one, narrow, "grad_of_step") for one in parts]
            inside.clear()
            if not delayed:
                made = [r.empty(one, "fp32", "grad_of_step_fp32") for one in parts]
            if step < cp - 1:
                made.clear()
        held = [made, grad, sums, passed, amaxes, there]
        if delayed:
            result = _summed(r, likes, cp, dtype, [] if trades else held)
            return a2a_after(r, result, "grad_qkv") if trades else result
        if trades:
            keys = sums[1].storage
            wide = a2a_after(r, [sums[0], *(Tensor(keys, one, "fp32") for one in likes[1:])], "grad_qkv")
            del keys
            for ended in held:
                ended.clear()
            for at, one in enumerate(likes):  # by autograd
                wide[at] = r.empty(one, dtype, "grad")
            return wide
        for ended in (made, passed, grad, amaxes):
            ended.clear()
        (of_q, of_keys), result = sums, [r.empty(likes[0], dtype, "grad_q")]
        sums.clear()
        del of_q
        result += [r.empty(one, dtype, "grad_keys_or_values") for one in likes[1:]]
        del of_keys
        return result

    work = done.after((low.work(whole, copies),), (low.work(like_out, copies),))
    saved = ((q,) if by_block else tuple(copy)) + (buffers[-1], *kept, *merged, *states, *scales)
    node = r.node(given, saved, backward if low_backward else ring_gradients(likes, bsad, dtype, shape), work=work)
    return Tensor(context.storage, like_out, dtype, node)


def all_gather(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndKVAllGather`` on the first rank (``te_context.all_gather``). Keys and values are gathered as
    they travel, outputs and gradients of the two steps are put together in 16 bits."""
    low, dtype, (s, b, a, _) = low_of(shape), q.dtype, q.shape
    delayed, by_block = low.recipe == "delayed", low.recipe == "mxfp8"
    likes, like_out = (q.shape, k.shape, v.shape), (*q.shape[:-1], v.shape[-1])
    whole, narrow = (sum(map(prod, likes)),), BYTE if delayed else dtype
    every = [(shape.cp * first, *rest) for first, *rest in likes[1:]]
    seen = [[(keys, *one[1:]) for one in every] for keys in seen_keys(s, shape)]
    lengths = r.empty((b + 1,), "int32", "cu_seqlens_of_chunk")
    copy = [] if by_block else _joined_cast(r, whole, dtype, low)
    gathered = gathered_keys(r, every, dtype if by_block else BYTE)
    out, unused = r.empty(like_out, dtype, "context"), [r.empty(like_out, dtype, "context_of_thd")]
    inside, outs, kept = list[Tensor](), list[Tensor](), list[Tensor]()
    for keys in seen:
        inside.clear()
        parts = [_half(likes[0]), *keys]
        inside += by_sequence(r, parts, "qkv_of_step", low, *ONWARD) if by_block else []
        step = (
            cast(r, _half(like_out), "context_of_step", low)
            if delayed
            else [r.empty(_half(like_out), dtype, "context_of_step")]
        )
        state = r.empty((2,), "int64", "rng_state")
        kept += [r.empty((b, a, s // 2, 1), "fp32", "softmax_statistics"), state]
        if delayed:
            step = [r.empty(_half(like_out), dtype, "context_of_step")]
        outs += step
        del step, state
    low_backward = has_low_backward(shape)
    saved = [q, k, v] if by_block or not low_backward else copy
    result = cast(r, like_out, "context", low) if delayed and low_backward else [out]
    scales = [r.empty((1,), "fp32", "scale_cloned") for _ in range(3 * delayed * low_backward)]
    for ended in (inside, outs, unused, gathered):
        ended.clear()

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = [] if by_block else cast(r, like_out, "grad_context", low)
        grad_q = r.empty(likes[0], dtype, "grad_q")
        sums = [r.empty(one, dtype, "grad_keys_or_values_of_all") for one in every]
        again = gathered_keys(r, every, dtype if by_block else BYTE)
        made, inside = list[Tensor](), list[Tensor]()
        for keys in seen:
            parts = [_half(likes[0]), *keys]
            inside.clear()
            inside += by_sequence(r, parts, "qkv_of_step", low, *BACK) if by_block else []
            inside += by_sequence(r, [_half(like_out)], "grad_context", low) if by_block else []
            step = [r.empty(one, narrow, "grad_of_step") for one in parts]
            if delayed:
                step = [r.empty(one, dtype, "grad_of_step") for one in parts]
            made += step
            del step
        for name, like, category in (("ordered", every, TEMPORARIES), ("reduced", likes[1:], COMMUNICATION)):
            for at, size in enumerate(like):
                sums[at] = r.empty(size, dtype, f"grad_keys_or_values_{name}", category)
        for ended in (inside, made, again, grad):
            ended.clear()
        return [grad_q, *sums]

    done, copies = gathers(q, k, v, shape, 1.0 if by_block else 0.5), 2 if by_block else 1
    work = done.after((low.work(whole, copies),), (low.work(like_out, copies),))
    wide = gather_gradients(likes, every, seen, like_out, (b, s // 2, a, q.shape[-1]), dtype, shape)
    kept += [*saved, *result, lengths, *scales]
    node = r.node((q, k, v), kept, backward if low_backward else wide, work=work)
    return Tensor(out.storage, like_out, dtype, node)


def _summed(r: Recorder, likes: Sequence[Shape], cp: int, dtype: str, held: Sequence[list[Tensor]]) -> list[Tensor]:
    """Bytes of all steps in one tensor, in fp32, and their sums."""
    apart = [r.empty((cp, *like), BYTE, "grad_keys_or_values_of_steps") for like in likes[1:]]
    joined = [r.empty((cp * sum(map(prod, likes)),), BYTE, "grad_qkv_joined")]
    apart.clear()
    wide = [r.empty(joined[0].shape, "fp32", "grad_qkv_wide")]
    joined.clear()
    result = list[Tensor]()
    for like in likes:
        total = [r.empty(like, "fp32", "grad_summed")]
        result.append(r.empty(like, dtype, "grad"))
        total.clear()
    wide.clear()
    for one in held:
        one.clear()
    return result


def _joined_cast(r: Recorder, whole: Shape, dtype: str, low: Low) -> list[Tensor]:
    joined = [r.empty(whole, dtype, "qkv_joined")]
    copy = cast(r, whole, "qkv", low)
    joined.clear()
    return copy


def has_low_backward(shape: CoreShape) -> bool:
    """Gradients are computed in 8 bits, too (``NVTE_FP8_DPA_BWD``)."""
    return shape.low_attention is None or shape.low_attention.backward


def _of_heads(like: Shape, cp: int) -> Shape:
    s, b, a, d = like
    return s * cp, b, a // cp, d


def _half(like: Shape) -> Shape:
    return like[0] // 2, *like[1:]


WAYS = {"a2a": a2a, "p2p": p2p, "all_gather": all_gather}
