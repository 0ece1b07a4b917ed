"""Layers of torchtitan's Qwen 3 and DeepSeek V3, of release 0.2.2: ``torchtitan/models/qwen3/model/model.py`` and
``torchtitan/models/deepseek_v3/model/model.py``.

Shapes: b micro-batch, s sequence, h hidden, a heads, d features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Gradients, Recorder, Tensor
from .fused_attention import flash_attention
from .huggingface import LayerShape, Shared, rotary_one
from .titan_moe import fused_rms_norm, mixture
from .torchtitan import Policy, feed_forward, turned
from .work import attention as attention_work

Attention = Callable[[Recorder, Tensor, LayerShape, Policy, "Tensor | None"], Tensor]
"""Of (b, s, h), with the table of rotary positions that the layer is given, if it is a tensor of the layer's own."""

TABLE = "rope_cache_cast"
"""The table of rotary positions in the dtype of compute: ``fully_shard`` casts every layer's inputs
(``cast_forward_inputs``)."""


def block(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, attention: Attention, table: Tensor | None = None
) -> Tensor:
    """``TransformerBlock.forward`` of both."""
    made = attention(r, fused_rms_norm(r, x, "attention_norm"), shape, policy, table)
    x = ops.add(r, x, made, "residual_attention")
    del made
    inner = mixture if shape.mixture else feed_forward
    return ops.add(r, x, inner(r, fused_rms_norm(r, x, "mlp_norm"), shape, policy), "residual_mlp")


# -- Qwen 3 -----------------------------------------------------------------------------------------


def rope_cache(r: Recorder, shape: LayerShape) -> Tensor:
    """Cosines and sines, (s, 2 d), as a layer is given them."""
    return r.empty((shape.s, 2 * shape.spec.head_dim), shape.dtype, TABLE)


def qwen3_attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, table: Tensor | None) -> Tensor:
    """``Attention.forward``: queries and keys are normed head by head."""
    assert table is not None
    spec, b, s, d = shape.spec, shape.b, shape.s, shape.spec.head_dim
    a, groups = spec.heads, spec.kv_heads
    q = policy.linear(r, x, "query", a * d).view(b, s, a, d)
    k = policy.linear(r, x, "key", groups * d).view(b, s, groups, d)
    v = policy.linear(r, x, "value", groups * d).view(b, s, groups, d)
    q = fused_rms_norm(r, q, "query_norm")
    k = fused_rms_norm(r, k, "key_norm")
    q, k = rotary(r, q, k, table)
    q, k, v = q.view(b, a, s, d), k.view(b, groups, s, d), v.view(b, groups, s, d)
    out = policy.run(r, lambda r: flash_attention(r, q, k, v))
    out = out.view(b, s, a * d)
    return policy.linear(r, out, "attention_output", spec.hidden)


def rotary(r: Recorder, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """``apply_rotary_emb``: five operators each."""
    half = Tensor(table.storage, (1, table.shape[0], 1, table.shape[1] // 2), table.dtype)
    shared = Shared(cos=half, sin=half)
    q_out = rotary_one(r, q, shared, "query")
    return q_out, rotary_one(r, k, shared, "key")


# -- DeepSeek V3 ------------------------------------------------------------------------------------


def queries(r: Recorder, x: Tensor, spec: ModelSpec, policy: Policy) -> Tensor:
    """By a rank of their own, or at once."""
    features = spec.heads * spec.head_dim
    if not spec.latent_q_rank:
        return policy.linear(r, x, "query", features)
    low = policy.linear(r, x, "query_down", spec.latent_q_rank)
    normed = fused_rms_norm(r, low, "query_down_norm")
    return policy.linear(r, normed, "query_up", features)


def latent_attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, table: Tensor | None) -> Tensor:
    """``Attention.forward``: keys and values by a rank, one turned key for all heads."""
    spec, b, s, a = shape.spec, shape.b, shape.s, shape.spec.heads
    plain, turns, rank, width = spec.nope_head_dim, spec.rope_head_dim, spec.latent_kv_rank, spec.value_head_dim
    q = queries(r, x, spec, policy).view(b, s, a, plain + turns)
    q_plain, q_turned = ops.split(r, q, [(b, s, a, plain), (b, s, a, turns)], "query_parts")
    q_turned = rotated(r, q_turned, "query")
    q = ops.cat_last(r, q_plain, q_turned, "query_states")
    low = policy.linear(r, x, "key_value_down", rank + turns)
    low, k_turned = ops.split(r, low, [(b, s, rank), (b, s, turns)], "key_value_parts")
    k_turned = rotated(r, k_turned.view(b, s, 1, turns), "key")
    both = low = expanded(r, low, spec, policy).view(b, s, a, plain + width)
    k_plain, v = ops.split(r, both, [(b, s, a, plain), (b, s, a, width)], "key_value")
    every = ops.expanded(r, k_turned, (b, s, a, turns), "key_turned", copies=False)
    k = ops.cat_last(r, k_plain, every, "key_states")
    del every
    q, k, v = q.view(b, a, s, plain + turns), k.view(b, a, s, plain + turns), v.view(b, a, s, width)
    out = policy.run(r, lambda r: cudnn_attention(r, q, k, v))
    out = out.view(b, s, a * width)
    return policy.linear(r, out, "attention_output", spec.hidden)


def expanded(r: Recorder, low: Tensor, spec: ModelSpec, policy: Policy) -> Tensor:
    """``wkv_b(kv_norm(kv))``."""
    normed = fused_rms_norm(r, low, "key_value_norm", strided=True)
    features = spec.heads * (spec.nope_head_dim + spec.value_head_dim)
    return policy.linear(r, normed, "key_value_up", features)


def rotated(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``apply_rotary_emb``: times complex fp32 numbers; its variables end with it."""
    dtype = x.dtype
    x = ops.cast(r, x, "fp32", f"{name}_fp32")
    y = turned(r, x, name)
    return ops.cast(r, y, dtype, f"{name}_rotary")


def cudnn_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, name: str = "attention") -> Tensor:
    """``_scaled_dot_product_cudnn_attention``, the first of ``ScaledDotProductAttentionWrapper``'s list and the only
    fused one of its list that takes values with heads of another size (``sdp_utils.cpp``): saves q, k, v, output and
    log-sum-exp, (b, a, s, 1) fp32, and two numbers of the random state. cuDNN's own workspace is not counted."""
    b, a, s, d = q.shape
    dtype, shapes, width = q.dtype, (q.shape, k.shape, v.shape), v.shape[-1]
    out = r.empty((b, a, s, width), dtype, name)
    logsumexp = r.empty((b, a, s, 1), "fp32", f"{name}_logsumexp")
    seed, offset = (r.empty((), "int64", f"{name}_rng_{part}") for part in ("seed", "offset"))

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty(shape, dtype, f"grad_{part}") for part, shape in zip("qkv", shapes, strict=True)]

    work = attention_work((b, s, a, d), a, s, dtype, causal=True, values=width)
    out.node = r.node((q, k, v), (k, q, v, logsumexp, out, offset, seed), backward, work=work)
    del offset, seed, logsumexp
    return out
