"""What lies before and after the layers of Megatron-Core's BERT: a batch, the embedding, the heads and their losses.

``examples/bert/pretrain_bert.py``, ``megatron/core/models/bert`` (``bert_model.py``, ``bert_lm_head.py``,
``pooler.py``) and ``tensor_parallel/data.py``. A model with token types has the binary head.
Shapes: s sequence, b micro-batch, n = s b, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from functools import lru_cache

from ...tape.events import Category, Drop, Hold, Tape
from .. import ops
from ..autograd import Recorder, Shape, Tensor, size_of
from ..gradients import fresh, viewed
from ..module import SHARED, Module, Tapes, hold_bytes
from ..work import Exchange, Operator
from . import local
from .ends import ATTENTION_MASK, LOSS_MASK, POSITION_IDS, embedding, output_layer
from .losses import language_model_loss, scalar_gradient, total
from .shape import CoreShape

INPUTS = Category.INPUTS

BATCH = SHARED - 6
"""Id of the one tensor that tokens, types, labels, order, loss mask and padding mask are views of."""

# -- a micro-batch -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def batch(shape: CoreShape, *, first: bool) -> Module:
    """``get_batch`` and the start of ``BertModel.forward``, which are the same on every stage.

    All is int64 in one broadcast tensor (``broadcast_data``), of which the loss mask is copied to fp32; the
    attention mask is made from the padding mask; a first stage counts its positions. The tensors that
    tensor-parallel rank 0 concatenates are left out.
    """
    b, s = shape.b, shape.s
    mask = attention_mask_shape(shape)
    kept = (
        _hold(BATCH, batch_shape(shape), "int64", "batch"),
        _hold(LOSS_MASK, (b, s), "fp32", "loss_mask"),
        _hold(ATTENTION_MASK, mask, "bool", "attention_mask"),
        *((_hold(POSITION_IDS, (s,), "int64", "position_ids"),) if first else ()),
    )
    products = _hold(1, (b, s, s), "int64", "padding_mask_products")
    held: Tape = kept
    if mask[2] > 1:
        held = (*kept[:2], products, kept[2], Drop(1, products.bytes, INPUTS), *kept[3:])
    tapes = Tapes(held, (), 0, 0)
    return Module("batch", tapes, tapes, held, (), shares=kept)


def batch_shape(shape: CoreShape) -> Shape:
    """Five times (b, s), and one flag a sequence."""
    return (5 * shape.b * shape.s + shape.b,)


def attention_mask_shape(shape: CoreShape) -> Shape:
    """``_sanity_check_attention_and_get_attn_mask_dimension``, Transformer Engine from 1.10."""
    return (shape.b, 1, shape.s if shape.attention == "local" else 1, shape.s)


def _hold(id: int, size: Shape, dtype: str, name: str) -> Hold:
    return Hold(id, hold_bytes(size, dtype), INPUTS, name, size, dtype)


def bert_embedding(r: Recorder, shape: CoreShape, *, tied_here: bool = False) -> Tensor:
    """``LanguageModelEmbedding`` with token types, if any."""
    b, s = shape.b, shape.s
    ids = r.outside(batch_shape(shape), "int64", INPUTS, BATCH)
    positions = r.outside((s,), "int64", INPUTS, POSITION_IDS).view(b, s)
    types = ids.view(b, s) if shape.spec.token_types else None
    return embedding(r, shape, ids.view(b, s), positions, types, tied_here=tied_here)


# -- heads -------------------------------------------------------------------------------------------


def bert_head(r: Recorder, hidden: Tensor, shape: CoreShape, *, tied_here: bool = False) -> Tensor:
    """``BertModel.forward`` behind the encoder, and ``loss_func``: the loss of words and of sentence order."""
    per_token, order = _outputs(r, hidden, shape, tied_here)
    return bert_loss(r, per_token, order, shape)


def _outputs(r: Recorder, hidden: Tensor, shape: CoreShape, tied_here: bool) -> tuple[Tensor, Tensor | None]:
    """The loss (b, s) and, with a binary head, its logits (b, 2). Every tensor is a variable of the frame."""
    binary = shape.spec.token_types > 0
    pooled = pooler(r, hidden, shape) if binary else None
    transformed = lm_head(r, hidden, shape)
    logits = output_layer(r, transformed, shape, tied_here=tied_here, bias=True)
    order = _dense(r, pooled, "binary_head", 2, shape) if pooled is not None else None
    loss = language_model_loss(r, logits, shape)
    return loss, order


def pooler(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``Pooler``: dense and tanh of the first token, (b, h). The gradient of the rest is made as zeros."""
    if shape.sequence_parallel:
        hidden = _gathered(r, hidden, shape)
    node = r.node((hidden,), (), fresh(hidden, "grad_pooler_select"))
    first = Tensor(hidden.storage, hidden.shape[1:], hidden.dtype, node)
    return ops.tanh(r, _dense(r, first, "pooler", shape.spec.hidden, shape), "pooler_tanh")


