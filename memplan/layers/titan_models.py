"""Layers of torchtitan's Qwen 3 and DeepSeek V3, of release 0.2.2: ``torchtitan/models/qwen3/model/model.py`` and
``torchtitan/models/deepseek_v3/model/model.py``; and one rank's part of them with tensor parallelism.

``apply_non_moe_tp`` of ``torchtitan/models/{qwen3,deepseek_v3}/infra/parallelize.py`` and ``apply_moe_ep_tp`` of
``torchtitan/models/llama4/infra/parallelize.py``: the residual stream is (b, s / t, h), norms are
``SequenceParallel``, attention, MLP and experts gather their input and scatter their output.

Shapes: b micro-batch, s sequence, h hidden, a heads, d features of a head, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..tape.events import Category
from . import ops, tensor_parallel as tp
from .autograd import Gradients, Recorder, Tensor
from .fused_attention import flash_attention
from .huggingface import LayerShape, Shared, rotary_one
from .titan_moe import Placed, fused_rms_norm, mixture
from .torchtitan import Policy, feed_forward, turned
from .torchtitan_tp import local
from .work import attention as attention_work

Attention = Callable[[Recorder, Tensor, LayerShape, Policy, "Tensor | None"], Tensor]
"""Of (b, s, h), with the table of rotary positions that the layer is given, if it is a tensor of the layer's own."""

TABLE = "rope_cache_cast"
"""The table of rotary positions in the dtype of compute: ``fully_shard`` casts every layer's inputs
(``cast_forward_inputs``)."""


def block(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, table: Tensor | None, *, attention: Attention
) -> Tensor:
    """``TransformerBlock.forward`` of both."""
    if shape.tensor > 1:
        return block_of_parts(r, x, shape, policy, table, attention)
    made = attention(r, fused_rms_norm(r, x, "attention_norm"), shape, policy, table)
    x = ops.add(r, x, made, "residual_attention")
    del made
    inner = mixture if shape.mixture else feed_forward
    return ops.add(r, x, inner(r, fused_rms_norm(r, x, "mlp_norm"), shape, policy), "residual_mlp")


