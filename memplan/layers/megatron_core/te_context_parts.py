"""What ways of context parallelism in Transformer Engine's attention share (``te_context``, ``te_low_context``):
tensors of one step, exchanges, and gradients in 16 bits, which attention in 8 bits may have, too
(``NVTE_FP8_DPA_BWD=0``).

Shapes: s sequence on this rank, b micro-batch, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...tape.events import Category
from ..autograd import Backward, Gradients, Recorder, Shape, Tensor
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
