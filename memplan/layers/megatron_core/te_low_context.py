"""Context parallelism of attention in 8 bits: Transformer Engine 2.18, ``dot_product_attention/context_parallel.py``.

With delayed scaling and a tensor's own scale queries, keys and values are cast before they travel, in bytes, and with
delayed scaling the context and gradients come back so; MXFP8 casts where it multiplies, and 16 bits travel.

Shapes as in ``te_context``: s sequence on this rank, b micro-batch, a heads, d head size; q, k, v are (s, b, a, d).

cuDNN's attention in 8 bits (``fp8_dot_product_attention``): delayed scaling, a tensor's own scale, or MXFP8.

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
from .te_context import (
    COMMUNICATION,
    TEMPORARIES,
    a2a_after,
    a2a_before,
    a2a_work,
    gather_gradients,
    gathered_keys,
    gathers,
    of_heads,
    ring,
    ring_gradients,
    seen_keys,
    sink_shapes,
    sinks,
    sizes,
    trade_gradients,
)

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


# -- te low context ------------------------------------------------------------------------------------


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
        wide = r.in_turn((whole, BYTE, "grad_qkv_joined"), (whole, dtype, "grad_qkv_wide"))
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
        result.append(r.in_turn((like, "fp32", "grad_summed"), (like, dtype, "grad")))
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
