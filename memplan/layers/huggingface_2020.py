"""GPT-2 as transformers 3.x wrote it in October 2020, on PyTorch 1.6.

``modeling_gpt2.py`` of that time: ``Attention``, ``MLP``, ``Block``. It differs from today's in what
it keeps: PyTorch 1.6 saved the dividend of ``w / sqrt(d)`` although only a divisor's gradient needs
it, ``where`` keeps the mask as a bool copy, and with ``use_cache`` the keys and values of every block
stay with the model's output.

How keys and values stay is inferred from the readings of the thread that this recipe reproduces
(huggingface/transformers, "Almost Have Model Parallelism Working on GPT2 Fine-Tuning"): as views of
the fused projection, whose storage then stays beside the contiguous copies that ``bmm`` saved.
"""

from __future__ import annotations

from . import ends, ops
from .autograd import Gradients, Recorder, Tensor
from .ends import Embedded
from .huggingface import Heads, LayerShape, Shared, batched, gpt2_mlp, layer_norm, linear, product


def divide(r: Recorder, x: Tensor) -> Tensor:
    """``w / (float(v.size(-1)) ** 0.5)``: ``DivBackward0`` of PyTorch 1.6 saved its dividend."""
    return ops.elementwise(r, "scores_scaled", (x,), (x,))


def where_masked(r: Recorder, x: Tensor, s: int) -> Tensor:
    """``torch.where(mask.bool(), w, masked_bias)``: saves the condition, (1, 1, s, s) bool."""
    condition = r.empty((1, 1, s, s), "bool", "mask_bool")
    shape, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> tuple[Tensor | None, ...]:
        return (r.empty(shape, dtype, "grad_scores_masked"),)

    node = r.node((x,), (condition,), backward)
    out = r.empty(shape, dtype, "scores_masked")
    out.node = node
    return out


def attention(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """``Attention.forward`` and ``_attn``."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    q, k, v = ops.split(r, qkv, [(b, a, s, d)] * 3, "qkv", keeps=True)
    del qkv
    scores = (b, a, s, s)
    w = product(r, Heads(q, True), Heads(k, True), ("query", "key"), scores, "scores")
    w = divide(r, w)
    w = where_masked(r, w, s)
    w = ops.softmax(r, w, "probabilities")
    w = ops.dropout(r, w, spec.attention_dropout, "attention_dropout")
    out = ops.matmul(r, w, batched(r, Heads(v, True), "value"), (b, a, s, d), "context")
    del w
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out  # noqa: RET504 - the variables end their tensors' lives


def gpt2_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Block.forward``."""
    normed = layer_norm(r, hidden, "attention_norm")
    attended = attention(r, normed, shape)
    del normed
    hidden = ops.add(r, attended, hidden, "residual_attention")
    normed = layer_norm(r, hidden, "mlp_norm")
    fed = gpt2_mlp(r, normed, shape.spec)
    del normed
    hidden = ops.add(r, hidden, fed, "residual_mlp")
    return hidden  # noqa: RET504


def gpt2_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPT2Model.forward`` up to the first block; the mask is a buffer of every block."""
    return ends.gpt2_embedding(r, shape, makes_mask=False)


LAYERS = {"gpt2": gpt2_layer}
EMBEDDINGS = {"gpt2": gpt2_embedding}
