"""torchtitan's Qwen 3.5 as its main branch has it in August 2026 (commit b5bcd76), without its vision tower: gated
delta nets, and attention with a gate in every fourth layer.

``torchtitan/models/qwen3_5/gdn.py`` (``GatedDeltaNet``, ``InnerGatedDeltaNet``, ``GatedDeltaKernel``,
``RMSNormGated``), ``model.py`` (``OffsetRMSNorm``, ``Qwen35Attention``, ``Qwen35TransformerBlock``),
``models/common/rope.py`` (``CosSinRoPE``), ``moe.py`` (``MoE``), ``feed_forward.py`` (``SigmoidGatedFeedForward``).
Norms are Python's, in fp32. Sequences are packed, so that convolution and rule know where each begins
(``Qwen35Model.get_attention_masks``). Shapes: n = b s tokens of a micro-batch, h hidden, a heads of d features, g heads
of keys; of a delta net k heads of keys, v of values.
"""

from __future__ import annotations

from . import gated_delta, ops, titan_gpt_oss
from .autograd import Recorder, Shape, Tensor
from .delta_net import normed
from .gated_delta import Sizes
from .huggingface import LayerShape, halves, silu
from .titan_gpt_oss import varlen_attention
from .torchtitan import Policy, feed_forward


def sizes_of(shape: LayerShape) -> Sizes:
    """Of the rule, for which queries and keys are repeated."""
    spec = shape.spec
    v, d, e = spec.linear_value_heads, spec.linear_key_head_dim, spec.linear_value_head_dim
    return Sizes(shape.b, shape.s, v, v, d, e, spec.linear_conv_kernel)


def block(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, _: Tensor | None = None) -> Tensor:
    """``Qwen35TransformerBlock.forward``, whose variables two results each take."""
    whole = x.shape
    x = x.view(shape.b * shape.s, shape.spec.hidden)
    h = offset_norm(r, x, "attention_norm")
    h = (delta_net if shape.linear else attention)(r, h, shape, policy)
    x = ops.add(r, x, h, "residual_attention")
    h = offset_norm(r, x, "mlp_norm")
    inner = mixture if shape.mixture else feed_forward
    return ops.add(r, x, inner(r, h, shape, policy), "residual_mlp").view(*whole)


# -- norms ------------------------------------------------------------------------------------------


def offset_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``OffsetRMSNorm.forward``: ``(1 + weight) x rsqrt(mean(x²) + eps)``."""
    dtype = x.dtype
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), dtype)
    x, _variance = normed(r, ops.cast(r, x, "fp32", f"{name}_fp32"), name)
    return ops.cast(r, ops.multiply(r, _offset(r, weight, name), x, f"{name}_weighed"), dtype, name)


def _offset(r: Recorder, weight: Tensor, name: str) -> Tensor:
    return ops.add_constant(r, ops.cast(r, weight, "fp32", f"{name}_weight_fp32"), f"{name}_weight_offset")


def gated_norm(r: Recorder, x: Tensor, gate: Tensor) -> Tensor:
    """``RMSNormGated.forward``: the norm in the dtype of compute times ``silu(gate)`` in fp32."""
    name, dtype = "delta_norm", x.dtype
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), dtype)
    x, _variance = normed(r, ops.cast(r, x, "fp32", f"{name}_fp32"), name)
    x = ops.cast(r, _weighed(r, weight, x, name), dtype, f"{name}_cast")
    x = ops.multiply(r, x, silu(r, ops.cast(r, gate, "fp32", "delta_gate_fp32")), f"{name}_gated")
    return ops.cast(r, x, dtype, name)


def _weighed(r: Recorder, weight: Tensor, x: Tensor, name: str) -> Tensor:
    return ops.multiply(r, ops.cast(r, weight, "fp32", f"{name}_weight_fp32"), x, f"{name}_weighed")


# -- attention --------------------------------------------------------------------------------------


def attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``Qwen35Attention.forward`` of (n, h): a query's head and its gate are one after the other."""
    spec, n = shape.spec, x.shape[0]
    a, g, d = spec.heads, spec.kv_heads, spec.head_dim
    both = policy.linear(r, x, "query", 2 * a * d).view(n, a, 2 * d)
    q, gate = ops.split(r, both, [(n, a, d), (n, a, d)], "query_gate")
    k = policy.linear(r, x, "key", g * d).view(n, g, d)
    v = policy.linear(r, x, "value", g * d).view(n, g, d)
    q = offset_norm(r, q, "query_norm")
    k = offset_norm(r, k, "key_norm")
    (q_turned, q_passed), (k_turned, k_passed) = (
        halves(r, one, spec.rotary_features, name) for one, name in ((q, "query"), (k, "key"))
    )
    q_turned, k_turned = titan_gpt_oss.rotary(r, q_turned, k_turned)
    q = ops.cat_last(r, q_turned, q_passed, "query_rotary")
    k = ops.cat_last(r, k_turned, k_passed, "key_rotary")
    out = policy.run(r, lambda r: varlen_attention(r, q, k, v, shape, alone=True)[0])
    opened = ops.elementwise(r, "gate_sigmoid", (gate,), saves_output=True)
    out = ops.multiply(r, out, opened, "attention_gated").view(n, a * d)
    del opened
    return policy.linear(r, out, "attention_output", spec.hidden)


