"""Qwen3-Next's and Qwen 3.5's layers as transformers writes them (``models/qwen3_next/modeling_qwen3_next.py``,
``models/qwen3_5/modeling_qwen3_5.py``): gated delta nets over PyTorch's operators, or over the kernels of
flash-linear-attention and causal_conv1d, which ``use_kernel_func_from_hub_with_fallback`` takes where they are
installed, and attention with a gate.

Variables of functions live until these return, and so do those here. Shapes: b micro-batch, s tokens, h hidden, a heads
of d features, g heads of keys; of a delta net m channels of the convolution, v heads of e features of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from ..values import dataclass
from . import delta_operators, gated_delta, ops
from .autograd import Recorder, Shape, Tensor
from .gated_delta import Sizes
from .gradients import viewed
from .huggingface import LayerShape, linear, silu


@dataclass(slots=True)
class Projected:
    """What a delta net's projections give."""

    channels: Tensor
    """(b, s, m), for the convolution."""
    gate: Tensor
    """(b, s, v, e)."""
    steps: Tensor
    rates: Tensor
    """(b, s, v) each."""
    until_split: list[Tensor] = field(default_factory=list)
    """Variables that what the convolution gives takes,"""
    until_end: list[Tensor] = field(default_factory=list)
    """and others."""
    parts_gate: bool = False
    """The gate is part of rows whose heads are not apart: a row for each head is a copy."""


Projecting = Callable[[Recorder, Tensor, Sizes], Projected]

CONVOLUTION = "convolution"
NUMBERS = "numbers"
"""The module's own parameters."""


def sizes_of(shape: LayerShape) -> Sizes:
    spec = shape.spec
    heads = spec.linear_key_heads, spec.linear_value_heads
    features = spec.linear_key_head_dim, spec.linear_value_head_dim
    return Sizes(shape.b, shape.s, *heads, *features, spec.linear_conv_kernel)


def fused(r: Recorder) -> bool:
    """Whether flash-linear-attention and causal_conv1d are there."""
    return r.kernels is not None and r.kernels.delta


def each_projected(r: Recorder, x: Tensor, at: Sizes) -> Projected:
    """The four projections of ``Qwen3_5GatedDeltaNet.forward``. PyTorch's operators give gradients of the first channel
    by channel, of the last two head by head; on fake tensors ``softplus_backward`` has laid out those of the last."""
    several = not fused(r) and at.b > 1
    by_head = several and at.v > 1
    channels = linear(r, x, "delta_qkv", at.m, False, strided=several)
    gate = linear(r, x, "delta_gate", at.v * at.e, False)
    b = linear(r, x, "delta_b", at.v, False, strided=by_head)
    a = linear(r, x, "delta_a", at.v, False, strided=by_head and r.accumulates_in_place)
    return Projected(channels, gate.view(*at.values), b, a)


def projected_together(r: Recorder, x: Tensor, at: Sizes) -> Projected:
    """Those of ``Qwen3NextGatedDeltaNet.forward``, and ``fix_query_key_value_ordering``: for each key head its query
    and key, and what its value heads have. Parts of rows are copied where heads are not apart already."""
    each = at.v // at.k
    heads, numbers = (at.b, at.s, at.k, each * at.e), (at.b, at.s, at.k, each)
    keys, values = (at.b, at.s, at.k * at.d), (at.b, at.s, at.v * at.e)
    wide = linear(r, x, "delta_qkvz", at.m + at.v * at.e, False)
    narrow = linear(r, x, "delta_ba", 2 * at.v, False)
    q, k, v, gate = ops.split(r, wide.view(*heads[:3], 2 * (at.d + each * at.e)), [at.groups] * 2 + [heads] * 2, "qkvz")
    b, a = ops.split(r, narrow.view(*numbers[:3], 2 * each), [numbers] * 2, "ba")

    def laid_out(x: Tensor, shape: Shape, name: str) -> Tensor:
        return ops.contiguous(r, x, shape, f"{name}_laid_out") if at.k > 1 else x.view(*shape)

    if each > 1:
        v, gate = laid_out(v, values, "value"), laid_out(gate, at.values, "delta_gate")
        b, a = laid_out(b, at.heads, "delta_b"), laid_out(a, at.heads, "delta_a")
    q, k = laid_out(q, keys, "query"), laid_out(k, keys, "key")
    v = v if each > 1 else laid_out(v, values, "value")
    channels = r.empty(at.channels, q.dtype, "channels").by(r.node((q, k, v), (), viewed(q, k, v)))
    numbers_of = b.view(*at.heads), a.view(*at.heads)
    parts = each > 1 and at.k == 1
    return Projected(channels, gate.view(*at.values), *numbers_of, [q, k, v], [wide, narrow], parts_gate=parts)


def delta_net(r: Recorder, x: Tensor, shape: LayerShape, projecting: Projecting) -> Tensor:
    """``GatedDeltaNet.forward`` of (b, s, h), without a cache."""
    spec, at, dtype = shape.spec, sizes_of(shape), x.dtype
    bias, log = (r.parameter(f"{NUMBERS}.{name}", (at.v,), dtype) for name in ("dt_bias", "A_log"))
    made = projecting(r, x, at)
    weight = r.parameter(f"{CONVOLUTION}.weight", (at.m, 1, at.kernel), dtype)
    convolution = gated_delta.channels_convolution if fused(r) else delta_operators.convolution
    made.channels = convolution(r, made.channels, weight, at)
    made.until_split.clear()
    keys = (at.b, at.s, at.k * at.d)
    q, k, v = ops.split(r, made.channels, [keys, keys, (at.b, at.s, at.v * at.e)], "channels")
    q, k, v = q.view(*at.groups), k.view(*at.groups), v.view(*at.values)
    if not fused(r):
        q, k, v = delta_operators.gradients_laid_out(r, q, k, v, at)
    beta = ops.elementwise(r, "beta", (made.steps,), saves_output=True)
    decay = gated_delta.decay(r, made.rates, log, bias)
    read = [q, k, v, decay, beta]
    out = gated_delta.rule_of_normed(r, read, at, strided=True) if fused(r) else delta_operators.rule(r, read, at)
    if made.parts_gate:
        made.gate = ops.contiguous(r, made.gate, at.values, "delta_gate_laid_out")
    out = gated_norm(r, out, made.gate)
    return linear(r, out.view(at.b, at.s, at.v * at.e), "delta_output", spec.hidden, False)


def gated_norm(r: Recorder, x: Tensor, gate: Tensor) -> Tensor:
    """``RMSNormGated.forward``: a norm, cast before its weight multiplies it, times ``silu(gate)`` in fp32."""
    name, dtype = "delta_norm", x.dtype
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), dtype)
    x, _variance = normed(r, ops.cast(r, x, "fp32", f"{name}_fp32"), name)
    x = ops.multiply(r, weight, ops.cast(r, x, dtype, f"{name}_cast"), f"{name}_weighed")
    x = ops.multiply(r, x, silu(r, ops.cast(r, gate, "fp32", "delta_gate_fp32")), f"{name}_gated")
    return ops.cast(r, x, dtype, name)


def normed(r: Recorder, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """``x * rsqrt(variance + eps)``, and ``variance``, a variable."""
    variance = ops.mean_last(r, ops.power(r, x, f"{name}_square"), f"{name}_variance")
    return ops.multiply(r, x, _deviation(r, variance, name), f"{name}_normed"), variance


def _deviation(r: Recorder, variance: Tensor, name: str) -> Tensor:
    return ops.rsqrt(r, ops.add_constant(r, variance, f"{name}_eps"), f"{name}_rstd")
