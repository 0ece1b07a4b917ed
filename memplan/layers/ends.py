"""What lies before and after the layers in Hugging Face transformers: embeddings, final norm, head and loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tape import Category
from . import ops
from .autograd import Recorder, Tensor
from .huggingface import LayerShape, Shared, activation, layer_norm, linear, norm


@dataclass(slots=True)
class Embedded:
    """What the embedding leaves behind for the rest of the model."""

    hidden: Tensor
    shared: Shared
    frame: list[Tensor] = field(default_factory=list)
    """Tensors in variables of ``model.forward``, alive until it returns."""


def token_ids(r: Recorder, shape: LayerShape, b: int | None = None) -> Tensor:
    """int64 indices made outside the model (held as inputs, not here)."""
    return r.outside((shape.b if b is None else b, shape.s), "int64", Category.INPUTS)


def positions(r: Recorder, s: int) -> Tensor:
    """``torch.arange(s) + past_seen_tokens``."""
    arange = r.empty((s,), "int64", "arange")
    ids = r.empty((s,), "int64", "position_ids")
    del arange
    return ids.view(1, s)


def causal_mask(r: Recorder, shape: LayerShape) -> Tensor | None:
    """The additive mask (b, 1, s, s) of eager attention (``masking_utils.py``); flash attention needs none.

    Made from a boolean one; the copies in between are temporaries.
    """
    if shape.flash or not shape.spec.causal:
        return None
    s = shape.s
    allowed = r.empty((1, 1, s, s), "bool", "causal_mask_bool")
    mask = r.empty((shape.b, 1, s, s), shape.dtype, "causal_mask")
    del allowed
    return mask


def rotary_tables(r: Recorder, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``LlamaRotaryEmbedding.forward``: cos and sin (1, s, d), made in fp32 and cast."""
    s, d = shape.s, shape.spec.head_dim
    frequencies = r.empty((1, s, d // 2), "fp32", "rotary_frequencies")
    angles = r.empty((1, s, d), "fp32", "rotary_angles")
    cos, sin = r.empty((1, s, d), "fp32", "cos_fp32"), r.empty((1, s, d), "fp32", "sin_fp32")
    cos = ops.cast(r, cos, shape.dtype, "cos")
    sin = ops.cast(r, sin, shape.dtype, "sin")
    del frequencies, angles
    return cos, sin


def gpt2_embedding(r: Recorder, shape: LayerShape, *, makes_mask: bool = True) -> Embedded:
    """``GPT2Model.forward`` up to the first block; in 2020 each block had the mask as a buffer instead."""
    spec = shape.spec
    word = r.parameter("word.weight", (spec.vocab, spec.hidden), shape.dtype)
    inputs_embeds = ops.embedding(r, word, token_ids(r, shape), "word_embeddings")
    position_ids = positions(r, shape.s)
    table = r.parameter("position.weight", (spec.positions_max, spec.hidden), shape.dtype)
    position_embeds = ops.embedding(r, table, position_ids, "position_embeddings")
    hidden = ops.add(r, inputs_embeds, position_embeds, "embedding_sum")
    mask = causal_mask(r, shape) if makes_mask else None
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    return Embedded(hidden, Shared(mask), [position_embeds, inputs_embeds])


def llama_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``LlamaModel.forward`` up to the first layer."""
    spec = shape.spec
    word = r.parameter("word.weight", (spec.vocab, spec.hidden), shape.dtype)
    inputs_embeds = ops.embedding(r, word, token_ids(r, shape), "word_embeddings")
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin), [position_ids])


def bert_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``BertEmbeddings.forward``."""
    spec, dtype, h = shape.spec, shape.dtype, shape.spec.hidden
    types = r.empty((1, shape.s), "int64", "token_type_ids")
    words = ops.embedding(r, r.parameter("word.weight", (spec.vocab, h), dtype), token_ids(r, shape), "word_embeddings")
    kinds = ops.embedding(
        r,
        r.parameter("token_type.weight", (spec.token_types, h), dtype),
        types.view(shape.b, shape.s),
        "token_type_embeddings",
    )
    hidden = ops.add(r, words, kinds, "embedding_sum")
    table = r.parameter("position.weight", (spec.positions_max, h), dtype)
    places = ops.embedding(r, table, token_ids(r, shape, 1), "position_embeddings")
    hidden = ops.add(r, hidden, places, "embedding_sum")
    hidden = layer_norm(r, hidden, "embedding_norm")
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    return Embedded(hidden, Shared())


EMBEDDINGS = {
    "gpt2": gpt2_embedding,
    "gpt": gpt2_embedding,
    "bert": bert_embedding,
    "llama": llama_embedding,
    "mistral": llama_embedding,
    "qwen3": llama_embedding,
}


def final_norm(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    return norm(r, hidden, shape.spec, "final_norm")


def mlm_transform(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """``BertPredictionHeadTransform``."""
    hidden = linear(r, hidden, "transform", shape.spec.hidden, True)
    hidden = activation(r, hidden, shape.spec)
    hidden = layer_norm(r, hidden, "transform_norm")
    return hidden  # noqa: RET504


def head(r: Recorder, hidden: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """The language-model head and its loss: ``(loss, logits)``, with the logits as the model returns them.

    Causal: ``ForCausalLMLoss`` (``loss/loss_utils.py``) upcasts the logits to fp32 and pads the labels.
    BERT: the cross entropy is taken in the logits' own dtype.
    """
    spec, b, s, dtype = shape.spec, shape.b, shape.s, shape.dtype
    weight = r.parameter("word.weight" if spec.tied_embeddings else "head.weight", (spec.vocab, spec.hidden), dtype)
    if spec.mlm_head:
        hidden = mlm_transform(r, hidden, shape)
    bias = r.parameter("head.bias", (spec.vocab,), dtype) if spec.mlm_head else None
    logits = ops.linear(r, hidden, weight, bias, name="logits", category=Category.LOGITS)
    if not spec.causal:
        return cross_entropy(r, logits, token_ids(r, shape)), logits
    upcast = ops.cast(r, logits, "fp32", "logits_fp32", Category.LOGITS)
    labels = r.empty((b, s + 1), "int64", "labels_padded")
    if b > 1:
        labels = r.empty((b, s), "int64", "labels_shifted")
    return cross_entropy(r, upcast, labels), logits


def cross_entropy(r: Recorder, logits: Tensor, labels: Tensor) -> Tensor:
    """``F.cross_entropy``: ``log_softmax``, then ``nll_loss``."""
    return ops.nll_loss(r, ops.log_softmax(r, logits), labels)
