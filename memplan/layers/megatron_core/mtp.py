"""``megatron/core/transformer/multi_token_prediction.py``: layers behind the last, each predicting one token more,
and their losses (``process_mtp_loss``).

Shapes: D of them, s sequence, b micro-batch, h hidden; s / t under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...tape.events import Category, Hook
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, incoming, size_of
from ..gradients import by_way_of, each, viewed, watched
from ..recompute import recomputed_reentrant
from ..work import Exchange, Operator, Product, exchanged
from . import ends, router, te
from .losses import language_model_loss
from .shape import CoreShape

ENDS = ("sent", "received")
"""Columns of a context-parallel rank's chunk that neighbours trade."""

Layer = Callable[[Recorder, Tensor, CoreShape], Tensor]

OWN = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
"""Parameters of a further layer outside of the transformer layer that is in it begin so."""


def layer_of(parameter: str) -> str | None:
    """The transformer layer within that a parameter belongs to, by the name of its seams."""
    head, depth, rest = (*parameter.split(".", 2), "", "")[:3]
    return f"{head}.{depth}." if head == "mtp" and rest and not rest.startswith(OWN) else None


def uncovered(shape: CoreShape, *, recomputes_layers: bool) -> Iterator[str]:
    """What these recipes do not cover of ``shape``."""
    if not shape.spec.mtp_layers:
        return
    if shape.implementation == "local":
        yield "multi-token prediction in local layers; that of Transformer Engine is covered"
    if shape.spec.tied_embeddings:
        yield "multi-token prediction with a head that is tied to the embedding"
    if recomputes_layers and shape.distributes:
        yield "multi-token prediction with recomputed layers whose inputs are distributed, which does not run"
    if recomputes_layers and shape.spec.mtp_pattern:
        yield "multi-token prediction of hybrids with full recompute, which recomputes its layers within itself"
    if shape.mixes_states and shape.cp > 1:
        yield "hidden states that are mixed across depths with context parallelism"
    if shape.mixes_states and shape.spec.mtp_layers < 2:
        yield "hidden states that are mixed across fewer than two depths, which Megatron-Core refuses"


