"""What lies before and after the layers in Hugging Face transformers: embeddings, final norm, head and loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tape import Category
from . import ops
from .autograd import Recorder, Tensor
from .huggingface_parts import LayerShape, Shared, activation, layer_norm, linear, norm


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


def causal_mask(r: Recorder, shape: LayerShape, *, window: bool = True, packed: bool = True) -> Tensor | None:
    """The additive mask (b, 1, s, s) of eager attention (``masking_utils.py``); flash attention needs none.

    ``packed``: packed rows are looked for either way (``find_packed_sequence_indices``), which takes the positions.
    ``window``: with the spec's, if any.
    """
    b, s = shape.b, shape.s
    if packed:
        look_for_packed_rows(r, b, s)
    if shape.flash:
        return None
    allowed = allowed_pairs(r, shape, window=window)
    zero, lowest = r.empty((), shape.dtype, "zero"), r.empty((), shape.dtype, "lowest")
    mask = r.empty((b, 1, s, s), shape.dtype, "causal_mask")
    del lowest, zero, allowed
    return mask


def look_for_packed_rows(r: Recorder, b: int, s: int) -> None:
    """Where position ids do not rise by one: seven short temporaries."""
    before = r.empty((b, 1), "int64", "position_before")
    prepended = r.empty((b, s + 1), "int64", "positions_prepended")
    steps = r.empty((b, s), "int64", "position_steps")
    del prepended
    breaks = r.empty((b, s), "bool", "position_breaks")
    rows = r.empty((b, s), "int64", "packed_rows")
    del breaks, before, steps, rows


def allowed_pairs(r: Recorder, shape: LayerShape, *, window: bool) -> Tensor:
    """Which token may look at which (``sdpa_mask``), (1, 1, s, s) bool; a sliding window is one more condition."""
    b, s = shape.b, shape.s
    pairs = (1, 1, s, s)
    batch, head = r.empty((b,), "int64", "batch_indices"), r.empty((1,), "int64", "head_indices")
    q, k = positions(r, s), positions(r, s)
    if shape.spec.sliding_window is None or not window:
        allowed = r.empty(pairs, "bool", "causal_mask_bool")
    else:
        true = r.empty((), "bool", "true")
        first = r.empty((1, 1, s, 1), "int64", "window_begins")
        inside = r.empty(pairs, "bool", "inside_window")
        del first
        windowed = r.empty(pairs, "bool", "window_mask_bool")
        del inside, true
        before = r.empty(pairs, "bool", "causal_mask_bool")
        allowed = r.empty(pairs, "bool", "sliding_mask_bool")
        del before, windowed
    del batch, head, q, k
    return allowed


def rotary_tables(r: Recorder, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``LlamaRotaryEmbedding.forward``: cos and sin (1, s, d), made in fp32, scaled and cast; d features turn."""
    s, d = shape.s, shape.spec.rotary_features

    def scaled(name: str) -> Tensor:
        return ops.scale(r, r.empty((1, s, d), "fp32", f"{name}_unscaled"), f"{name}_fp32")

    position_ids = r.empty((1, s, 1), "fp32", "position_ids_fp32")
    frequencies = r.empty((1, s, d // 2), "fp32", "rotary_frequencies")
    del position_ids
    angles = r.empty((1, s, d), "fp32", "rotary_angles")
    cos, sin = scaled("cos"), scaled("sin")
    tables = ops.cast(r, cos, shape.dtype, "cos"), ops.cast(r, sin, shape.dtype, "sin")
    del frequencies, angles, cos, sin
    return tables


def word_embeddings(r: Recorder, shape: LayerShape) -> Tensor:
    """Rows of the table of words, (b, s, h)."""
    word = r.parameter("word.weight", (shape.spec.vocab, shape.spec.hidden), shape.dtype)
    return ops.embedding(r, word, token_ids(r, shape), "word_embeddings")


def position_ids_are_shared(r: Recorder) -> bool:
    """GPT-2's model keeps them in a variable and hands them to its layers; a table that is trained saves them."""
    return r.tuning is not None and not r.tuning.trains("position.weight")


def gpt2_embedding(r: Recorder, shape: LayerShape, *, makes_mask: bool = True) -> Embedded:
    """``GPT2Model.forward`` up to the first block; in 2020 each block had the mask as a buffer instead."""
    spec = shape.spec
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    table = r.parameter("position.weight", (spec.positions_max, spec.hidden), shape.dtype)
    position_embeds = ops.embedding(r, table, position_ids, "position_embeddings")
    hidden = ops.add(r, inputs_embeds, position_embeds, "embedding_sum")
    mask = causal_mask(r, shape) if makes_mask else None
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    shared = Shared(mask, position_ids=position_ids if position_ids_are_shared(r) else None)
    return Embedded(hidden, shared, [inputs_embeds, position_embeds])


def llama_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``LlamaModel.forward`` up to the first layer; Falcon's makes its mask without looking at positions."""
    spec = shape.spec
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape, packed=spec.family != "falcon")
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids))


