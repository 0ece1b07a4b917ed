"""Transformer layers as Hugging Face transformers (5.x) writes them, whole on one device.

``models/gpt2/modeling_gpt2.py``, ``models/bert/modeling_bert.py``, and the families of the modules beside this one.
How tensors end: ``layers.huggingface_parts``.
Shapes: b micro-batch, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

from ..plan.spec import ModelSpec
from . import ops
from .autograd import Recorder, Tensor
from .huggingface_falcon import falcon_layer
from .huggingface_gemma2 import gemma2_layer
from .huggingface_gptj import gptj_layer
from .huggingface_llama import llama_layer
from .huggingface_neox import neox_layer
from .huggingface_opt import opt_layer
from .huggingface_parts import (
    Heads,
    Layer,
    LayerShape,
    Shared,
    activation,
    attention,
    batched,
    layer_norm,
    linear,
    norm,
    product,
    silu,
)
from .huggingface_phi3 import phi3_layer

__all__ = [
    "LAYERS",
    "Heads",
    "LayerShape",
    "Shared",
    "activation",
    "batched",
    "gpt2_mlp",
    "layer_norm",
    "linear",
    "norm",
    "product",
    "silu",
]


# -- GPT-2 ------------------------------------------------------------------------------------------


def gpt2_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias, conv1d=True)
    q, k, v = ops.split(r, qkv, [(b, a, s, d)] * 3, "qkv")
    del qkv
    if not shape.flash:
        q, v = ops.copied_gradient(r, q, "query"), ops.copied_gradient(r, v, "value")
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias, conv1d=True)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out, weights


def gpt2_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias, conv1d=True)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias, conv1d=True)
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
        strided = not shape.flash and name == "key" and b > 1
        x = linear(r, hidden, name, a * d, spec.attention_bias, strided=strided)
        if not shape.flash and name != "key":
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
    "qwen2": llama_layer,
    "phi3": phi3_layer,
    "gemma2": gemma2_layer,
    "opt": opt_layer,
    "gpt_neox": neox_layer,
    "gptj": gptj_layer,
    "falcon": falcon_layer,
}
"""The layer of each family; a family that is missing has no recipe here."""
