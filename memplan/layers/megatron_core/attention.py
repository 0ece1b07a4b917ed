"""``megatron/core/transformer/attention.py``, ``SelfAttention.forward``.

Shapes: s sequence, b micro-batch, a heads, g key/value heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..autograd import Gradients, Recorder, Shape, Tensor
from ..recompute import recomputed_reentrant
from . import local, rotary, te, te_attention
from .ends import keep_mask
from .shape import CoreShape

QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"


def attention(r: Recorder, hidden: Tensor, shape: CoreShape, norm_name: str = "") -> tuple[Tensor, Tensor | None]:
    """(s, b, h) to (s, b, h) and the bias that is not added yet. With ``norm_name`` the projection to
    queries, keys and values has the norm in it."""
    has_bias = shape.spec.attention_output_bias
    _in_order(r, shape)
    split = query_key_value(r, hidden, shape, norm_name)
    q, k, v = split
    if shape.spec.positions == "rotary":
        q = rotary.embed(r, q, "query", shape)
        k = rotary.embed(r, k, "key", shape)
    if "core_attn" in shape.recompute_modules:
        context = recomputed_reentrant(r, lambda r, q, k, v: _core_attention(r, q, k, v, shape), (q, k, v))
        keep_mask(r, shape)
    else:
        context = _core_attention(r, q, k, v, shape)
    row_linear = local.row_linear if shape.implementation == "local" else te.row_linear
    return row_linear(r, context, PROJECTION, shape, bias=has_bias)


def _core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: CoreShape) -> Tensor:
    module = local.core_attention if shape.attention == "local" else te_attention.core_attention
    return module(r, q, k, v, shape)


def _in_order(r: Recorder, shape: CoreShape) -> None:
    """``Attention.__init__`` makes the output projection before ``SelfAttention.__init__`` the other one:
    parameters, and so buckets of gradients, are in that order."""
    spec = shape.spec
    r.parameter(f"{PROJECTION}.weight", (spec.hidden, spec.attention_features // shape.t), shape.dtype)
    if spec.attention_output_bias:
        r.parameter(f"{PROJECTION}.bias", (spec.hidden,), shape.dtype)


def query_key_value(r: Recorder, hidden: Tensor, shape: CoreShape, norm_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """``get_query_key_value_tensors``: q (s, b, a/t, d), k and v (s, b, g/t, d).

    All are views of one tensor, group by group the group's queries, its key and its value; only with several
    groups of several queries the queries are copied, as no view has that shape.
    """
    spec, t = shape.spec, shape.t
    s, b, a, g, d = shape.s, shape.b, spec.heads // t, spec.kv_heads // t, spec.head_dim
    n = spec.qkv_features // t
    if norm_name:
        mixed, _ = te.norm_column_linear(r, hidden, QKV, norm_name, n, shape, bias=spec.attention_bias, skip_bias=False)
    elif shape.implementation == "local":
        mixed, _ = local.column_linear(r, hidden, QKV, n, shape, bias=spec.attention_bias, skip_bias=False)
    else:
        mixed, _ = te.column_linear(r, hidden, QKV, n, shape, bias=spec.attention_bias, skip_bias=False)
    q, k, v = _split(r, mixed, [(s, b, a, d), (s, b, g, d), (s, b, g, d)], shape)
    if a > g:
        q = _regrouped(r, q, shape, copies=g > 1)
    if spec.qk_norm:
        q, k = _normed(r, q, k, shape)
    return q, k, v


def _normed(r: Recorder, q: Tensor, k: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``q_layernorm`` and ``k_layernorm`` over the features of one head."""
    names = ("self_attention.q_layernorm", "self_attention.k_layernorm")
    if shape.implementation != "local":
        return te.norm(r, q, names[0], shape), te.norm(r, k, names[1], shape)
    strided = not q.shape[2] > k.shape[2] > 1
    transposed = "core_attn" not in shape.recompute_modules
    unchanged = transposed and shape.spec.positions != "rotary"
    q = local.norm(r, q, names[0], shape, strided=strided, transposed=unchanged)
    k = local.norm(r, k, names[1], shape, strided=True, transposed=unchanged and q.shape == k.shape)
    return q, k


def _split(r: Recorder, x: Tensor, shapes: Sequence[Shape], shape: CoreShape) -> list[Tensor]:
    """``torch.split``, whose backward concatenates.

    Transformer Engine until 2.2 has ``_SplitAlongDim``, which Megatron prefers in both implementations: it
    concatenates nothing where the gradients are neighbours in one tensor already. Since 2.3 it has another name,
    which Megatron does not import (``extensions/transformer_engine.py``).
    """
    whole, dtype, joins = x.shape, x.dtype, shape.te <= (2, 2)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        first = gradients[0]
        if joins and first is not None and all(one is not None and one.storage is first.storage for one in gradients):
            return [first.view(*whole)]
        return [r.empty(whole, dtype, "grad_qkv")]

    node = r.node((x,), (), backward, outputs=len(shapes))
    return [Tensor(x.storage, one, dtype, node, slot) for slot, one in enumerate(shapes)]


def _regrouped(r: Recorder, x: Tensor, shape: CoreShape, *, copies: bool) -> Tensor:
    """``reshape`` of (s, b, g/t, a d / g) queries to (s, b, a/t, d), and of their gradient back, which is
    a copy where core attention itself returns it: transposed."""
    out = r.empty(x.shape, x.dtype, "query") if copies else Tensor(x.storage, x.shape, x.dtype)
    whole, dtype = x.shape, x.dtype
    changed = shape.spec.qk_norm or shape.spec.positions == "rotary" or "core_attn" in shape.recompute_modules
    transposed = shape.attention == "local" and not changed

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(whole, dtype, "grad_query_grouped")] if transposed else gradients

    out.node = r.node((x,), (), backward)
    return out
