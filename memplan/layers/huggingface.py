"""Transformer layers as Hugging Face transformers (5.x) writes them, whole on one device.

``models/gpt2/modeling_gpt2.py``, ``models/bert/modeling_bert.py``, ``models/llama/modeling_llama.py``
(Mistral's is the same; Qwen 3 adds head norms). A tensor that a module's Python keeps in a variable
is kept here in a variable of the same scope, which is what ends its life at the same line. Whether a tensor
without a variable, made in a call's arguments, ends within the call or behind it depends on Python's version:
such a call has one of these at most, and does not end it early by giving its name to another tensor.
Shapes: b micro-batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Recorder, Shape, Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One micro-batch of one architecture on one rank."""

    spec: ModelSpec
    b: int
    s: int
    dtype: str
    flash: bool


@dataclass(slots=True)
class Shared:
    """Tensors that one forward pass makes once and every layer reads."""

    mask: Tensor | None = None
    """Additive mask (b or 1, 1, s, s)."""
    cos: Tensor | None = None
    sin: Tensor | None = None
    position_ids: Tensor | None = None
    """(1, s), where layers are handed them without reading them."""


Layer = Callable[[Recorder, Tensor, Shared, LayerShape], Tensor]


# -- parts ------------------------------------------------------------------------------------------


def linear(r: Recorder, x: Tensor, name: str, n: int, bias: bool) -> Tensor:
    """A ``Linear`` or ``Conv1D`` called ``name`` with ``n`` outputs."""
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), x.dtype)
    return ops.linear(r, x, weight, r.parameter(f"{name}.bias", (n,), x.dtype) if bias else None, name=name)


def layer_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    bias = r.parameter(f"{name}.bias", (x.shape[-1],), x.dtype)
    return ops.layer_norm(r, x, weight, bias, name)


def rms_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``LlamaRMSNorm.forward``: in fp32, by Python operators."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    dtype = x.dtype
    hidden = ops.cast(r, x, "fp32", f"{name}_fp32")
    variance = ops.mean_last(r, ops.power(r, hidden, f"{name}_square"), f"{name}_variance")
    deviation = f"{name}_rstd"
    hidden = ops.multiply(
        r, hidden, ops.rsqrt(r, ops.add_constant(r, variance, f"{name}_eps"), deviation), f"{name}_normed"
    )
    return ops.multiply(r, weight, ops.cast(r, hidden, dtype, f"{name}_cast"), name)


def norm(r: Recorder, x: Tensor, spec: ModelSpec, name: str) -> Tensor:
    return rms_norm(r, x, name) if spec.norm == "rmsnorm" else layer_norm(r, x, name)


def gelu(r: Recorder, x: Tensor) -> Tensor:
    """``aten::gelu``: one kernel that saves its input."""
    return ops.elementwise(r, "gelu", (x,), (x,))


def gelu_new(r: Recorder, x: Tensor) -> Tensor:
    """``NewGELUActivation``: ``0.5 x (1 + tanh(c (x + 0.044715 x³)))`` as eight Python operators."""

    def inner() -> Tensor:
        return ops.add(r, x, ops.scale(r, ops.power(r, x, "cube"), "cube_scaled"), "inner")

    half = ops.scale(r, x, "half_input")
    return _times(r, half, ops.add_constant(r, ops.tanh(r, ops.scale(r, inner(), "inner_scaled")), "one_plus_tanh"))


def _times(r: Recorder, x: Tensor, y: Tensor) -> Tensor:
    return ops.multiply(r, x, y, "gelu")


def silu(r: Recorder, x: Tensor) -> Tensor:
    """``aten::silu``: one kernel that saves its input."""
    return ops.elementwise(r, "silu", (x,), (x,))