def _gathered(r: Recorder, x: Tensor, shape: CoreShape) -> Tensor:
    """``gather_from_sequence_parallel_region``: backward takes this rank's slice, a view."""
    whole = (shape.s, shape.b, shape.spec.hidden)
    work = Operator((Exchange("all-gather", size_of(whole, x.dtype)),), ())
    node = r.node((x,), (), viewed(x), work=work)
    return r.empty(whole, x.dtype, "pooler_gathered", Category.COMMUNICATION_BUFFERS).by(node)


def lm_head(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``BertLMHead``: dense, GELU and apex's norm, (s, b, h)."""
    hidden = _dense(r, hidden, "lm_head", shape.spec.hidden, shape)
    hidden = ops.elementwise(r, "lm_head_gelu", (hidden,), (hidden,))
    hidden = local.norm(r, hidden, "lm_head_norm", shape)
    return hidden  # noqa: RET504 - the variable ends its tensors' lives


def _dense(r: Recorder, x: Tensor, name: str, n: int, shape: CoreShape) -> Tensor:
    """``torch.nn.Linear``."""
    weight = r.parameter(f"{name}.weight", (n, x.shape[-1]), shape.dtype)
    return ops.linear(r, x, weight, r.parameter(f"{name}.bias", (n,), shape.dtype), name=name)


# -- losses ------------------------------------------------------------------------------------------


def bert_loss(r: Recorder, per_token: Tensor, order: Tensor | None, shape: CoreShape) -> Tensor:
    """``loss_func``: the mean loss of the masked words, and the cross entropy of sentence order in fp32.

    The loss mask, its sum and the order are saved. The losses' average over data-parallel ranks ends here; it
    really ends with the iteration (512 B a micro-batch).
    """
    words = _mean(r, per_token, shape, "loss" if order is None else "lm_loss")
    parts, loss = [words], words
    if order is not None:
        parts.append(_order_loss(r, order, shape))
        loss = ops.add(r, words, parts[1], "loss")
    clones = [r.empty((), "fp32", "loss_cloned") for _ in parts]
    joined = r.empty((len(parts),), "fp32", "losses")
    clones.clear()
    averaged = r.empty((len(parts),), "fp32", "losses_averaged")
    del joined
    parts.clear()
    del words, averaged
    for _ in ("context-parallel size", "micro-batches"):
        loss.node = r.node((loss,), (), scalar_gradient)
    return loss


def _mean(r: Recorder, per_token: Tensor, shape: CoreShape, name: str) -> Tensor:
    n = shape.b * shape.s
    mask = r.outside((shape.b, shape.s), "fp32", INPUTS, LOSS_MASK)
    masked = ops.multiply(r, per_token.view(n), mask.view(n), "masked_loss")
    summed = total(r, masked, "loss_sum")
    del masked
    count = r.empty((), "fp32", "loss_mask_sum")
    return r.empty((), "fp32", name).by(r.node((summed,), (count,), scalar_gradient))


def _order_loss(r: Recorder, order: Tensor, shape: CoreShape) -> Tensor:
    labels = r.outside(batch_shape(shape), "int64", INPUTS, BATCH)
    wide = ops.cast(r, order, "fp32", "binary_logits_fp32")
    return ops.nll_loss(r, ops.log_softmax(r, wide), labels)
