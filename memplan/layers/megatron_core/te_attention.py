"""Transformer Engine's ``DotProductAttention`` under Megatron-Core's ``TEDotProductAttention``.

``transformer_engine/pytorch/attention/dot_product_attention``: ``dot_product_attention.py`` (forward), ``utils.py``
(layouts, masks, choice of the back end), ``backends.py``; ``csrc/extensions/attention.cpp`` and
``softmax.cpp``; flash-attn 2 ``flash_attn_interface.py`` and ``csrc/flash_attn/flash_api.cpp``; cuDNN
front end ``node/scaled_dot_product_flash_attention.h``. Unfused: matrix products and a fused scale-mask-softmax on
(b, a, s, s).

Queries, keys and values come as (s, b, a, d), packed (strided views of one projection) or not; the context goes
out as (s, b, a d). Shapes: s sequence, b micro-batch, a heads on this rank, g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...plan.errors import PlanError
from ...tape.events import Category
from .. import ops, work
from ..autograd import Backward, Gradients, Recorder, Shape, Tensor, size_of
from ..gradients import fresh
from . import local, te_context, te_facts, te_low_context
from .ends import DOCUMENTS
from .shape import CoreAttention, CoreShape, Version

WORKSPACES = Category.WORKSPACES

Three = tuple[Tensor, Tensor, Tensor]


def core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """The context (s, b, a d) by the back end that ``shape.attention`` names."""
    q, k, v = arranged(r, q, k, v)
    if shape.attention == "flash" and v.shape[-1] < q.shape[-1]:
        narrow = v.shape[-1]
        v = _padded(r, v, q.shape[-1])
        return _without_padding(r, _attended(r, q, k, v, shape).view(*q.shape), narrow)
    return _attended(r, q, k, v, shape)


def _padded(r: Recorder, v: Tensor, d: int) -> Tensor:
    """``_pad_qkv_head_dim``: flash attention 2 takes one head size, so that values get zeros up to that of keys."""
    size = (*v.shape[:-1], d)
    done = work.Operator(*2 * ((work.Stream(size_of(size, v.dtype) + size_of(v.shape, v.dtype)),),))
    return r.empty(size, v.dtype, "value_padded").by(r.node((v,), (), fresh(v, "grad_value"), work=done))


def _without_padding(r: Recorder, context: Tensor, d: int) -> Tensor:
    """``_trim_output``: a copy of the first ``d`` features of each head."""
    s, b, a, _ = context.shape
    return ops.contiguous(r, ops.slice_last(r, context, d, "context"), (s, b, a * d), "context_trimmed")


def _attended(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """The context with as many features of a head as ``v`` has."""
    if shape.packed:
        r.saved_outside.add(DOCUMENTS)
    if shape.cp > 1 and shape.attention != "unfused":
        return _context_parallel(r, q, k, v, shape)
    tokens = (q.shape[0], k.shape[0])
    lengths = [] if shape.spec.causal else [sequence_lengths(r, shape.b, each) for each in tokens]
    if shape.attention == "unfused":
        if shape.cp > 1:
            raise PlanError(
                "megatron.attention_backend", shape.attention, "unfused attention has no context parallelism"
            )
        return unfused(r, q, k, v, shape)
    if shape.attention == "fused":
        if shape.low_attention is not None and shape.low is not None:
            sinks = te_context.sinks(r, shape)
            wide = _gradients(q, k, v, shape)
            return te_low_context.fused(r, (q, k, v), lengths, sinks, shape, _work(shape, q, k, v), wide)
        return fused(r, q, k, v, lengths, shape)
    assert not lengths  # ``from_plan`` refuses flash attention behind a padding mask
    return flash(r, q, k, v, shape)


def _context_parallel(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """Each of the three contiguous, for cuDNN (s, b, a, d) and for flash attention (b, s, a, d)."""
    if shape.attention == "flash":
        q, k, v = batch_first(r, q, k, v)
    else:
        q, k, v = _copied(r, q, "query"), _copied(r, k, "key"), _copied(r, v, "value")
    if shape.low_attention is not None and shape.low is not None:
        n = shape.spec.attention_features // shape.t
        return te_low_context.WAYS[shape.cp_communication](r, q, k, v, shape).view(shape.s, shape.b, n)
    return te_context.core_attention(r, q, k, v, shape)


def backend(
    asked: Literal["auto", "flash", "fused", "unfused"],
    *,
    te: Version,
    capability: te_facts.Capability,
    dtype: str,
    head_dim: int,
    dropout: float,
    deterministic: bool,
    value_dim: int = 0,
    sinks: bool = False,
    flash_installed: bool = True,
    cudnn: tuple[int, int, int] = (9, 20, 0),
) -> CoreAttention:
    """The back end that ``get_attention_backend`` takes (``dot_product_attention/utils.py``).

    ``--attention-backend`` allows one or all (``LanguageModule._set_attention_backend``). Of those that are
    possible cuDNN's comes first since Hopper, flash attention before; the unfused one is last.
    """
    fused_works = te_facts.fused_is_possible(
        te,
        capability,
        dtype=dtype,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        dropout=dropout,
        deterministic=deterministic,
        cudnn=cudnn,
    )
    fused_works = fused_works and not (sinks and deterministic)
    flash_works = (
        flash_installed
        and not sinks
        and (value_dim in (0, head_dim) or te >= te_facts.OLDEST_PADDED_VALUES)
        and te_facts.flash_is_possible(capability, dtype=dtype, head_dim=head_dim)
    )
    possible: dict[CoreAttention, bool] = {"fused": fused_works, "flash": flash_works, "unfused": True}
    in_order: list[CoreAttention] = ["fused", "flash"] if capability >= (9, 0) else ["flash", "fused"]
    for one in (*in_order, "unfused"):
        if possible[one] and asked in ("auto", one):
            return one
    raise PlanError(
        "megatron.attention_backend",
        asked,
        f"is not possible in Transformer Engine {te[0]}.{te[1]} on this GPU with these sizes and determinism",
    )


# -- layouts ----------------------------------------------------------------------------------------


def is_strided(x: Tensor) -> bool:
    """``x`` is a part of its storage, and so not contiguous."""
    return x.storage.bytes > size_of(x.shape, x.dtype) + 511


def is_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Layout ``sbh3d``: each head's query, key and value are neighbours in one tensor."""
    return q.storage is k.storage is v.storage and q.shape == k.shape == v.shape