# -- gated delta net --------------------------------------------------------------------------------


def delta_net(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``GatedDeltaNet.forward`` of (n, h)."""
    spec, n, at, dtype = shape.spec, x.shape[0], sizes_of(shape), x.dtype
    keys, values = spec.linear_key_heads * at.d, at.v * at.e
    numbers = [r.parameter(f"numbers.{name}", (at.v,), dtype) for name in ("A_log", "dt_bias")]
    sizes = {"query": keys, "key": keys, "value": values, "delta_gate": values, "delta_a": at.v, "delta_b": at.v}
    q, k, v, gate, a, b = (policy.linear(r, x, name, size) for name, size in sizes.items())
    out = _inner(r, [q, k, v, a, b], numbers, shape)
    out = gated_norm(r, out, gate.view(n, at.v, at.e))
    return policy.linear(r, out.view(n, values), "attention_output", spec.hidden)


def _inner(r: Recorder, read: list[Tensor], numbers: list[Tensor], shape: LayerShape) -> Tensor:
    """``InnerGatedDeltaNet.forward``: three convolutions, decays, steps, and the rule."""
    at = sizes_of(shape)
    *projected, a, b = read
    q, k, v = (_convolved(r, x, at, name) for x, name in zip(projected, ("query", "key", "value"), strict=True))
    decay = gated_delta.decay(r, a, *numbers)
    beta = ops.elementwise(r, "beta", (b,), saves_output=True)
    return _kernel(r, [q, k, v, decay, beta], shape)


def _convolved(r: Recorder, x: Tensor, at: Sizes, name: str) -> Tensor:
    """``_causal_conv1d_varlen``."""
    n, m = x.shape
    weight = r.parameter(f"{name}_convolution.weight", (m, 1, at.kernel), x.dtype)
    made = gated_delta.convolution(
        r, x.view(at.b, at.s, m), weight, at, channels=(at.b, at.s, m), name=f"{name}_convolution"
    )
    return made.view(n, m)


def _kernel(r: Recorder, read: list[Tensor], shape: LayerShape) -> Tensor:
    """``GatedDeltaKernel.forward``: queries and keys are repeated for every value head."""
    at, spec = sizes_of(shape), shape.spec
    n = at.b * at.s
    q, k, v, decay, beta = read
    heads: Shape = (n, spec.linear_key_heads, at.d)
    if spec.linear_key_heads < at.v:
        q, k = (
            ops.expanded(r, x.view(*heads), (n, at.v, at.d), f"{name}_repeated", copies=True)
            for x, name in ((q, "query"), (k, "key"))
        )
    v = v.view(n, at.v, at.e)
    rows = [q.view(*at.keys), k.view(*at.keys), v.view(*at.values), decay.view(*at.heads), beta.view(*at.heads)]
    return gated_delta.rule_of_normed(r, rows, at).view(n, at.v, at.e)


# -- experts ----------------------------------------------------------------------------------------


def mixture(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``MoE.forward`` of (n, h), with an expert that takes every token, by a gate of its own."""
    return titan_gpt_oss.mixture(r, x, shape, policy, shared_expert)


def shared_expert(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``SigmoidGatedFeedForward.forward``."""
    spec, width = shape.spec, shape.spec.shared_expert_ffn
    inner = silu(r, policy.linear(r, x, "shared_gate", width))
    inner = ops.multiply(r, inner, policy.linear(r, x, "shared_up", width), "shared_gated")
    out = policy.linear(r, inner, "shared_down", spec.hidden)
    del inner
    opened = ops.elementwise(r, "shared_sigmoid", (policy.linear(r, x, "shared_opens", 1),), saves_output=True)
    return ops.multiply(r, opened, out, "shared_opened")