def projection(shape: CoreShape) -> Shape:
    """Weight of ``eh_proj`` on this rank, of embedding and hidden state together."""
    return (shape.spec.hidden // shape.t, 2 * shape.spec.hidden)


def hidden_of_all(shape: CoreShape) -> Shape:
    """Hidden states of the model and of every further layer, one behind the other."""
    s, b, h = shape.hidden
    return ((1 + shape.spec.mtp_layers) * s, b, h)


def block(
    r: Recorder, hidden: Tensor, shape: CoreShape, layer_shape: CoreShape, layer: Layer, again: bool = False
) -> Tensor:
    """``MultiTokenPredictionBlock.forward``: ``shape`` is that of ends, ``layer_shape`` of the layer within. ``again``:
    backward runs each depth again, from the hidden state and the embedding (``_checkpointed_forward``)."""
    states = [hidden]
    history = History([detached(r, hidden) if shape.detaches_heads else hidden])
    for depth in range(shape.spec.mtp_layers):
        below = (
            history.mixed(r, shape.t if shape.sequence_parallel else 1) if shape.mixes_states else history.states[-1]
        )
        rolled = [_rolled(r, "int64", name, shape) for name in ("tokens_rolled", "position_ids_rolled")]
        embedded = ends.embedding(r, shape, *rolled)
        if shape.detaches_heads:
            embedded = Tensor(embedded.storage, embedded.shape, embedded.dtype)
        rolled.clear()
        prefix = f"mtp.{0 if shape.spec.mtp_shared else depth}."
        region = partial(_depth, prefix=prefix, shape=shape, layer_shape=layer_shape, layer=layer)
        if not again:
            x = region(r, below, embedded)
        elif embedded.node is None:
            x = recomputed_reentrant(r, partial(region, embedded=embedded), (below,))
        else:
            x = recomputed_reentrant(r, region, (below, embedded))
        if again:
            ends.keep_mask(r, layer_shape)
        del region, below
        states.append(x)
        history.states.append(x)
        del x, embedded
    rows, *rest = hidden.shape
    return r.empty((rows * len(states), *rest), hidden.dtype, "hidden_of_all").by(r.node(states, (), viewed(*states)))


def _depth(
    r: Recorder, below: Tensor, embedded: Tensor, *, prefix: str, shape: CoreShape, layer_shape: CoreShape, layer: Layer
) -> Tensor:
    """``_proj_and_transformer_layer``."""
    r.prefix = prefix
    x = _projected(r, embedded, below, shape)
    x = _hooked(r, x, layer_shape, layer)
    x = te.norm(r, x, "final_layernorm", shape)
    r.prefix = ""
    return x


def _hooked(r: Recorder, x: Tensor, shape: CoreShape, layer: Layer) -> Tensor:
    """``layer`` between the seams of hooks around it."""
    if not r.seams:
        return layer(r, x, shape)
    x = _seam(r, x, Hook.BEFORE_FORWARD, Hook.AFTER_BACKWARD)
    return _seam(r, layer(r, x, shape), Hook.AFTER_FORWARD, Hook.BEFORE_BACKWARD)


def _seam(r: Recorder, x: Tensor, hook: Hook, back: Hook) -> Tensor:
    name = r.prefix
    r.seam(name, hook)
    return watched(r, x, lambda r: r.seam(name, back))


def detached(r: Recorder, hidden: Tensor) -> Tensor:
    """``hidden`` as the start of a graph of its own. It requires a gradient (``requires_grad_``), and both stay as long
    as the graph: until the next micro-batch's forward is done, which the schedule counts (``DETACHED``)."""
    return Tensor(hidden.storage, hidden.shape, hidden.dtype, r.node((hidden,), (), lambda r, gradients: [None]))


DETACHED = 2
"""Hidden states that a detached one and its gradient are, which the graph of a micro-batch holds."""


class History:
    """``mtp_hsm``: hidden states of all depths so far, of which each token takes one as the input of the next
    (``_mix_hidden_state_history``). Variables of the loop live until they are assigned again."""

    def __init__(self, states: list[Tensor]) -> None:
        self.states = states
        self.stacked: Tensor | None = None
        self.flattened: Tensor | None = None

    def mixed(self, r: Recorder, owners: int) -> Tensor:
        """The input of the next depth. Older states are moved by one token; ``owners`` ranks share the sequence, and
        draw for all of it."""
        if len(self.states) == 1:
            return self.states[0]
        *older, newest = self.states
        moved = self._moved(r, older)
        made = _drawn(r, moved, newest, owners)
        like, dtype, count = newest.shape, newest.dtype, len(older)
        node = r.node((moved,), (), each(((count, *like), dtype, "grad_history")), outputs=count)
        self.states = [Tensor(moved.storage, like, dtype, node, at) for at in range(count)] + [newest]
        return made

    def _moved(self, r: Recorder, older: Sequence[Tensor]) -> Tensor:
        """(n, s, b, h): stacked, the sequence last (of several states a copy), rolled, and zeros behind the end; the
        latter's gradient is a copy (``CopySlices``), of several states behind one that is contiguous."""
        count, like, dtype = len(older), older[0].shape, older[0].dtype
        size = (count, *like)

        def unstacked(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            whole = incoming(gradients)
            return [Tensor(whole.storage, like, dtype) for _ in range(count)]

        def rolled(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            contiguous = [r.empty(size, dtype, "grad_history_contiguous")] if count > 1 else []
            if count > 1:
                gradients.clear()
            copied = [r.empty(size, dtype, "grad_history_copied")]
            ends = [r.empty((count * like[1], like[2]), dtype, f"grad_history_end_{part}") for part in ("", "zeros")]
            ends.clear()
            contiguous.clear()
            gradients.clear()
            out = r.empty(size, dtype, "grad_history_rolled")
            copied.clear()
            return [out]

        stacked = r.empty(size, dtype, "history").by(r.node(older, (), unstacked))
        self.stacked = stacked
        self.flattened = r.empty(size, dtype, "history_sequence_last") if count > 1 else stacked
        node = r.node((stacked,), (), rolled)
        return r.empty(size, dtype, "history_moved").by(node)


def _drawn(r: Recorder, moved: Tensor, newest: Tensor, owners: int) -> Tensor:
    """Of each token a number is drawn; it takes the newest state where another's token is 0 in all features."""
    (s, b, h), dtype, count = newest.shape, newest.dtype, moved.shape[0]
    drawn = [r.empty((owners * s, b), "int64", "depths_drawn"), r.empty((s, b), "bool", "depth_is_newest")]
    index = r.empty((s, b), "int64", "depths")
    drawn.append(r.in_turn(((count, s, b, h), "bool", "history_is_zero"), ((count, s, b), "bool", "history_ended")))
    drawn.append(r.empty((s, b), "bool", "depth_has_ended"))
    chosen = r.empty((s, b), "bool", "newest_chosen")
    like = newest.shape

    gathered = each(((count, *like), dtype, "grad_history"))

    def parted(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made: list[Tensor | None] = []
        for name in ("older", "newest"):
            zero = r.empty((), dtype, "zero")
            made.append(r.empty(like, dtype, f"grad_{name}"))
            del zero
        return made[::-1]

    older = r.empty(like, dtype, "history_gathered").by(r.node((moved,), (moved, index), gathered))
    out = r.empty(like, dtype, "depths_mixed").by(r.node((newest, older), (chosen,), parted))
    drawn.clear()
    return out


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
    backward = by_way_of(
        (whole, dtype, "grad_mtp_projected", Category.COMMUNICATION_BUFFERS), (part, dtype, "grad_mtp_part")
    )
    joined = r.in_turn(
        ((shape.t * part[0], *part[1:]), dtype, "mtp_projected_gathered", Category.COMMUNICATION_BUFFERS),
        (whole, dtype, "mtp_projected"),
    )
    node = r.node((out,), (), backward, work=exchanged("all-gather", size_of(whole, dtype), "reduce-scatter"))
    return Tensor(joined.storage, shape.hidden, dtype, node)


def head(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``process_mtp_loss``, then the head of the model: each depth's loss is attached to the hidden state."""
    s, b, h = shape.hidden
    first, *others = ops.split(r, hidden, [(s, b, h)] * (1 + shape.spec.mtp_layers), "hidden_of_depth")
    size = (shape.b, shape.s)
    logits = None
    for state in others:
        logits = (_frozen_output if shape.detaches_heads else ends.output_layer)(r, state, shape)
        labels, mask = _rolled(r, "int64", "labels_rolled", shape), _rolled(r, "fp32", "loss_mask_rolled", shape)
        loss = language_model_loss(r, logits, shape)
        loss = ops.multiply(r, loss.view(*size), mask, "mtp_loss_masked")
        first = router.with_loss(r, first, ops.scale(r, loss, "mtp_loss"), "mtp_loss")
        del labels, mask, loss
    del logits, state, others
    return ends.gpt_head(r, first, shape)


def _frozen_output(r: Recorder, hidden: Tensor, shape: CoreShape) -> Tensor:
    """``linear_with_frozen_weight``: of a head whose weight is detached nothing but the weight is saved; under sequence
    parallelism the input is gathered into a tensor of its own, as is the whole input's gradient before it is
    scattered."""
    s, b, v, h, dtype = shape.s, shape.b, shape.vocab // shape.t, shape.spec.hidden, hidden.dtype
    r.parameter("head.weight", (v, h), shape.dtype)
    whole = [r.empty((s, b, h), dtype, "head_input_gathered", Category.COMMUNICATION_BUFFERS)]
    if not shape.sequence_parallel:
        whole.clear()
    wide, scattered, shard = shape.logits or dtype, shape.sequence_parallel, hidden.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        cast = [r.empty((s, b, v), dtype, "grad_logits_cast", Category.LOGITS)] if wide != dtype else []
        gradient = r.empty((s, b, h), dtype, "grad_head_input")
        cast.clear()
        return [r.empty(shard, dtype, "grad_head_input_scattered") if scattered else gradient]

    done, size = shape.ranks.column(s * b, v, h, dtype), size_of((s, b, h), dtype)
    assert done.backward is not None
    of_input = next(one for one in done.backward if isinstance(one, Product))
    summed = [Exchange("reduce-scatter" if scattered else "all-reduce", size)] if shape.t > 1 else []
    work = Operator(done.forward, (of_input, *summed))
    node = r.node((hidden,), (), backward, work=work)
    return r.empty((s, b, v), wide, "logits", Category.LOGITS).by(node)
