"""``megatron/core/transformer/multi_token_prediction.py``: layers behind the last, each predicting one token more,
and their losses (``process_mtp_loss``).

Shapes: D of them, s sequence, b micro-batch, h hidden; s / t under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...tape.events import Category
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, incoming, size_of
from ..work import exchanged
from . import ends, te
from .losses import language_model_loss
from .shape import CoreShape

ENDS = ("sent", "received")
"""Columns of a context-parallel rank's chunk that neighbours trade."""

Layer = Callable[[Recorder, Tensor, CoreShape], Tensor]


def uncovered(shape: CoreShape, *, recomputes_layers: bool) -> Iterator[str]:
    """What these recipes do not cover of ``shape``."""
    if not shape.spec.mtp_layers:
        return
    if shape.implementation == "local":
        yield "multi-token prediction in local layers; that of Transformer Engine is covered"
    if shape.spec.tied_embeddings:
        yield "multi-token prediction with a head that is tied to the embedding"
    if recomputes_layers:
        yield "multi-token prediction with full recompute"


def projection(shape: CoreShape) -> Shape:
    """Weight of ``eh_proj`` on this rank, of embedding and hidden state together."""
    return (shape.spec.hidden // shape.t, 2 * shape.spec.hidden)


def hidden_of_all(shape: CoreShape) -> Shape:
    """Hidden states of the model and of every further layer, one behind the other."""
    s, b, h = shape.hidden
    return ((1 + shape.spec.mtp_layers) * s, b, h)


def block(r: Recorder, hidden: Tensor, shape: CoreShape, layer_shape: CoreShape, layer: Layer) -> Tensor:
    """``MultiTokenPredictionBlock.forward``: ``shape`` is that of ends, ``layer_shape`` of the layer within."""
    states = [hidden]
    for depth in range(shape.spec.mtp_layers):
        rolled = [_rolled(r, "int64", name, shape) for name in ("tokens_rolled", "position_ids_rolled")]
        embedded = ends.embedding(r, shape, *rolled)
        rolled.clear()
        r.prefix = f"mtp.{0 if shape.spec.mtp_shared else depth}."
        x = _projected(r, embedded, states[-1], shape)
        x = layer(r, x, layer_shape)
        x = te.norm(r, x, "final_layernorm", shape)
        r.prefix = ""
        states.append(x)
        del x, embedded
    shapes = [state.shape for state in states]
    like = shapes[0][0]
    out = r.empty((like * len(states), *shapes[0][1:]), hidden.dtype, "hidden_of_all")
    node = r.node(states, (), lambda r, gradients: [incoming(gradients).view(*one) for one in shapes])
    return out.by(node)


def _rolled(r: Recorder, dtype: str, name: str, shape: CoreShape) -> Tensor:
    """``roll_tensor``: (b, s) moved by one token. Of context-parallel ranks each has two chunks, which are rolled apart
    and get their last column from a neighbour (that of one row is a view, of more a copy)."""
    if shape.cp == 1:
        return r.empty((shape.b, shape.s), dtype, name)
    chunks = [r.empty((shape.b, shape.s // 2), dtype, f"{name}_chunk") for _ in range(2)]
    columns = [r.empty((shape.b,), dtype, f"{name}_{end}") for _ in chunks for end in ENDS[shape.b == 1 :]]
    out = r.empty((shape.b, shape.s), dtype, name)
    chunks.clear()
    columns.clear()
    return out


def _projected(r: Recorder, embedded: Tensor, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``_concat_embeddings``: both normed, side by side, projected, gathered, and cut along the sequence."""
    both = ops.cat_last(r, te.norm(r, embedded, "enorm", shape), te.norm(r, hidden, "hnorm", shape), "mtp_both")
    out, _ = te.column_linear(r, both, "eh_proj", projection(shape)[0], shape, bias=False, skip_bias=False)
    del both
    if shape.t == 1:
        return out
    part, dtype, whole = out.shape, out.dtype, (shape.s, shape.b, shape.spec.hidden)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gathered = r.empty(whole, dtype, "grad_mtp_projected", Category.COMMUNICATION_BUFFERS)
        mine = r.empty(part, dtype, "grad_mtp_part")
        del gathered
        return [mine]

    received = r.empty((shape.t * part[0], *part[1:]), dtype, "mtp_projected_gathered", Category.COMMUNICATION_BUFFERS)
    joined = r.empty(whole, dtype, "mtp_projected")
    del received
    node = r.node((out,), (), backward, work=exchanged("all-gather", size_of(whole, dtype), "reduce-scatter"))
    return Tensor(joined.storage, shape.hidden, dtype, node)


def head(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``process_mtp_loss``, then the head of the model: each depth's loss is attached to the hidden state."""
    s, b, h = shape.hidden
    first, *others = ops.split(r, hidden, [(s, b, h)] * (1 + shape.spec.mtp_layers), "hidden_of_depth")
    size = (shape.b, shape.s)
    logits = None
    for state in others:
        logits = ends.output_layer(r, state, shape)
        labels, mask = _rolled(r, "int64", "labels_rolled", shape), _rolled(r, "fp32", "loss_mask_rolled", shape)
        loss = language_model_loss(r, logits, shape)
        loss = ops.multiply(r, loss.view(*size), mask, "mtp_loss_masked")
        first = _with_loss(r, first, ops.scale(r, loss, "mtp_loss"))
        del labels, mask, loss
    del logits, state, others
    return ends.gpt_head(r, first, shape)


def _with_loss(r: Recorder, x: Tensor, loss: Tensor) -> Tensor:
    """``MTPLossAutoScaler``: ``x`` itself, whose backward begins that of the loss, too."""
    like, dtype = loss.shape, loss.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [incoming(gradients), r.empty(like, dtype, "grad_mtp_loss")]

    return Tensor(x.storage, x.shape, x.dtype, r.node((x, loss), (loss,), backward))