def arranged(r: Recorder, q: Tensor, k: Tensor, v: Tensor) -> Three:
    """``get_qkv_layout``: the three as they are if packed or all contiguous, else contiguous copies of strided ones."""
    if is_packed(q, k, v):
        return q, k, v
    return _copied(r, q, "query"), _copied(r, k, "key"), _copied(r, v, "value")


def _copied(r: Recorder, x: Tensor, name: str) -> Tensor:
    return ops.contiguous(r, x, x.shape, f"{name}_contiguous") if is_strided(x) else x


def sequence_lengths(r: Recorder, b: int, s: int) -> Tensor:
    """``get_cu_seqlens``: b + 1 int32 from a padding mask (b, 1, 1, s)."""
    lengths = r.in_turn(((b, s), "bool", "mask_not"), ((b,), "int64", "sequence_lengths"))
    cast = r.in_turn(((b,), "int64", "sequence_lengths_cumulative"), ((b,), "int32", "sequence_lengths_int32"))
    zero = r.empty((1,), "int32", "zero")
    cumulative = r.empty((b + 1,), "int32", "cu_seqlens")
    del cast, lengths, zero
    return cumulative


# -- flash attention 2 ------------------------------------------------------------------------------


def flash(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``FlashAttention.forward``: takes (b, s, a, d), so that with b > 1 inputs and output are copied."""
    s, b, a, d = q.shape
    if shape.packed:  # tokens, heads, features: as they come
        q, k, v = (x.view(x.shape[1], x.shape[0], *x.shape[2:]) for x in (q, k, v))
    else:
        q, k, v = batch_first(r, q, k, v)
    out = flash_function(r, q, k, v, shape)
    if b == 1:
        return out.view(s, b, a * d)
    return ops.contiguous(r, out, (s, b, a * d), "context_contiguous")


def batch_first(r: Recorder, q: Tensor, k: Tensor, v: Tensor) -> Three:
    """(b, s, a, d): one kernel into one tensor (``_PrepareQKVForFA``), or a copy of each."""
    s, b, _, d = q.shape
    if is_packed(q, k, v) and d == 128 and s * b >= 512:
        return _prepared(r, q, k, v)
    q, k, v = _transposed(r, q, "query"), _transposed(r, k, "key"), _transposed(r, v, "value")
    return q, k, v


def _transposed(r: Recorder, x: Tensor, name: str) -> Tensor:
    s, b, a, d = x.shape
    if b == 1 and not is_strided(x):
        return x.view(b, s, a, d)
    return ops.contiguous(r, x, (b, s, a, d), f"{name}_batch_first")


def _prepared(r: Recorder, q: Tensor, k: Tensor, v: Tensor) -> Three:
    """``fa_prepare_fwd``: (3, b, s, a, d) from packed inputs; ``fa_prepare_bwd``: one packed gradient."""
    s, b, a, d = q.shape
    dtype = q.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        packed = r.empty((s, b, a, 3 * d), dtype, "grad_qkv_packed")
        return [packed.view(s, b, a, d) for _ in range(3)]

    out = r.empty((3, b, s, a, d), dtype, "qkv_batch_first")
    size = 3 * size_of(q.shape, dtype)
    node = r.node((q, k, v), (), backward, outputs=3, work=work.Operator(None, (work.Stream(2 * size),)))
    first, second, third = (Tensor(out.storage, (b, s, a, d), dtype, node, slot) for slot in range(3))
    return first, second, third


def flash_function(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``FlashAttnFunc`` on (b, s, a, d): saves its inputs, output, log-sum-exp (b, a, s) and, of release 2, random
    state."""
    b, s, a, d = q.shape
    dtype, likes = q.dtype, (q.shape, k.shape, v.shape)
    grouped = k.shape[2] < a
    out = r.empty(q.shape, dtype, "context")
    logsumexp = r.empty((b, a, s), "fp32", "softmax_logsumexp")
    second = shape.flash.number == te_facts.SECOND
    states = [r.empty((2,), "int64", "rng_state")] if second else []
    workspaces = te_facts.backward_workspaces(b, s, a, d, shape, grouped=grouped)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(like, dtype, f"grad_{part}") for part, like in zip("qkv", likes, strict=True)]
        inside = [r.empty((b, a, te_facts.flash_rows(s, shape)), "fp32", "softmax_d")] if second else []
        if r.kernel_workspaces:
            inside += [r.empty(size, kind, name, WORKSPACES) for name, size, kind in workspaces]
        inside.clear()
        return made

    done = _work(shape, q, k, v)
    out.node = r.node((q, k, v), (q, k, v, out, logsumexp, *states), backward, work=done)
    return out