def gemma2_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Gemma2Model.forward`` up to the first layer: ``Gemma2TextScaledWordEmbedding``, and a mask of each kind."""
    inputs_embeds = r.embedded(scaled(r, word_embeddings(r, shape), shape))
    position_ids = positions(r, shape.s)
    full = causal_mask(r, shape, window=False)
    mask = causal_mask(r, shape)
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids, full))


def scaled(r: Recorder, embeddings: Tensor, shape: LayerShape) -> Tensor:
    """``* embed_scale.to(weight.dtype)``, a buffer of no dimension."""
    scale = r.outside((), shape.stored or shape.dtype, Category.BUFFERS)
    if scale.dtype != shape.dtype:
        scale = ops.cast(r, scale, shape.dtype, "embedding_scale_cast")
    return ops.multiply(r, embeddings, scale, "embedding_scaled")


def neox_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPTNeoXModel.forward`` up to the first layer."""
    spec = shape.spec
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    hidden = ops.dropout(r, inputs_embeds, spec.embedding_dropout, "embedding_dropout")
    cos, sin = rotary_tables(r, shape)
    frame = [inputs_embeds] if spec.embedding_dropout else []
    return Embedded(hidden, Shared(mask, cos, sin, position_ids), frame)


def gptj_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPTJModel.forward`` up to the first layer; each layer makes its own sines and cosines."""
    spec = shape.spec
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    hidden = ops.dropout(r, inputs_embeds, spec.embedding_dropout, "embedding_dropout")
    frame = [inputs_embeds] if spec.embedding_dropout else []
    return Embedded(hidden, Shared(mask, position_ids=position_ids), frame)


def opt_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``OPTDecoder.forward`` up to the first layer: positions are counted from a mask of ones, (b, s)."""
    spec, b, s = shape.spec, shape.b, shape.s
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    ones = r.empty((b, s), "fp32", "attention_mask")
    position_ids = counted_positions(r, b, s)
    mask = causal_mask(r, shape, packed=False)
    table = r.parameter("position.weight", (spec.position_offset + spec.positions_max, spec.hidden), shape.dtype)
    pos_embeds = ops.embedding(r, table, r.empty((b, s), "int64", "position_ids_offset"), "position_embeddings")
    hidden = ops.add(r, inputs_embeds, pos_embeds, "embedding_sum")
    return Embedded(hidden, Shared(mask, position_ids=position_ids), [inputs_embeds, ones, pos_embeds])


def counted_positions(r: Recorder, b: int, s: int) -> Tensor:
    """``(cumsum(mask) * mask - 1).long()``."""
    counted = r.empty((b, s), "fp32", "positions_counted")
    product = r.empty((b, s), "fp32", "positions_masked")
    fp32 = r.empty((b, s), "fp32", "positions_fp32")
    del product
    position_ids = r.empty((b, s), "int64", "position_ids")
    del fp32, counted
    return position_ids


def bert_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``BertEmbeddings.forward``."""
    spec, dtype, h = shape.spec, shape.dtype, shape.spec.hidden
    types = r.empty((1, shape.s), "int64", "token_type_ids")
    words = r.embedded(word_embeddings(r, shape))
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
    "qwen2": llama_embedding,
    "phi3": llama_embedding,
    "gemma2": gemma2_embedding,
    "opt": opt_embedding,
    "gpt_neox": neox_embedding,
    "gptj": gptj_embedding,
    "falcon": llama_embedding,
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
    transformed = mlm_transform(r, hidden, shape) if spec.mlm_head else hidden
    bias = r.parameter("head.bias", (spec.vocab,), dtype) if spec.mlm_head or spec.head_bias else None
    logits = ops.linear(r, transformed, weight, bias, name="logits", category=Category.LOGITS)
    del transformed
    if spec.logit_softcap is not None:
        logits = ops.elementwise(r, "logits_divided", (logits,), category=Category.LOGITS)
        logits = ops.elementwise(r, "logits_tanh", (logits,), saves_output=True, category=Category.LOGITS)
        logits = ops.elementwise(r, "logits_capped", (logits,), category=Category.LOGITS)
    if not spec.causal:
        return cross_entropy(r, logits, token_ids(r, shape)), logits
    upcast = ops.cast(r, logits, "fp32", "logits_fp32", Category.LOGITS)
    labels = shifted = r.empty((b, s + 1), "int64", "labels_padded")
    if b > 1:
        shifted = r.empty((b, s), "int64", "labels_shifted")
    loss = cross_entropy(r, upcast, shifted)
    del upcast, labels
    return loss, logits


def cross_entropy(r: Recorder, logits: Tensor, labels: Tensor) -> Tensor:
    """``F.cross_entropy``: ``log_softmax``, then ``nll_loss``."""
    log_probabilities = ops.log_softmax(r, logits)
    return ops.nll_loss(r, log_probabilities, labels)
