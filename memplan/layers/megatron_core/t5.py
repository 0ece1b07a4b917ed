"""Megatron-Core's T5: a batch of two sequences, an encoder, and a decoder whose layers attend to the encoder's output.

``examples/t5/pretrain_t5.py``, ``megatron/core/models/T5`` (``t5_model.py``, ``t5_spec.py``),
``datasets/t5_dataset.py`` and ``transformer/attention.py`` (``CrossAttention``). Encoder and decoder have as many
layers (``args.num_layers``), and share the embedding, which the head has, too, with a bias then.

The encoder's output has a gradient from every decoder layer; their sum waits until the encoder's backward. Here it
begins with the backward of the decoder's final norm, and the word table's gradient from the decoder with that of its
embedding. Shapes: s sequence of the encoder, d that of the decoder, b micro-batch, h hidden, v padded vocabulary,
t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...plan.spec import ModelSpec
from ...tape.events import Category, Drop, Hold, Tape
from ...values import replace
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor
from ..gradients import fresh
from ..module import SHARED, Module, Tapes, hold_bytes
from . import local, te
from .ends import (
    ATTENTION_MASK,
    CROSS_MASK,
    DECODER_MASK,
    LOSS_MASK,
    POSITION_IDS,
    TIED_GRADIENT,
    embedding,
    final_norm,
    input_of,
    output_layer,
)
from .losses import gpt_loss, language_model_loss
from .shape import CoreShape

INPUTS = Category.INPUTS

BATCH, DECODER_POSITIONS, CONTEXT, CONTEXT_GRADIENT = (SHARED - at for at in range(20, 24))
"""Ids of all of a micro-batch's int64 tensors, of the decoder's positions, of the encoder's output and its gradient."""

PROJECTION, QUERY, KEY_VALUE = (f"cross_attention.linear_{part}" for part in ("proj", "q", "kv"))


def decoder_shape(shape: CoreShape) -> CoreShape:
    """``shape`` as the decoder has it, whose layers attend to ``keys`` tokens of the encoder, too."""
    return replace(shape, spec=_causal(shape.spec), s=shape.decoder, decoder=0, keys=shape.s)


@lru_cache(maxsize=64)
def _causal(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"causal": True})


# -- a micro-batch -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def batch(shape: CoreShape) -> Module:
    """``get_batch`` and ``config_attention_mask``: two tensors of the encoder and four of the decoder in one int64
    tensor (``broadcast_data``); the loss mask in fp32; masks as the layers take them, local ones (b, 1, s, s) by way
    of one for each sequence."""
    b, s, d = shape.b, shape.s, shape.decoder
    masks: dict[int, Shape] = {ATTENTION_MASK: (b, 1, 1, s), CROSS_MASK: (b, 1, 1, d)}
    if shape.implementation == "local":
        masks = {ATTENTION_MASK: (b, 1, s, s), DECODER_MASK: (b, 1, d, d), CROSS_MASK: (b, 1, d, s)}
    kept = [_hold(BATCH, (2 * b * s + 4 * b * d,), "int64", "batch"), _hold(LOSS_MASK, (b, d), "fp32", "loss_mask")]
    held: list[Hold | Drop] = [*kept]
    for at, (id, size) in enumerate(masks.items(), 1):
        mask = _hold(id, size, "bool", "attention_mask")
        parts = _hold(at, size, "bool", "mask_of_each_sequence")
        apart = shape.implementation == "local"
        held += [parts, mask, Drop(at, parts.bytes, INPUTS)] if apart else [mask]
        kept.append(mask)
    positions = [
        _hold(POSITION_IDS, (s,), "int64", "position_ids"),
        _hold(DECODER_POSITIONS, (d,), "int64", "positions"),
    ]
    forward: Tape = (*held, *positions)
    tapes = Tapes(forward, (), 0, 0)
    return Module("batch", tapes, tapes, forward, (), shares=(*kept, *positions))


def _hold(id: int, size: Shape, dtype: str, name: str) -> Hold:
    return Hold(id, hold_bytes(size, dtype), INPUTS, name, size, dtype)


# -- ends ---------------------------------------------------------------------------------------------


def encoder_embedding(r: Recorder, shape: CoreShape, *, tied_here: bool = False) -> Tensor:
    """``LanguageModelEmbedding`` of the encoder's tokens, behind whose gradient that of the decoder's waits."""
    return _embedding(r, replace(shape, gradient_fusion=False), POSITION_IDS, tied_here=True)


def _embedding(r: Recorder, shape: CoreShape, positions: int, *, tied_here: bool) -> Tensor:
    ids = r.outside((shape.b, shape.s), "int64", INPUTS, BATCH)
    places = r.outside((shape.s,), "int64", INPUTS, positions).view(shape.b, shape.s)
    return embedding(r, shape, ids, places, tied_here=tied_here)


