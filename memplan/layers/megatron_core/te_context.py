"""Context parallelism in Transformer Engine's attention (``dot_product_attention/context_parallel.py``).

Every rank has two chunks of the sequence, the i-th and the i-th from the end. ``p2p`` passes keys and values around
a ring and merges the steps' outputs, ``a2a`` trades the sequence for heads, ``all_gather`` gathers keys and values and
attends twice, with half of its queries each time. What merges and reorders is compiled
(``jit_fuser``) and has no intermediates. Causal only: with a padding mask it refuses. Sliding windows go with
``a2a`` and ``all_gather``, learned sinks with ``a2a`` alone (``attn_forward_func_with_cp``).

Shapes: s sequence on this rank, b micro-batch, a heads, d head size. A value, and the context with it, may have
another one (latent attention; before 2.15 with ``p2p`` alone).
"""

from __future__ import annotations

from math import prod

from ...plan.errors import PlanError
from .. import ops
from ..autograd import Recorder, Tensor, size_of
from ..work import Exchange, Kernel, Operator, Stream, attention, fused, windowed
from . import te_facts
from .shape import CoreShape
from .te_context_parts import (
    COMMUNICATION,
    a2a_after,
    a2a_before,
    attended,
    copied,
    copies_steps,
    gather_gradients,
    gathered_keys,
    half,
    of_chunks,
    of_context,
    of_heads,
    of_keys,
    ring_gradients,
    sink_shapes,
    sizes,
    trade_gradients,
)

SINKS = "self_attention.core_attention.softmax_offset"


