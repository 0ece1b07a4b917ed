"""Transformer Engine's ``DotProductAttention`` under Megatron-Core's ``TEDotProductAttention``.

``transformer_engine/pytorch/attention/dot_product_attention``: ``dot_product_attention.py`` (forward), ``utils.py``
(layouts, masks, choice of the back end), ``backends.py``; ``csrc/extensions/attention.cpp`` and
``softmax.cpp``; flash-attn 2 ``flash_attn_interface.py`` and ``csrc/flash_attn/flash_api.cpp``; cuDNN
front end ``node/scaled_dot_product_flash_attention.h``.

Queries, keys and values come as (s, b, a, d), packed (strided views of one projection) or not; the context goes
out as (s, b, a d). Shapes: s sequence, b micro-batch, a heads on this rank, g key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...plan.errors import PlanError
from ...tape import Category
from .. import ops
from ..autograd import Gradients, Recorder, Tensor, size_of
from . import te_context, te_facts, te_unfused
from .shape import CoreAttention, CoreShape, Version

WORKSPACES = Category.WORKSPACES

Three = tuple[Tensor, Tensor, Tensor]


def core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """The context (s, b, a d) by the back end that ``shape.attention`` names."""
    q, k, v = arranged(r, q, k, v)
    if shape.cp > 1 and shape.attention != "unfused":
        return _context_parallel(r, q, k, v, shape)
    lengths = [] if shape.spec.causal else [sequence_lengths(r, shape.b, shape.s) for _ in range(2)]
    if shape.attention == "unfused":
        if shape.cp > 1:
            problem = "unfused attention has no context parallelism"
            raise PlanError("megatron.attention_backend", shape.attention, problem)
        return te_unfused.core_attention(r, q, k, v, shape)
    if shape.attention == "fused":
        return fused(r, q, k, v, lengths, shape)
    if lengths:
        problem = "attention with a padding mask (BERT): flash attention packs sequences, which is not covered"
        raise PlanError("megatron.attention_backend", shape.attention, problem)
    return flash(r, q, k, v, shape)


def _context_parallel(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """Each of the three contiguous, for cuDNN (s, b, a, d) and for flash attention (b, s, a, d)."""
    if shape.attention == "flash":
        q, k, v = batch_first(r, q, k, v)
    else:
        q, k, v = _copied(r, q, "query"), _copied(r, k, "key"), _copied(r, v, "value")
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
    flash_installed: bool = True,
    cudnn: tuple[int, int, int] = (9, 20, 0),
) -> CoreAttention:
    """The back end that ``get_attention_backend`` takes (``dot_product_attention/utils.py``).

    ``--attention-backend`` allows one or all (``LanguageModule._set_attention_backend``). Of those that are
    possible cuDNN's comes first since Hopper, flash attention before; the unfused one is last.
    """
    fused_works = te_facts.fused_is_possible(
        te, capability, dtype=dtype, head_dim=head_dim, dropout=dropout, deterministic=deterministic, cudnn=cudnn
    )
    flash_works = flash_installed and te_facts.flash_is_possible(capability, dtype=dtype, head_dim=head_dim)
    possible: dict[CoreAttention, bool] = {"fused": fused_works, "flash": flash_works, "unfused": True}
    in_order: list[CoreAttention] = ["fused", "flash"] if capability >= (9, 0) else ["flash", "fused"]
    for one in (*in_order, "unfused"):
        if possible[one] and asked in ("auto", one):
            return one
    problem = f"is not possible in Transformer Engine {te[0]}.{te[1]} on this GPU with these sizes and determinism"
    raise PlanError("megatron.attention_backend", asked, problem)


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
    kept = r.empty((b, s), "bool", "mask_not")
    lengths = r.empty((b,), "int64", "sequence_lengths")
    del kept
    summed = r.empty((b,), "int64", "sequence_lengths_cumulative")
    cast = r.empty((b,), "int32", "sequence_lengths_int32")
    del summed
    zero = r.empty((1,), "int32", "zero")
    cumulative = r.empty((b + 1,), "int32", "cu_seqlens")
    del cast, lengths, zero
    return cumulative


# -- flash attention 2 ------------------------------------------------------------------------------


def flash(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``FlashAttention.forward``: takes (b, s, a, d), so that with b > 1 inputs and output are copied."""
    s, b, a, d = q.shape
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
    node = r.node((q, k, v), (), backward, outputs=3)
    first, second, third = (Tensor(out.storage, (b, s, a, d), dtype, node, slot) for slot in range(3))
    return first, second, third


def flash_function(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    """``FlashAttnFunc`` on (b, s, a, d): saves its inputs, output, log-sum-exp (b, a, s) and random state."""
    b, s, a, d = q.shape
    dtype, likes = q.dtype, (q.shape, k.shape, v.shape)
    grouped = k.shape[2] < a
    out = r.empty(q.shape, dtype, "context")
    logsumexp = r.empty((b, a, s), "fp32", "softmax_logsumexp")
    rng_state = r.empty((2,), "int64", "rng_state")
    workspaces = te_facts.backward_workspaces(b, s, a, d, shape, grouped=grouped)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(like, dtype, f"grad_{part}") for part, like in zip("qkv", likes, strict=True)]
        inside = [r.empty((b, a, -(-s // 128) * 128), "fp32", "softmax_d")]
        if r.kernel_workspaces:
            inside += [r.empty(size, kind, name, WORKSPACES) for name, size, kind in workspaces]
        inside.clear()
        return made

    out.node = r.node((q, k, v), (q, k, v, out, logsumexp, rng_state), backward)
    return out


# -- cuDNN ------------------------------------------------------------------------------------------


def fused(r: Recorder, q: Tensor, k: Tensor, v: Tensor, lengths: list[Tensor], shape: CoreShape) -> Tensor:
    """``FusedAttnFunc`` on (s, b, a, d): saves inputs, output, softmax statistics (b, a, s, 1) and random state.

    The gradients are three tensors, or one packed like the inputs.
    """
    s, b, a, d = q.shape
    dtype, packed = q.dtype, is_packed(q, k, v)
    likes = (q.shape, k.shape, v.shape)
    out = r.empty(q.shape, dtype, "context")
    rng_state = r.empty((2,), "int64", "rng_state")
    statistics = r.empty((b, a, s, 1), "fp32", "softmax_statistics")
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
        return list(made)

    out.node = r.node((q, k, v), (q, k, v, out, *lengths, statistics, rng_state), backward)
    return out.view(s, b, a * d)