def encoder_norm(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    return final_norm(r, x, shape, "encoder_norm")


def decoder_embedding(r: Recorder, context: Tensor, shape: CoreShape) -> Tensor:
    """The decoder's embedding. The encoder's output waits for the decoder's layers, which have read it in between."""
    waits = shape.gradient_fusion or not shape.spec.tied_embeddings
    decoder = decoder_shape(shape)
    embedded = _embedding(r, decoder, DECODER_POSITIONS, tied_here=False)
    like, dtype, size = context.shape, context.dtype, hold_bytes(context.shape, context.dtype)
    table = (shape.vocab // shape.t, shape.spec.hidden)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        r.events.append(Drop(CONTEXT_GRADIENT, size, Category.TEMPORARIES))
        if waits:
            waiting = hold_bytes(table, dtype)
            r.events.append(Hold(TIED_GRADIENT, waiting, Category.GRADIENTS, "grad_decoder_words", table, dtype))
        return [gradients[0], r.empty(like, dtype, "grad_encoder_output")]

    node = r.node((embedded, context), (context,), backward)
    return Tensor(embedded.storage, embedded.shape, embedded.dtype, node)


def decoder_norm(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """The decoder's final norm."""
    out, context = final_norm(r, x, decoder_shape(shape)), shape.hidden
    dtype, size = x.dtype, hold_bytes(shape.hidden, x.dtype)

    def backward(r: Recorder, gradients: Gradients) -> Gradients:
        hold = Hold(CONTEXT_GRADIENT, size, Category.TEMPORARIES, "grad_encoder_output_sum", context, dtype)
        r.events.append(hold)
        return gradients

    return Tensor(out.storage, out.shape, out.dtype, r.node((out,), (), backward))


def t5_head(r: Recorder, hidden: Tensor, shape: CoreShape, *, tied_here: bool = False) -> Tensor:
    """``T5LMHead``, whose bias is there with a shared embedding, and ``loss_func`` of ``pretrain_gpt.py``."""
    decoder = decoder_shape(shape)
    per_token = _losses(r, hidden, decoder, tied_here)
    return gpt_loss(r, per_token, input_of(r, decoder, LOSS_MASK), per_token_loss=shape.per_token_loss)


def _losses(r: Recorder, hidden: Tensor, shape: CoreShape, tied_here: bool) -> Tensor:
    logits = output_layer(r, hidden, shape, tied_here=tied_here, bias=shape.spec.tied_embeddings)
    loss = language_model_loss(r, logits, shape)
    return loss  # noqa: RET504 - the variable of the logits ends with this frame


# -- attention to the encoder's output ---------------------------------------------------------------


def query_key_value(r: Recorder, hidden: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor, Tensor]:
    """q (d, b, a/t, e), and k and v (s, b, a/t, e), views of one projection of the encoder's output."""
    spec, t, b = shape.spec, shape.t, shape.b
    a, e = spec.heads // t, spec.head_dim
    column = local.column_linear if shape.implementation == "local" else te.column_linear
    whole = replace(shape, s=shape.keys)
    context = r.outside(whole.hidden, shape.dtype, Category.ACTIVATIONS, CONTEXT)
    bias = spec.attention_bias
    mixed, _ = column(r, context, KEY_VALUE, 2 * a * e, whole, bias=bias, skip_bias=False)
    k, v = ops.split(r, mixed, [(shape.keys, b, a, e)] * 2, KEY_VALUE)
    q, _ = column(r, hidden, QUERY, a * e, shape, bias=bias, skip_bias=False)
    return _by_heads(r, q, (shape.s, b, a, e), shape), k, v


def _by_heads(r: Recorder, x: Tensor, size: Shape, shape: CoreShape) -> Tensor:
    """A view, whose gradient is copied where core attention itself returns it: transposed."""
    if shape.attention != "local" or "core_attn" in shape.recompute_modules:
        return x.view(*size)
    node = r.node((x,), (), fresh(x, "grad_query_by_heads"))
    return Tensor(x.storage, size, x.dtype, node)


def crossing(shape: CoreShape) -> CoreShape:
    """``shape`` as the core attention to the encoder's output has it: no token is ahead."""
    return replace(shape, spec=shape.spec.model_copy(update={"causal": False}))


def parameters_first(r: Recorder, shape: CoreShape) -> None:
    """``Attention.__init__`` makes the output projection first; then comes that of queries."""
    spec = shape.spec
    inner = spec.attention_features // shape.t
    for name, size in ((PROJECTION, (spec.hidden, inner)), (QUERY, (inner, spec.hidden))):
        r.parameter(f"{name}.weight", size, shape.dtype)
        if spec.attention_bias:
            r.parameter(f"{name}.bias", size[:1], shape.dtype)