def norm_of_parts(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``nn.RMSNorm`` of (b, s / t, h)."""
    return fused_rms_norm(r, tp.apart(ops.alias(r, x)), name, placed="parts")


def block_of_parts(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, table: Tensor | None, attention: Attention
) -> Tensor:
    """The same on (b, s / t, h); ``shape`` is that of all ranks together."""
    t = shape.tensor
    part = local(shape, t)

    def attended(normed: Tensor) -> Tensor:
        return attention(r, tp.gathered(r, normed, t, "attention_input"), part, policy, table)

    def scattered(r: Recorder, x: Tensor) -> Tensor:
        return tp.scattered(r, x, t, "mlp_output_part", policy.run)

    def fed(normed: Tensor) -> Tensor:
        return feed_forward(r, tp.gathered(r, normed, t, "mlp_input"), part, policy, scattered)

    def mixed(normed: Tensor) -> Tensor:
        whole = tp.everywhere(r, normed, t, "experts_input")
        return scattered(r, mixture(r, whole, part, policy))

    x = ops.add(r, x, attended(norm_of_parts(r, x, "attention_norm")), "residual_attention")
    inner = mixed if shape.mixture else fed
    return ops.add(r, x, inner(norm_of_parts(r, x, "mlp_norm")), "residual_mlp")


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
    q = headwise_norm(r, q, "query_norm", shape)
    k = headwise_norm(r, k, "key_norm", shape)
    q, k = rotary(r, q, k, table)
    q, k, v = q.view(b, a, s, d), k.view(b, groups, s, d), v.view(b, groups, s, d)
    out = policy.run(r, lambda r: flash_attention(r, q, k, v))
    out = out.view(b, s, a * d)
    return projected(r, out, shape, policy)


def headwise_norm(r: Recorder, x: Tensor, name: str, shape: LayerShape) -> Tensor:
    """Of (b, s, a, d); of some of the heads with tensor parallelism (``SequenceParallel(sequence_dim=2)``)."""
    if shape.tensor == 1:
        return fused_rms_norm(r, x, name)
    return tp.apart(fused_rms_norm(r, x, name, placed="parts"))


def projected(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``wo``, whose sums over ranks are scattered within the function that calls it."""
    out = policy.linear(r, x, "attention_output", shape.spec.hidden)
    return out if shape.tensor == 1 else tp.scattered(r, out, shape.tensor, "attention_output_part", policy.run)


def rotary(r: Recorder, q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """``apply_rotary_emb``: five operators each."""
    half = Tensor(table.storage, (1, table.shape[0], 1, table.shape[1] // 2), table.dtype)
    shared = Shared(cos=half, sin=half)
    q_out = rotary_one(r, q, shared, "query")
    return q_out, rotary_one(r, k, shared, "key")


# -- DeepSeek V3 ------------------------------------------------------------------------------------


def queries(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """By a rank of their own, or at once."""
    spec = shape.spec
    features = spec.heads * spec.head_dim
    if not spec.latent_q_rank:
        return policy.linear(r, x, "query", features)
    low = policy.linear(r, x, "query_down", spec.latent_q_rank)
    normed = fused_rms_norm(r, low, "query_down_norm", placed=placed(shape))
    return policy.linear(r, normed, "query_up", features)


def placed(shape: LayerShape) -> Placed:
    """What every rank of tensor parallelism computes whole (``NoParallel``)."""
    return "whole" if shape.tensor > 1 else "here"


def latent_attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, table: Tensor | None) -> Tensor:
    """``Attention.forward``: keys and values by a rank, one turned key for all heads.

    With tensor parallelism (``apply_non_moe_tp`` of DeepSeek V3) every rank computes both ranks and the turned key
    whole, and has gradients of parts of the heads. What is whole is divided where it is added to parts of a sum
    (``DTensor`` brings ``Replicate`` to ``Partial``)."""
    spec, b, s, a = shape.spec, shape.b, shape.s, shape.spec.heads
    if shape.tensor > 1 and x.node is not None:
        x.node.divides = spec.latent_q_rank > 0
    plain, turns, rank, width = spec.nope_head_dim, spec.rope_head_dim, spec.latent_kv_rank, spec.value_head_dim
    q = queries(r, x, shape, policy).view(b, s, a, plain + turns)
    q_plain, q_turned = ops.split(r, q, [(b, s, a, plain), (b, s, a, turns)], "query_parts")
    q_turned = rotated(r, q_turned, "query")
    q = ops.cat_last(r, q_plain, q_turned, "query_states")
    low = lowered(r, x, rank + turns, shape, policy)
    low, k_turned = ops.split(
        r, low, [(b, s, rank), (b, s, turns)], "key_value_parts", divides=0 if shape.tensor > 1 else None
    )
    k_turned = rotated(r, k_turned.view(b, s, 1, turns), "key")
    both = low = expanded(r, low, shape, policy).view(b, s, a, plain + width)
    k_plain, v = ops.split(r, both, [(b, s, a, plain), (b, s, a, width)], "key_value")
    every = ops.expanded(r, k_turned, (b, s, a, turns), "key_turned", copies=False)
    own = r.empty(every.shape, every.dtype, "key_turned_part") if shape.tensor > 1 else None
    k = ops.cat_last(r, k_plain, every, "key_states")
    del every, own
    q, k, v = q.view(b, a, s, plain + turns), k.view(b, a, s, plain + turns), v.view(b, a, s, width)
    out = policy.run(r, lambda r: cudnn_attention(r, q, k, v))
    out = out.view(b, s, a * width)
    return projected(r, out, shape, policy)


def lowered(r: Recorder, x: Tensor, n: int, shape: LayerShape, policy: Policy) -> Tensor:
    """``wkv_a``, whose gradient every rank has a part of the sum of."""
    if shape.tensor == 1:
        return policy.linear(r, x, "key_value_down", n)
    weight = r.parameter("key_value_down.weight", (n, x.shape[-1]), x.dtype)
    tag = f"/{tp.PARTIAL}"
    return policy.product(r, lambda r: ops.linear(r, x, weight, name="key_value_down", tag=tag))


def expanded(r: Recorder, low: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``wkv_b(kv_norm(kv))``."""
    spec = shape.spec
    normed = fused_rms_norm(r, low, "key_value_norm", strided=True, placed=placed(shape))
    features = spec.heads * (spec.nope_head_dim + spec.value_head_dim)
    return policy.linear(r, normed, "key_value_up", features)


def rotated(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``apply_rotary_emb``: times complex fp32 numbers; its variables end with it."""
    dtype = x.dtype
    x = ops.cast(r, x, "fp32", f"{name}_fp32")
    y = turned(r, x, name)
    return ops.cast(r, y, dtype, f"{name}_rotary")


def cudnn_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``_scaled_dot_product_cudnn_attention``, the first of ``ScaledDotProductAttentionWrapper``'s list and the only
    fused one of its list that takes values with heads of another size (``sdp_utils.cpp``): saves q, k, v, output and
    log-sum-exp, (b, a, s, 1) fp32, and two numbers of the random state. In backward cuDNN's front end adds up dQ and
    Σ dO·O in fp32 (``node/scaled_dot_product_flash_attention.h``, ``get_fe_workspace_size_node``); what the engine
    inside takes is not published."""
    b, a, s, d = q.shape
    dtype, shapes, width = q.dtype, (q.shape, k.shape, v.shape), v.shape[-1]
    out = r.empty((b, a, s, width), dtype, "attention")
    logsumexp = r.empty((b, a, s, 1), "fp32", "attention_logsumexp")
    seed, offset = (r.empty((), "int64", f"attention_rng_{part}") for part in ("seed", "offset"))

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(shape, dtype, f"grad_{part}") for part, shape in zip("qkv", shapes, strict=True)]
        if r.kernel_workspaces:
            r.empty((b, a, s, 1 + d), "fp32", "cudnn_workspace", Category.WORKSPACES)
        return made

    work = attention_work((b, s, a, d), a, s, dtype, causal=True, values=width)
    out.node = r.node((q, k, v), (k, q, v, logsumexp, out, offset, seed), backward, work=work)
    del offset, seed, logsumexp
    return out


qwen3_block = partial(block, attention=qwen3_attention)
deepseek_block = partial(block, attention=latent_attention)