def activation(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    return gelu_new(r, x) if spec.activation == "gelu_new" else gelu(r, x)


# -- attention --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Heads:
    """Queries, keys or values as (b, a, s, d), and how they lie in memory."""

    tensor: Tensor
    transposed: bool
    """A view of (b, s, a, d), which a batched product copies unless b = 1."""


def batched(r: Recorder, x: Heads, name: str) -> Tensor:
    """As ``matmul`` folds batch and heads into one dimension: a copy where the layout forbids a view."""
    if x.transposed and x.tensor.shape[0] > 1:
        return ops.contiguous(r, x.tensor, x.tensor.shape, f"{name}_contiguous")
    return x.tensor


def product(r: Recorder, x: Heads, y: Heads, names: tuple[str, str], shape: Shape, name: str) -> Tensor:
    """``matmul`` of heads, whose copies end with it."""
    left, right = batched(r, x, names[0]), batched(r, y, names[1])
    return ops.matmul(r, left, right, shape, name)


def eager_attention(
    r: Recorder, q: Heads, k: Heads, v: Heads, shared: Shared, shape: LayerShape
) -> tuple[Tensor, Tensor]:
    """``eager_attention_forward``: scores (b, a, s, s) in memory.

    The Llama family takes the softmax in fp32, the others in the scores' dtype.
    """
    spec = shape.spec
    b, a, s, d = q.tensor.shape
    if spec.heads > spec.kv_heads:
        k, v = repeated(r, k, a, "key"), repeated(r, v, a, "value")
    scores = (b, a, s, s)
    weights = ops.scale(r, product(r, q, k, ("query", "key"), scores, "scores"), "scores_scaled")
    if shared.mask is not None:
        weights = ops.add_constant(r, weights, "scores_masked")
    if spec.norm == "rmsnorm":
        weights = ops.cast(r, softmax_fp32(r, weights), shape.dtype, "probabilities")
    else:
        weights = ops.softmax(r, weights, "probabilities")
    weights = ops.dropout(r, weights, spec.attention_dropout, "attention_dropout")
    out = ops.matmul(r, weights, batched(r, v, "value"), (b, a, s, d), "context")
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    return out, weights


def repeated(r: Recorder, x: Heads, a: int, name: str) -> Heads:
    """``repeat_kv``: ``expand`` then ``reshape``, which is a copy unless there is one head only."""
    b, heads, s, d = x.tensor.shape
    return Heads(ops.expanded(r, x.tensor, (b, a, s, d), f"{name}_repeated", copies=heads > 1), heads == 1)


def softmax_fp32(r: Recorder, x: Tensor) -> Tensor:
    """``softmax(x, dtype=float32)``: one kernel for fp16 on CUDA (``SoftMax.cpp``, ``half_to_float``), else a cast."""
    if x.dtype == "fp16":
        return ops.softmax(r, x, "probabilities_fp32", "fp32")
    return ops.softmax(r, ops.cast(r, x, "fp32", "scores_fp32"), "probabilities_fp32")


def attention(
    r: Recorder, q: Heads, k: Heads, v: Heads, shared: Shared, shape: LayerShape
) -> tuple[Tensor, Tensor | None]:
    """The attention that the plan names, on (b, a, s, d), giving (b, s, a d)."""
    if not shape.flash:
        return eager_attention(r, q, k, v, shared, shape)
    out = ops.flash_attention(r, q.tensor, k.tensor, v.tensor)
    b, a, s, d = q.tensor.shape
    return out.view(b, s, a * d), None


def rotate_half(r: Recorder, x: Tensor, name: str) -> Tensor:
    half = x.shape[-1] // 2
    first = ops.slice_last(r, x, half, f"{name}_first_half")
    second = ops.slice_last(r, x, x.shape[-1] - half, f"{name}_second_half")
    return ops.cat_last(r, ops.scale(r, second, f"{name}_negated"), first, f"{name}_rotated")


def rotary_one(r: Recorder, x: Tensor, shared: Shared, name: str) -> Tensor:
    assert shared.cos is not None
    assert shared.sin is not None
    kept = ops.multiply(r, x, shared.cos, f"{name}_cos")
    turned = ops.multiply(r, rotate_half(r, x, name), shared.sin, f"{name}_sin")
    return ops.add(r, kept, turned, f"{name}_rotary")


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: five operators each."""
    q_out = rotary_one(r, q, shared, "query")
    k_out = rotary_one(r, k, shared, "key")
    return q_out, k_out


# -- Llama, Mistral, Qwen 3 -------------------------------------------------------------------------


def llama_projection(r: Recorder, hidden: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """A projection as (b, a, s, d); queries and keys of Qwen 3 are normed per head."""
    spec, b, s, d = shape.spec, shape.b, shape.s, shape.spec.head_dim
    x = linear(r, hidden, name, heads * d, spec.attention_bias)
    if heads > 1 and (name != "value" or not shape.flash):
        x = ops.copied_gradient(r, x, name)
    if name != "value" and spec.qk_norm:
        return rms_norm(r, x.view(b, s, heads, d), f"{name}_norm").view(b, heads, s, d)
    return x.view(b, heads, s, d)


def llama_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec = shape.spec
    q = llama_projection(r, hidden, "query", spec.heads, shape)
    k = llama_projection(r, hidden, "key", spec.kv_heads, shape)
    v = llama_projection(r, hidden, "value", spec.kv_heads, shape)
    q, k = rotary(r, q, k, shared)
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def llama_mlp(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    return linear(r, gated(r, x, spec), "down", spec.hidden, spec.mlp_bias)


def gated(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``act_fn(gate_proj(x)) * up_proj(x)``."""
    gate = silu(r, linear(r, x, "gate", spec.ffn, spec.mlp_bias))
    up = linear(r, x, "up", spec.ffn, spec.mlp_bias)
    return ops.multiply(r, gate, up, "gated")


def llama_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``LlamaDecoderLayer.forward``."""
    residual = hidden
    hidden = rms_norm(r, hidden, "attention_norm")
    hidden, _ = llama_attention(r, hidden, shared, shape)
    hidden = ops.add(r, residual, hidden, "residual_attention")
    residual = hidden
    hidden = rms_norm(r, hidden, "mlp_norm")
    hidden = llama_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


# -- GPT-2 ------------------------------------------------------------------------------------------


def gpt2_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    q, k, v = ops.split(r, linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias), [(b, a, s, d)] * 3, "qkv")
    if not shape.flash:
        q, v = ops.copied_gradient(r, q, "query"), ops.copied_gradient(r, v, "value")
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out, weights


def gpt2_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout")
    return hidden  # noqa: RET504


def gpt2_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GPT2Block.forward``."""
    residual = hidden
    hidden = layer_norm(r, hidden, "attention_norm")
    attended, _ = gpt2_attention(r, hidden, shared, shape)
    hidden = ops.add(r, attended, residual, "residual_attention")
    residual = hidden
    hidden = layer_norm(r, hidden, "mlp_norm")
    fed = gpt2_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, residual, fed, "residual_mlp")
    return hidden  # noqa: RET504


