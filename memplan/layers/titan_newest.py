"""Layers of torchtitan's Llama, Qwen 3 and DeepSeek V3 as its main branch has them in August 2026 (commit b5bcd76);
their experts are gpt-oss' without biases, and DeepSeek's have others beside them that take every token.

``torchtitan/models/llama3/model.py``, ``qwen3/model.py``, ``deepseek_v3/model.py``, and ``models/common/attention.py``
(``GQAttention``, ``FusedQKVLinear``, ``VarlenAttention``): rows of tokens, in as many sequences as a batch has, one
product for queries, keys and values, and norms in one kernel. Shapes: n = b s tokens of a micro-batch, h hidden, a
heads, g heads of keys, d features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import ops, titan_gpt_oss, titan_models, titan_muse
from .autograd import Recorder, Tensor
from .huggingface import LayerShape
from .titan_moe import fused_rms_norm, shared_experts
from .torchtitan import Policy, feed_forward

Turning = Callable[[Recorder, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What rotary positions make of queries and keys."""
Attended = Callable[[Recorder, Tensor, LayerShape, Policy], Tensor]
"""Attention of a layer's normed input, (n, h)."""


def llama_block(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, _: Tensor | None = None) -> Tensor:
    """``Llama3TransformerBlock.forward``."""
    whole = x.shape
    x = x.view(shape.b * shape.s, shape.spec.hidden)
    made = attention(r, fused_rms_norm(r, x, "attention_norm"), shape, policy, titan_muse.rotary)
    h = ops.add(r, x, made, "residual_attention")
    del made
    return ops.add(r, h, _dense(r, h, shape, policy), "residual_mlp").view(*whole)


def block(
    r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, _: Tensor | None = None, *, attended: Attended
) -> Tensor:
    """``TransformerBlock.forward`` of Qwen 3, DeepSeek V3 and gpt-oss, whose variable the first sum takes."""
    whole = x.shape
    x = x.view(shape.b * shape.s, shape.spec.hidden)
    made = attended(r, fused_rms_norm(r, x, "attention_norm"), shape, policy)
    x = ops.add(r, x, made, "residual_attention")
    del made
    inner = _mixture if shape.mixture else _dense
    return ops.add(r, x, inner(r, x, shape, policy), "residual_mlp").view(*whole)


def _mixture(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    shared = shared_experts if shape.spec.shared_expert_ffn else None
    return titan_gpt_oss.mixture(r, fused_rms_norm(r, x, "mlp_norm"), shape, policy, shared)


def _dense(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    return feed_forward(r, fused_rms_norm(r, x, "mlp_norm"), shape, policy)


def attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, turning: Turning) -> Tensor:
    """``GQAttention.forward`` of (n, h); queries and keys may be normed head by head."""
    spec = shape.spec
    q, k, v = titan_gpt_oss.queries_keys_values(r, x, spec, policy)
    if spec.qk_norm:
        q = fused_rms_norm(r, q, "query_norm")
        k = fused_rms_norm(r, k, "key_norm")
    q, k = turning(r, q, k)
    whole = titan_gpt_oss.of_all_ranks(r, k, v, shape)
    out = policy.run(r, lambda r: titan_gpt_oss.varlen_attention(r, q, whole[0], whole[1], shape, alone=True)[0])
    whole.clear()
    out = out.view(x.shape[0], spec.heads * spec.head_dim)
    return policy.linear(r, out, "attention_output", spec.hidden)


def latent_attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``Attention.forward`` of DeepSeek V3, of (n, h): keys and values by a rank, one turned key for all heads."""
    spec, n, a = shape.spec, x.shape[0], shape.spec.heads
    plain, turns, rank, width = spec.nope_head_dim, spec.rope_head_dim, spec.latent_kv_rank, spec.value_head_dim
    q = titan_models.queries(r, x, shape, policy).view(n, a, plain + turns)
    q_plain, q_turned = ops.split(r, q, [(n, a, plain), (n, a, turns)], "query_parts")
    low = policy.linear(r, x, "key_value_down", rank + turns)
    low, k_turned = ops.split(r, low, [(n, rank), (n, turns)], "key_value_parts")
    q_turned, k_turned = titan_muse.rotary(r, q_turned, k_turned.view(n, 1, turns))
    q = ops.cat_last(r, q_plain, q_turned, "query_states")
    low = titan_models.expanded(r, low, shape, policy).view(n, a, plain + width)
    k_plain, v = ops.split(r, low, [(n, a, plain), (n, a, width)], "key_value")
    k = _keys(r, k_plain, k_turned)
    whole = titan_gpt_oss.of_all_ranks(r, k, v, shape)
    out = policy.run(r, lambda r: titan_gpt_oss.varlen_attention(r, q, whole[0], whole[1], shape, alone=True)[0])
    whole.clear()
    return policy.linear(r, out.view(n, a * width), "attention_output", spec.hidden)


def _keys(r: Recorder, plain: Tensor, turned: Tensor) -> Tensor:
    every = ops.expanded(r, turned, (*plain.shape[:-1], turned.shape[-1]), "key_turned", copies=False)
    return ops.cat_last(r, plain, every, "key_states")


qwen3_block = partial(block, attended=partial(attention, turning=titan_gpt_oss.rotary))
deepseek_block = partial(block, attended=latent_attention)
gpt_oss_block = partial(block, attended=titan_gpt_oss.attention)
