"""GPT-J's layer (``models/gptj/modeling_gptj.py``): attention and MLP side by side behind one norm."""

from __future__ import annotations

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Recorder, Tensor
from .huggingface_parts import (
    Heads,
    LayerShape,
    Shared,
    activation,
    layer_norm,
    linear,
    product,
    weights_before,
)


def turned(r: Recorder, x: Tensor, sincos: Tensor, name: str) -> Tensor:
    """``apply_rotary_pos_emb`` on (b, s, a, d), neighbouring features in pairs; sines and cosines are widened first."""

    def widened(name: str) -> Tensor:
        """``repeat_interleave`` of half of (1, s, d): (1, s, 1, d)."""
        _, s, d = sincos.shape
        return r.empty((1, s, 1, d), sincos.dtype, name)

    def rotate_every_two() -> Tensor:
        half = x.shape[-1] // 2
        even = ops.slice_last(r, x, half, f"{name}_even")
        odd = ops.slice_last(r, x, half, f"{name}_odd")
        return ops.cat_last(r, ops.scale(r, odd, f"{name}_negated"), even, f"{name}_rotated")

    sin = widened(f"{name}_sin")
    cos = widened(f"{name}_cos")
    kept = ops.multiply(r, x, cos, f"{name}_kept")
    crossed = ops.multiply(r, rotate_every_two(), sin, f"{name}_crossed")
    return ops.add(r, kept, crossed, f"{name}_turned")


def gptj_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``GPTJAttention.forward``: every layer repeats its table of positions and gathers rows of it."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    n = spec.rotary_features
    query = linear(r, hidden, "query", a * d, spec.attention_bias).view(b, s, a, d)
    key = linear(r, hidden, "key", a * d, spec.attention_bias).view(b, s, a, d)
    value = linear(r, hidden, "value", a * d, spec.attention_bias)
    if a > 1:
        value = ops.copied_gradient(r, value, "value")
    value = value.view(b, a, s, d)
    _table = r.empty((1, spec.positions_max, n), "fp32", "positions_repeated")
    _rows = r.empty((1, s, n), "int64", "position_ids_repeated")
    sincos = ops.cast(r, r.empty((1, s, n), "fp32", "sincos_fp32"), key.dtype, "sincos")
    k_rot = ops.slice_last(r, key, n, "key_rotary")
    k_pass = ops.slice_last(r, key, d - n, "key_passed")
    q_rot = ops.slice_last(r, query, n, "query_rotary")
    q_pass = ops.slice_last(r, query, d - n, "query_passed")
    k_rot = turned(r, k_rot, sincos, "key")
    q_rot = turned(r, q_rot, sincos, "query")
    key = ops.cat_last(r, k_rot, k_pass, "key_whole").view(b, a, s, d)
    query = ops.cat_last(r, q_rot, q_pass, "query_whole").view(b, a, s, d)
    out, weights = gptj_scores(r, query, key, value, shared, spec)
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out, weights


def gptj_scores(
    r: Recorder, query: Tensor, key: Tensor, value: Tensor, shared: Shared, spec: ModelSpec
) -> tuple[Tensor, Tensor]:
    """``GPTJAttention._attn``: queries, keys and scores in fp32."""
    dtype, (b, a, s, d) = value.dtype, value.shape
    query = ops.cast(r, query, "fp32", "query_fp32")
    key = ops.cast(r, key, "fp32", "key_fp32")
    weights = product(r, Heads(query, True), Heads(key, True), ("query", "key"), (b, a, s, s), "scores")
    weights = ops.scale(r, weights, "scores_scaled")
    if shared.mask is not None:
        weights = ops.add_constant(r, weights, "scores_masked", shared.mask)
    weights = ops.softmax(r, weights, "probabilities_fp32")
    weights = ops.cast(r, weights, dtype, "probabilities")
    weights = ops.dropout(r, weights, spec.attention_dropout, "attention_dropout")
    out = product(r, Heads(weights, False), Heads(value, True), ("", "value"), (b, a, s, d), "context")
    return out, weights


def gptj_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def gptj_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GPTJBlock.forward``."""
    _before = weights_before(r, shape, r.autocast)
    residual = hidden
    hidden = layer_norm(r, hidden, "attention_norm")
    attended, _ = gptj_attention(r, hidden, shared, shape)
    fed = gptj_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, ops.add(r, attended, fed, "blocks_sum"), residual, "residual")
    return hidden  # noqa: RET504