def _work(shape: CoreShape, q: Tensor, k: Tensor, v: Tensor) -> work.Operator:
    """Of packed sequences the longest documents are taken, whole sequences."""
    a, d = q.shape[-2:]
    b, s = (
        (shape.packed, shape.attended[1])
        if shape.packed
        else (shape.b, q.shape[0 if shape.attention == "fused" else 1])
    )
    causal, part = shape.spec.causal, te_context.in_window(s, shape)
    return work.attention((b, s, a, d), k.shape[2], s, q.dtype, causal=causal, values=v.shape[-1], part=part)


# -- cuDNN ------------------------------------------------------------------------------------------


def fused(r: Recorder, q: Tensor, k: Tensor, v: Tensor, lengths: list[Tensor], shape: CoreShape) -> Tensor:
    """``FusedAttnFunc`` on (s, b, a, d): saves inputs, output, softmax statistics (b, a, s, 1) and random state.

    The gradients are three tensors, or one packed like the inputs.
    """
    (s, b, a, _), dtype, d_v = q.shape, q.dtype, v.shape[-1]
    sinks = te_context.sinks(r, shape)
    out = r.empty((s, b, a, d_v), dtype, "context")
    rng_state = r.empty((2,), "int64", "rng_state")
    statistics = r.empty((b, a, s, 1), "fp32", "softmax_statistics")
    largest = [r.empty((b, a, s, 1), "fp32", "softmax_largest")] if shape.largest_logit else []
    saved = (q, k, v, out, *lengths, statistics, rng_state, *sinks)
    out.node = r.node((q, k, v, *sinks), saved, _gradients(q, k, v, shape), work=_work(shape, q, k, v))
    largest.clear()  # of which a number of each head stays until the step, 512 B that are not counted
    return out.view(s, b, a * d_v)