def p2p(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndKVP2P`` on the last rank of the ring, whose queries see every other rank's first chunk; in two
    levels (``a2a+p2p``) of ranks that have traded the sequence for heads.

    Other ranks hold less: a step whose keys come from a later rank has half of the queries. Saves the
    queries, the keys and values that arrived last, the output, one log-sum-exp and each step's random state.
    """
    cp, inner, dtype, given = shape.cp // shape.cp_inner, shape.cp_inner, q.dtype, (q, k, v)
    if inner > 1:
        heads = (of_heads(one.shape, shape) for one in given)
        q, k, v = (one.view(*like) for one, like in zip(a2a_before(r, [q, k, v], "qkv"), heads, strict=True))
    b, s, a, d = sizes(q, shape)
    likes, like_out = (q.shape, k.shape, v.shape), of_context(q, v)
    both = (prod(likes[1]) + prod(likes[2]),)
    buffers = [r.empty(both, dtype, "keys_and_values", COMMUNICATION)]
    outs: list[Tensor] = []
    statistics: list[Tensor] = []
    states: list[Tensor] = []
    merged: list[Tensor] = []
    for step in range(cp):
        if step < cp - 1:
            buffers.append(r.empty(both, dtype, "keys_and_values_received", COMMUNICATION))
        out, logsumexp, state = attended(r, like_out, dtype, (b, s, a, d), shape)
        outs.append(out)
        statistics.append(logsumexp)
        states.append(state)
        del out, logsumexp, state
        if step == 1:
            merged.append(r.empty((b, a, s), "fp32", "softmax_logsumexp"))
    context = r.empty(like_out, dtype, "context")
    result = a2a_after(r, [context], "context")[0] if inner > 1 else context
    done, backward = ring(q, k, v, (b, s, a, d), shape), ring_gradients(likes, (b, s, a, d), dtype, shape)
    node = r.node(given, (q, buffers[-1], context, *merged, *states), backward, work=done)
    return Tensor(result.storage, result.shape, dtype, node)


def ring(
    q: Tensor, k: Tensor, v: Tensor, bsad: tuple[int, int, int, int], shape: CoreShape, size: float = 1.0
) -> Operator:
    """A step for each rank, of equal work since every one has an early and a late chunk; keys and values, of elements
    of ``size`` times the dtype's, go on to the next rank meanwhile, in backward with their gradients. Outputs are
    merged step by step (``flash_attn_fwd_out_correction``: two are read, one is written), and so are gradients."""
    (b, s, a, d), cp, dtype, inner = bsad, shape.cp // shape.cp_inner, q.dtype, shape.cp_inner
    groups, context = prod(k.shape) // (b * s * d), size_of(of_context(q, v), dtype)
    keys, queries = size_of(k.shape, dtype) + size_of(v.shape, dtype), size_of(q.shape, dtype)
    forward, backward = fused((b, s, a, d), groups, s, dtype, causal=True, values=v.shape[-1])
    sends = cp - 1
    moved = queries + keys + context
    trades: list[Kernel] = [Exchange("all-to-all", moved, "cp", among=inner), Stream(4 * moved, 8)] if inner > 1 else []
    return Operator(
        [
            *trades,
            *[forward] * cp,
            Exchange("send", size * keys, "cp", forward, sends),
            Stream(sends * 3.0 * context, 2 * sends),
        ],
        [
            *trades,
            *[backward] * cp,
            Exchange("send", 2 * size * keys, "cp", backward, sends),
            Stream(sends * 3.0 * (queries + keys), 3 * sends),
        ],
    )


def a2a(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndQKVOA2A``: whole sequences of a/cp heads. Saves what attention takes and gives."""
    cp, dtype, (b, s, a, d) = shape.cp, q.dtype, sizes(q, shape)
    whole = (b, s * cp, a // cp, d)
    likes = (q.shape, k.shape, v.shape)
    every = sinks(r, shape)
    inside = a2a_before(r, [q, k, v], "qkv")
    own = [r.empty(one, "fp32", "sinks_of_rank") for one in sink_shapes(a, shape)[0]]
    out, logsumexp, state = attended(r, of_context(q, v), dtype, whole, shape)
    context = a2a_after(r, [out], "context")[0]

    saved, backward = (*inside, out, logsumexp, state, *own), trade_gradients(likes, out.shape, whole, dtype, shape)
    context.node = r.node((q, k, v, *every), saved, backward, work=a2a_work(q, k, v, shape))
    return context


def sinks(r: Recorder, shape: CoreShape) -> list[Tensor]:
    """``softmax_offset.reshape(1, -1, 1, 1).to(torch.float32)``, for each of the rank's heads, where there are any."""
    if not shape.spec.attention_sinks:
        return []
    a = shape.spec.heads // shape.t
    return [ops.cast(r, r.parameter(SINKS, (a,), shape.dtype).view(1, a, 1, 1), "fp32", "sinks_fp32")]


def in_window(s: int, shape: CoreShape) -> float | None:
    """Part of the scores of s whole tokens that a sliding window leaves; of layers every second of which has one the
    mean."""
    spec = shape.spec
    if spec.sliding_window is None or not spec.causal:
        return None
    return windowed(s, spec.sliding_window, alternating=spec.alternating_windows)


def a2a_work(q: Tensor, k: Tensor, v: Tensor, shape: CoreShape, size: float = 1.0) -> Operator:
    """Attention of whole sequences and fewer heads between two exchanges, of elements of ``size`` times the dtype's."""
    cp, dtype, (b, s, a, d) = shape.cp, q.dtype, sizes(q, shape)
    whole = (b, s * cp, a // cp, d)
    groups, part = max(1, k.shape[2] // cp), in_window(s * cp, shape)
    done = attention(whole, groups, s * cp, dtype, causal=True, values=v.shape[-1], part=part)
    moved = size * sum(size_of(one, dtype) for one in (q.shape, k.shape, v.shape, of_context(q, v)))
    ways, copies = Exchange("all-to-all", moved, "cp"), Stream(4 * moved, 8)  # by heads, and in order again
    return done.then((ways, copies), (ways, copies))


def all_gather(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``AttnFuncWithCPAndKVAllGather`` on the rank whose two steps ``seen_keys`` counts. Saves
    queries, its own keys and values, statistics, and up to 2.14 the steps' outputs beside the whole one, which from
    then on is saved itself. Keys and values are gathered again in backward.
    """
    dtype, (b, s, a, d) = q.dtype, sizes(q, shape)
    likes, like_out, part = (q.shape, k.shape, v.shape), of_context(q, v), (b, s // 2, a, d)
    copies = copies_steps(b, shape)
    every = [of_chunks(one, 2 * shape.cp) for one in likes[1:]]
    seen = [[of_keys(one, keys, s) for one in likes[1:]] for keys in seen_keys(s, shape)]
    lengths = [r.empty((b + 1,), "int32", "cu_seqlens_of_chunk")] if shape.attention == "fused" else []
    own = [r.empty(one.shape, one.dtype, "keys_or_values_by_sequence") if copies else one for one in (k, v)]
    whole = gathered_keys(r, every, dtype)
    out = r.empty(like_out, dtype, "context")
    unused = [r.empty(like_out, dtype, "context_of_thd")] if shape.te >= te_facts.ALL_GATHER_MAKES_TWO else []
    outs, kept, inside = list[Tensor](), list[Tensor](), list[Tensor]()
    for keys in seen:
        if copies:
            copied(r, inside, [half(likes[0])], keys, [], dtype)
        step, logsumexp, state = attended(r, half(like_out), dtype, part, shape)
        outs.append(step)
        kept += [logsumexp, state]
        del step, logsumexp, state
    if shape.te >= te_facts.ALL_GATHER_KEEPS_WHOLE:
        outs = [out]
    inside.clear()
    whole.clear()
    unused.clear()

    backward = gather_gradients(likes, every, seen, like_out, part, dtype, shape)
    out.node = r.node((q, k, v), (q, *own, *outs, *kept, *lengths), backward, work=gathers(q, k, v, shape))
    return out


def seen_keys(s: int, shape: CoreShape) -> tuple[int, int]:
    """Keys that the two steps of a rank with s tokens see (``get_kv_seq_info_after_all_gather``): of the first rank one
    chunk and all, and of other ranks as many together; with a window a chunk and the window before it, of which the
    last rank has most."""
    cp, chunk, window = shape.cp, s // 2, shape.spec.sliding_window
    if window is None:
        return chunk, 2 * cp * chunk
    before = window - 1
    return chunk + min(before, (cp - 1) * chunk), chunk + min(before, cp * chunk)


def gathers(q: Tensor, k: Tensor, v: Tensor, shape: CoreShape, size: float = 1.0) -> Operator:
    """Attention to keys of all ranks, of elements of ``size`` times the dtype's while they travel."""
    dtype, (b, s, a, d) = q.dtype, sizes(q, shape)
    groups = prod(k.shape) // (b * s * d)
    every, part = s * shape.cp, in_window(s * shape.cp, shape)
    done = attention((b, s, a, d), groups, every, dtype, causal=True, values=v.shape[-1], part=part)
    moved = float(shape.cp * (size_of(k.shape, dtype) + size_of(v.shape, dtype)))
    gathers, ordered = Exchange("all-gather", size * moved, "cp"), Stream(2 * moved, 2)
    scattered = Exchange("reduce-scatter", moved, "cp")
    return done.then((gathers, ordered), (gathers, scattered, ordered))


def core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """The context (s, b, a d) from q, k, v in the layout of the back end, contiguous."""
    ways = {"p2p": p2p, "a2a": a2a, "all_gather": all_gather}
    if not shape.spec.causal or shape.cp_communication not in ways:
        raise PlanError(
            "megatron.cp_communication",
            shape.cp_communication,
            "context parallelism is covered for causal attention with p2p, a2a or all_gather",
        )
    if shape.te < te_facts.OLDEST_CONTEXT_PARALLEL:
        raise PlanError(
            "megatron.transformer_engine",
            f"{shape.te[0]}.{shape.te[1]}",
            "context parallelism is covered from Transformer Engine 2.8",
        )
    if shape.cp_inner > 1 and shape.te < te_facts.OLDEST_TWO_LEVELS:
        raise PlanError("megatron.cp_inner", shape.cp_inner, "must be 1 before Transformer Engine 2.15, as in p2p")
    apart = q.shape[-1] != v.shape[-1]
    if apart and shape.cp_communication != "p2p" and shape.te < te_facts.CONTEXT_PARALLEL_TAKES_VALUES:
        raise PlanError(
            "megatron.cp_communication",
            shape.cp_communication,
            "must be p2p with latent attention before Transformer Engine 2.15",
        )
    s, b, n = shape.s, shape.b, shape.spec.attention_features // shape.t
    context = ways[shape.cp_communication](r, q, k, v, shape)
    if shape.attention == "fused" or b == 1:
        return context.view(s, b, n)
    if shape.te < te_facts.CONTEXT_PARALLEL_OUTPUT_IN_4D:
        context = ops.copied_gradient(r, context, "context")
    return ops.contiguous(r, context, (s, b, n), "context_contiguous")
