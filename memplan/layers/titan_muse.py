"""torchtitan's Muse Glimmer as its main branch has it in August 2026 (commit b5bcd76), without its vision tower.

``torchtitan/models/muse_glimmer/model.py`` (``RMSGainCenterNorm``, ``Attention``, ``MuseGlimmerTransformerBlock``,
``SoftCappedLinear``, ``EmbeddingWithNorm``), ``models/common/attention.py`` (``QKVLinear``, ``VarlenAttention``),
``models/common/rope.py`` (``ComplexRoPE``). Shapes: n = b s tokens of a micro-batch, h hidden, a heads, g heads of
keys, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tape.events import Category
from . import ops, torchtitan
from .autograd import Gradients, Recorder, Tensor
from .gradients import by_way_of
from .huggingface import LayerShape
from .titan_gpt_oss import checked, of_all_ranks, varlen_attention
from .torchtitan import Operator, Policy, feed_forward

LOGITS = Category.LOGITS


def gain_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``RMSGainCenterNorm.forward``: the norm's weight is the parameter and a number, a tensor of its own."""
    weight = ops.add_constant(r, r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype), f"{name}_weight_centred")
    return norm_of(r, x, name, weight)


def norm_of(r: Recorder, x: Tensor, name: str, weight: Tensor | None = None) -> Tensor:
    """``F.rms_norm`` as one kernel: saves input, weight if there is one, and the reciprocal deviation in fp32."""
    shape, dtype, weighs = x.shape, x.dtype, weight is not None
    out = r.empty(shape, dtype, name)
    deviation = r.empty((*shape[:-1], 1), "fp32", f"{name}_rstd")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = r.empty(shape, dtype, f"grad_{name}")
        return [made, r.empty(shape[-1:], dtype, f"grad_{name}_weight") if weighs else None][: 1 + weighs]

    inputs = (x,) if weight is None else (x, weight)
    return out.by(r.node(inputs, (*inputs, deviation), backward))


def block(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, _: Tensor | None = None) -> Tensor:
    """``MuseGlimmerTransformerBlock.forward``: norms before and behind attention and MLP."""
    whole = x.shape
    x = x.view(shape.b * shape.s, shape.spec.hidden)
    made = gain_norm(r, attention(r, gain_norm(r, x, "attention_norm"), shape, policy), "post_attention_norm")
    h = ops.add(r, x, made, "residual_attention")
    del made
    made = gain_norm(r, feed_forward(r, gain_norm(r, h, "mlp_norm"), shape, policy), "post_mlp_norm")
    return ops.add(r, h, made, "residual_mlp").view(*whole)


def attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``Attention.forward`` of (n, h): a gate of as many features as heads have; every fourth layer has no positions,
    and none has a window there."""
    spec, n = shape.spec, x.shape[0]
    a, g, d = spec.heads, spec.kv_heads, spec.head_dim
    q = policy.linear(r, x, "query", a * d).view(n, a, d)
    k = policy.linear(r, x, "key", g * d).view(n, g, d)
    v = policy.linear(r, x, "value", g * d).view(n, g, d)
    q = ops.scale(r, norm_of(r, q, "query_norm"), "query_scaled")
    k = norm_of(r, k, "key_norm")
    if shape.turns:
        q, k = rotary(r, q, k)
    whole = of_all_ranks(r, k, v, shape)
    out = policy.run(r, lambda r: varlen_attention(r, q, whole[0], whole[1], shape, alone=True)[0]).view(n, a * d)
    whole.clear()
    gate = ops.elementwise(r, "gate_sigmoid", (policy.linear(r, x, "output_gate", a * d),), saves_output=True)
    out = ops.multiply(r, out, gate, "attention_gated")
    del gate
    return policy.linear(r, out, "attention_output", spec.hidden)


def rotary(r: Recorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """``ComplexRoPE.forward``: rows of the layer's own table by positions, as complex fp32 numbers."""
    n, dtype, d = q.shape[0], q.dtype, q.shape[-1]
    checked(r, n)
    rows = r.empty((n, d), "fp32", "rope_rows")
    wide = ops.cast(r, q, "fp32", "query_fp32"), ops.cast(r, k, "fp32", "key_fp32")
    q_out, k_out = (turned(r, one, rows, name) for one, name in zip(wide, ("query", "key"), strict=True))
    return ops.cast(r, q_out, dtype, "query_rotary"), ops.cast(r, k_out, dtype, "key_rotary")


def turned(r: Recorder, x: Tensor, rows: Tensor, name: str) -> Tensor:
    """Times rows of the table, which are saved; backward's product is with the conjugate, a tensor of its own."""
    backward = by_way_of((rows.shape, "fp32", "rope_rows_conjugate"), (x.shape, "fp32", f"grad_{name}_complex"))
    return r.output((x,), (rows,), backward, x.shape, "fp32", f"{name}_complex")


def embedding(r: Recorder, shape: LayerShape) -> Tensor:
    """``EmbeddingWithNorm.forward``."""
    return norm_of(r, torchtitan.embedding(r, shape), "embedding_norm")


def capped(r: Recorder, product: Operator) -> Tensor:
    """``SoftCappedLinear.forward``: ``c tanh(x m / c)`` of its ``product`` in fp32."""
    wide = ops.cast(r, product(r), "fp32", "logits_fp32", LOGITS)

    def made(name: str, x: Tensor, *, saves: bool = False) -> Tensor:
        return ops.elementwise(r, name, (x,), saves_output=saves, category=LOGITS)

    tanh = made("logits_tanh", made("logits_divided", made("logits_multiplied", wide)), saves=True)
    return made("logits_capped", tanh)