def _gradients(q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Backward:
    """Its backward, in 16 bits."""
    (s, b, a, d), dtype, packed = q.shape, q.dtype, is_packed(q, k, v)
    likes, has_sinks = (q.shape, k.shape, v.shape), shape.spec.attention_sinks
    workspaces = te_facts.backward_workspaces(b, s, a, d, shape, grouped=False)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        if packed:
            whole = r.empty((s, b, a, 3, d), dtype, "grad_qkv_packed")
            made = [whole.view(*like) for like in likes]
            del whole
        else:
            made = [r.empty(like, dtype, f"grad_{part}") for part, like in zip("qkv", likes, strict=True)]
        if r.kernel_workspaces:
            inside = [r.empty(size, kind, name, WORKSPACES) for name, size, kind in workspaces]
            inside.clear()
        return [*made, *(r.empty((1, a, 1, 1), "fp32", "grad_sinks") for _ in range(has_sinks))]

    return backward


# -- unfused -----------------------------------------------------------------------------------------


def unfused(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """(s, b, a d) from q, k, v (s, b, a, d). The mask and the scores live until the module returns."""
    (s, b, a, _), keys, d_v = q.shape, k.shape[0], v.shape[-1]
    wide = q.dtype == "fp32"
    if not wide and not softmax_is_fused(s, b * a, q.dtype, keys):
        raise PlanError(
            "batch.seq", s, "unfused attention of Transformer Engine outside its softmax kernel's sizes is not covered"
        )
    mask = causal_mask(r, s, shape.te) if shape.spec.causal else padding_mask(r, b, s, keys, shape.te)
    if k.shape[2] < a:
        k = ops.expanded(r, k, q.shape, "key_repeated", copies=True)
        v = ops.expanded(r, v, q.shape, "value_repeated", copies=True)
    size = (b * a, s, keys)
    scratch = [r.empty(size, q.dtype, "matmul_result")]
    scores = _scaled_product(r, q, k, size)
    scratch.clear()
    if wide:
        probabilities = ops.softmax(r, local.filled(r, scores, mask[0], view=True), "probabilities")
    else:
        probabilities = _softmax(r, scores, in_place=shape.te < te_facts.SOFTMAX_BACKWARD_APART)
    if not shape.spec.causal:
        probabilities = _masked(r, probabilities, mask[0])
    probabilities = ops.dropout(r, probabilities, shape.spec.attention_dropout, "attention_dropout")
    context = ops.matmul(r, probabilities, v, (b * a, s, d_v), "context")
    return ops.contiguous(r, context, (s, b, a * d_v), "context_contiguous")


def softmax_is_fused(s: int, batches: int, dtype: str, keys: int = 0) -> bool:
    """``FusedScaleMaskSoftmax.is_kernel_available`` for s queries, as many keys or ``keys``, and b a batches."""
    keys = keys or s
    rows = 4 if keys > 128 else 8  # get_batch_per_block
    fits = 16 < keys < 16384 and s % 8 == keys % 8 == 0
    return dtype != "fp32" and fits and batches % 4 == 0 and s % rows == 0


def _scaled_product(r: Recorder, q: Tensor, k: Tensor, size: Shape) -> Tensor:
    """``baddbmm(beta=0, alpha=scale)``: saves both factors; each gradient is a product, then scaled out of place."""
    dtype, likes = q.dtype, (q.shape, k.shape)

    def gradient(r: Recorder, name: str, like: Shape) -> Tensor:
        return r.in_turn((like, dtype, f"grad_{name}_unscaled"), (like, dtype, f"grad_{name}"))

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [gradient(r, name, like) for name, like in zip("qk", likes, strict=True)]

    return r.output((q, k), (q, k), backward, size, dtype, "scores", work=work.scaled_scores(q.shape, size, dtype))


def _softmax(r: Recorder, scores: Tensor, *, in_place: bool) -> Tensor:
    """``ScaledMaskedSoftmax``: saves its result; backward may write over the incoming gradient."""
    out = r.empty(scores.shape, scores.dtype, "probabilities")
    like, dtype = scores.shape, scores.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return gradients if in_place else [r.empty(like, dtype, "grad_scores")]

    return out.by(r.node((scores,), (out,), backward, work=work.in_place(like, dtype, 3)))


def _masked(r: Recorder, x: Tensor, mask: Tensor) -> Tensor:
    """``masked_fill`` with zeros where rows are padding: saves the mask."""
    return r.empty(x.shape, x.dtype, "probabilities_masked").by(
        r.node((x,), (mask,), fresh(x, "grad_probabilities_masked"))
    )


# -- masks of unfused attention ---------------------------------------------------------------------


def causal_mask(r: Recorder, s: int, te: tuple[int, int]) -> list[Tensor]:
    """``get_full_mask``: (1, 1, s, s) booleans, by way of three int32 matrices, made in every forward."""
    distance = _distance(r, s)
    left, right = (r.empty((1, 1, s, s), "int32", f"window_{side}") for side in ("left", "right"))
    mask = _outside(r, (1, 1, s, s), te)
    del left, right, distance
    return [mask]


def padding_mask(r: Recorder, b: int, s: int, keys: int, te: tuple[int, int]) -> list[Tensor]:
    """``get_full_mask`` of a padding mask (b, 1, 1, keys): (b, 1, s, keys), and lengths that stay as long."""
    full = (b, 1, s, keys)
    padded = r.empty(full, "bool", "padding")
    kept = r.empty(full, "bool", "padding_not")
    lengths = [r.empty((b,), "int64", f"lengths_{part}") for part in ("q", "kv")]
    distance = _distance(r, s, keys)
    left, right = _window(r, b, full, "left"), _window(r, b, full, "right")
    outside = _outside(r, full, te)
    mask = r.empty(full, "bool", "mask")
    del padded, kept, distance, left, right, outside
    return [mask, *lengths]


def _distance(r: Recorder, s: int, keys: int = 0) -> Tensor:
    """Query minus key position, int32 (1, 1, s, keys), keys as many as queries unless said."""
    keys = keys or s
    rows, columns = r.empty((s,), "int32", "rows"), r.empty((keys,), "int32", "columns")
    distance = r.empty((1, 1, s, keys), "int32", "distance")
    del rows, columns
    return distance


def _window(r: Recorder, b: int, full: Shape, side: str) -> Tensor:
    return r.in_turn(
        ((b,), "int64", f"window_{side}_difference"),
        ((b,), "int64", f"window_{side}_end"),
        (full, "int64", f"window_{side}"),
    )


def _outside(r: Recorder, full: Shape, te: tuple[int, int]) -> Tensor:
    """Where a key is outside the window: booleans, up to 2.5 by way of int64 (``te_facts.MASK_IN_BOOL``)."""
    if te < te_facts.MASK_IN_BOOL:
        return _outside_int64(r, full)
    at_most = r.empty(full, "bool", "left_at_most_0")
    within = r.in_turn((full, "bool", "right_below_0"), (full, "bool", "right_not_below_0"))
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
