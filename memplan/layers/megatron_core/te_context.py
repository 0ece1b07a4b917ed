"""Context parallelism in Transformer Engine's attention (``dot_product_attention/context_parallel.py``) in 16 bits; its
parts, tensors of one step, exchanges and gradients, are those of attention in 8 bits (``te_low_context``), too
(``NVTE_FP8_DPA_BWD=0``).

Every rank has two chunks of the sequence, the i-th and the i-th from the end. ``p2p`` passes keys and values around
a ring and merges the steps' outputs, ``a2a`` trades the sequence for heads, ``all_gather`` gathers keys and values and
attends twice, with half of its queries each time. What merges and reorders is compiled
(``jit_fuser``) and has no intermediates. Causal only: with a padding mask it refuses. Sliding windows go with
``a2a`` and ``all_gather``, learned sinks with ``a2a`` alone (``attn_forward_func_with_cp``).

Shapes: s sequence on this rank, b micro-batch, a heads, d head size. A value, and the context with it, may have
another one (latent attention; before 2.15 with ``p2p`` alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...plan.errors import PlanError
from ...tape.events import Category
from .. import ops
from ..autograd import Backward, Gradients, Recorder, Shape, Tensor, size_of
from ..work import Exchange, Kernel, Operator, Stream, attention, fused, windowed
from . import te_facts
from .shape import CoreShape

COMMUNICATION, WORKSPACES, TEMPORARIES = Category.COMMUNICATION_BUFFERS, Category.WORKSPACES, Category.TEMPORARIES

Likes = tuple[Shape, Shape, Shape]
"""Of queries, keys and values."""


def sizes(q: Tensor, shape: CoreShape) -> tuple[int, int, int, int]:
    """b, s, a, d of queries that are (s, b, a, d) for cuDNN and (b, s, a, d) for flash attention."""
    first, second, a, d = q.shape
    return (second, first, a, d) if shape.attention == "fused" else (first, second, a, d)


def of_context(q: Tensor, v: Tensor) -> Shape:
    """A head's output has the size of a value."""
    return (*q.shape[:-1], v.shape[-1])