# -- BERT -------------------------------------------------------------------------------------------


def bert_self_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim

    def project(name: str) -> Tensor:
        x = linear(r, hidden, name, a * d, spec.attention_bias)
        if not shape.flash and (name != "key" or b > 1):
            x = ops.copied_gradient(r, x, name)
        return x.view(b, a, s, d)

    q, k, v = project("query"), project("key"), project("value")
    return attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)


def bert_output(r: Recorder, hidden: Tensor, residual: Tensor, name: str, spec: ModelSpec) -> Tensor:
    """``BertSelfOutput`` and ``BertOutput``: dense, dropout, norm of the sum."""
    hidden = linear(r, hidden, name, spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, f"{name}_dropout")
    hidden = layer_norm(r, ops.add(r, hidden, residual, f"{name}_residual"), f"{name}_norm")
    return hidden  # noqa: RET504


def bert_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``BertLayer.forward``: post-norm."""
    output, _ = bert_attention(r, hidden, shared, shape)
    attended = output
    return bert_feed_forward(r, attended, shape.spec)


def bert_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``BertAttention.forward``."""
    attended, weights = bert_self_attention(r, hidden, shared, shape)
    attended = bert_output(r, attended, hidden, "attention_output", shape.spec)
    return attended, weights


def bert_feed_forward(r: Recorder, attended: Tensor, spec: ModelSpec) -> Tensor:
    """``feed_forward_chunk``."""
    intermediate = activation(r, linear(r, attended, "up", spec.ffn, spec.mlp_bias), spec)
    return bert_output(r, intermediate, attended, "down", spec)


LAYERS: dict[str, Layer] = {
    "gpt2": gpt2_layer,
    "gpt": gpt2_layer,
    "bert": bert_layer,
    "llama": llama_layer,
    "mistral": llama_layer,
    "qwen3": llama_layer,
}
"""The layer of each family; a family that is missing has no recipe here."""