def half(like: Shape) -> Shape:
    """A tensor of half of the sequence; which dimension that is does not matter here."""
    return (like[0], like[1], like[2], like[3] // 2)


def of_heads(like: Shape, shape: CoreShape) -> Shape:
    """After ranks of the inner level have traded the sequence for heads."""
    inner, (first, second, heads, features) = shape.cp_inner, like
    fused = shape.attention == "fused"
    return (
        (first * inner, second, heads // inner, features)
        if fused
        else (first, second * inner, heads // inner, features)
    )


def of_chunks(like: Shape, chunks: int) -> Shape:
    """So many chunks of a sequence, of which a rank has two; which dimension they are does not matter here."""
    return (*like[:3], like[3] * chunks // 2)


def of_keys(like: Shape, keys: int, s: int) -> Shape:
    """So many keys, where ``like`` is of s; which dimension they are does not matter here."""
    features = like[3] * keys
    return (*like[:3], features // s) if features % s == 0 else (keys, prod(like) // s)


def attended(
    r: Recorder, like: Shape, dtype: str, bsad: tuple[int, int, int, int], shape: CoreShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, statistics (b, a, s) and random state of one call of the back end, in its order."""
    b, s, a, _ = bsad
    out = r.empty(like, dtype, "context_of_step")
    if shape.attention == "fused":
        state = r.empty((2,), "int64", "rng_state")
        return out, r.empty((b, a, s, 1), "fp32", "softmax_statistics"), state
    logsumexp = r.empty((b, a, s), "fp32", "softmax_logsumexp_of_step")
    return out, logsumexp, r.empty((2,), "int64", "rng_state")


def gradients_of(
    r: Recorder, likes: Likes, dtype: str, bsad: tuple[int, int, int, int], shape: CoreShape
) -> list[Tensor]:
    """dq, dk and dv of one call of the back end, and what it needs meanwhile."""
    b, s, a, d = bsad
    made = [r.empty(like, dtype, f"grad_{part}_of_step") for part, like in zip("qkv", likes, strict=True)]
    inside = []
    if shape.attention == "flash":
        inside.append(r.empty((b, a, -(-s // 128) * 128), "fp32", "softmax_d"))
    if r.kernel_workspaces:
        grouped = prod(likes[1]) < prod(likes[0]) and shape.spec.kv_heads < shape.spec.heads
        for name, size, kind in te_facts.backward_workspaces(b, s, a, d, shape, grouped=grouped):
            inside.append(r.empty(size, kind, name, WORKSPACES))
    inside.clear()
    return made


def copied(
    r: Recorder, held: list[Tensor], first: Sequence[Shape], keys: Sequence[Shape], last: Sequence[Shape], dtype: str
) -> None:
    """A step's copies take the place of those of the step before: of keys and values both at once, of others each."""
    before = held[:]
    held.clear()
    for one in first:
        held.append(r.empty(one, dtype, "copy_of_step"))
        del before[:1]
    del before[: len(keys)]
    held += [r.empty(one, dtype, "copy_of_step") for one in keys]
    for one in last:
        held.append(r.empty(one, dtype, "copy_of_step"))
        del before[:1]


def gathered_keys(r: Recorder, every: Sequence[Shape], dtype: str) -> list[Tensor]:
    """Keys and values of all ranks, as they arrive, then each in the order of the sequence."""
    whole = [r.empty(one, dtype, "gathered_by_rank", COMMUNICATION) for one in every]
    for at, one in enumerate(every):
        whole[at] = r.empty(one, dtype, "gathered_in_order")
    return whole


def a2a_before(r: Recorder, tensors: list[Tensor], name: str) -> list[Tensor]:
    """``flash_attn_a2a_communicate(before_attn=True)``: split by heads, exchanged, put in order of the sequence."""
    count = len(tensors)
    outputs: list[Tensor] = []
    for at in range(count + 2):
        if 0 < at < count + 1:
            outputs.append(_like(r, tensors[at - 1], f"{name}_received", COMMUNICATION))
        if at > 1:
            outputs[at - 2] = _like(r, outputs[at - 2], f"{name}_ordered")
        if at < count:
            tensors[at] = _like(r, tensors[at], f"{name}_by_heads", COMMUNICATION)
    return outputs


def a2a_after(r: Recorder, given: list[Tensor], name: str) -> list[Tensor]:
    """``flash_attn_a2a_communicate(before_attn=False)``: the way back; ``given`` stays the caller's."""
    tensors, count = list(given), len(given)
    outputs: list[Tensor] = []
    for at in range(count + 2):
        if 0 < at < count + 1:
            outputs.append(_like(r, tensors[at - 1], f"{name}_received", COMMUNICATION))
        if at < count:
            tensors[at] = _like(r, tensors[at], f"{name}_by_chunks", COMMUNICATION)
        if at > 1:
            outputs[at - 2] = _like(r, outputs[at - 2], f"{name}_contiguous")
    return outputs


def _like(r: Recorder, x: Tensor, name: str, category: Category = Category.TEMPORARIES) -> Tensor:
    return r.empty(x.shape, x.dtype, name, category)


# -- gradients in 16 bits ----------------------------------------------------------------------------


def ring_gradients(likes: Likes, bsad: tuple[int, int, int, int], dtype: str, shape: CoreShape) -> Backward:
    """Keys, values and their gradients go round; in two levels the context's gradient is traded first."""
    cp, inner, (like_q, like_k, like_v) = shape.cp // shape.cp_inner, shape.cp_inner, likes
    both = prod(like_k) + prod(like_v)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad_q = r.empty(like_q, dtype, "grad_q")
        pairs = [r.empty((2, both), dtype, "keys_values_and_gradients", COMMUNICATION) for _ in range(2)]
        arrived = gradients[0]
        assert arrived is not None
        grad = a2a_before(r, [arrived], "grad_context") if inner > 1 else []
        for step in range(cp):
            keys, values = (like_k, like_v) if step == cp - 1 else (half(like_k), half(like_v))
            made = gradients_of(r, (like_q, keys, values), dtype, bsad, shape)
            if step < cp - 1:
                made.clear()
        last = pairs[cp % 2].storage
        result = [grad_q, Tensor(last, like_k, dtype), Tensor(last, like_v, dtype)]
        result = a2a_after(r, result, "grad_qkv") if inner > 1 else result
        del made, pairs, grad_q, last, grad, arrived
        return list(result)

    return backward


def sink_shapes(a: int, shape: CoreShape) -> tuple[list[Shape], list[Shape]]:
    """Of a rank's part of a learned sink for each of ``a`` heads, and of all; none where there are none."""
    count = int(shape.spec.attention_sinks)
    return [(1, a // shape.cp, 1, 1)] * count, [(1, a, 1, 1)] * count


def trade_gradients(
    likes: Likes, like_out: Shape, whole: tuple[int, int, int, int], dtype: str, shape: CoreShape
) -> Backward:
    """Of sequences of ``whole`` sizes and fewer heads, between two exchanges."""
    of_rank, of_all = sink_shapes(likes[0][2], shape)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        arrived = gradients[0]
        assert arrived is not None
        grad = a2a_before(r, [arrived.view(*like_out)], "grad_context")
        made = gradients_of(r, likes, dtype, whole, shape)
        of_own = [r.empty(one, "fp32", "grad_sinks_of_rank") for one in of_rank]
        returned = a2a_after(r, made, "grad_qkv")
        made.clear()
        returned += [r.empty(one, "fp32", "grad_sinks") for one in of_all]
        del grad, arrived, of_own
        return list(returned)

    return backward


def gather_gradients(
    likes: Likes,
    every: Sequence[Shape],
    seen: Sequence[Sequence[Shape]],
    like_out: Shape,
    part: tuple[int, int, int, int],
    dtype: str,
    shape: CoreShape,
) -> Backward:
    """Keys and values are gathered again, and gradients of ``every`` one are reduced; steps of ``part`` have ``seen``
    keys and values."""
    copies = copies_steps(part[0], shape)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad_q = r.empty(likes[0], dtype, "grad_q")
        sums = [r.empty(one, dtype, "grad_keys_or_values_of_all") for one in every]
        again = gathered_keys(r, every, dtype)
        made, inside = list[list[Tensor]](), list[Tensor]()
        for at in range(3):
            if at < 2:
                if copies:
                    given = [half(like_out)] * (1 if shape.te < te_facts.ALL_GATHER_KEEPS_WHOLE else 2)
                    copied(r, inside, [half(likes[0])], seen[at], given, dtype)
                made.append(gradients_of(r, (half(likes[0]), seen[at][0], seen[at][1]), dtype, part, shape))
            if at == 2 and copies:
                made.append(made[1][1:])  # which arguments of the last call hold
            if at > 0 and copies:
                made[at - 1][1:] = [r.empty(one, dtype, "grad_by_sequence") for one in seen[at - 1]]
        of_rank = likes[1:]
        steps = [
            ("ordered", every, TEMPORARIES),
            ("reduced", of_rank, COMMUNICATION),
            ("contiguous", of_rank, TEMPORARIES),
        ]
        for name, like, category in steps if copies else steps[:2]:
            for at, size in enumerate(like):
                sums[at] = r.empty(size, dtype, f"grad_keys_or_values_{name}", category)
        inside.clear()  # with the frame
        made.clear()
        again.clear()
        return [grad_q, *sums]

    return backward


def copies_steps(b: int, shape: CoreShape) -> bool:
    """Whether a step copies what lies in another order than the back end's."""
    return shape.attention == "flash" and b > 1


# -- in 16 bits ------------------------------------------------------------------------------------------


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
