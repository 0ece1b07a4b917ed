"""What lies before and after the layers of Megatron-Core's GPT: a batch, the embedding, the final norm, the head.

``pretrain_gpt.py``, ``megatron/core/models/gpt/gpt_model.py``, ``models/common/embeddings``,
``tensor_parallel/layers.py`` and ``mappings.py``. Collectives work in place, but for all-gathers and
reduce-scatters. Shapes: s sequence, b micro-batch, n = s b, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Literal

from ...tape.events import Category, Hold, Tape, drops
from ...values import replace
from .. import ops
from ..autograd import Gradients, Recorder, Shape, Tensor, size_of
from ..gradients import fresh
from ..module import SHARED, Module, Tapes, hold_bytes
from ..reductions import summed, table_gradient
from ..tensor_parallel import masked
from ..work import Exchange, Operator, Ranks, Stream, looked_up
from . import te
from .losses import gpt_loss, language_model_loss, sorted_indices
from .mappings import moved, own_rows
from .shape import CoreShape

INPUTS, LOGITS, WORKSPACES = Category.INPUTS, Category.LOGITS, Category.WORKSPACES
COMMUNICATION = Category.COMMUNICATION_BUFFERS

TOKENS, POSITION_IDS, LABELS, LOSS_MASK, ATTENTION_MASK = SHARED, SHARED - 1, SHARED - 2, SHARED - 3, SHARED - 4
"""Ids of the tensors of a micro-batch."""

DECODER_MASK, CROSS_MASK = SHARED - 7, SHARED - 8
"""Those of an encoder-decoder's masks that are the decoder's."""

DOCUMENTS = SHARED - 9
"""Where documents of packed sequences begin (``cu_seqlens``)."""

TABLES = 32
"""Tables of angles that ``RotaryEmbedding.forward`` keeps (``lru_cache``), one for each longest document's length."""

TIED_GRADIENT = SHARED - 5
"""Id of the tied weight's gradient between the head's backward and the embedding's, on one stage."""

WORD = "word.weight"
"""The vocabulary-parallel table; of the head, too, where they are tied."""

Role = Literal["only", "first", "middle", "last"]
"""Of a pipeline stage, or of one virtual stage (chunk)."""

# -- a micro-batch -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def batch(shape: CoreShape, role: Role) -> Module:
    """``get_batch``: what one micro-batch brings to the GPU, held in variables of ``forward_step``.

    A first stage has tokens and position ids, a last one labels and the loss mask, both the attention mask
    (b, 1, s, s) where the data loader makes one; those in between have nothing. Tensors for other stages
    arrive, too, and are dropped (``get_batch_on_this_tp_rank``). Of packed sequences every stage has the documents'
    beginnings: a view of what arrives, or of several sequences one tensor of them all
    (``flatten_batch_for_packed_sequences``). With context parallelism tensors arrive
    whole and are cut one after the other (``get_batch_on_this_cp_rank``).
    """
    kept = tuple(_input(shape, id) for id in _inputs(shape, role))
    arrived = {
        id: hold for id, hold in _arriving(shape, role).items() if shape.cp > 1 or id not in _inputs(shape, role)
    }
    others = tuple(hold for id, hold in arrived.items() if id not in _inputs(shape, role))
    whole: Tape = tuple(arrived.values()) + drops(others)
    if shape.cp > 1:
        cut = tuple(event for hold in kept for event in (hold, arrived[hold.tensor].end))
        forward: Tape = whole + cut
    else:
        forward = kept + whole + _merged(shape)
    tapes = Tapes(forward, (), 0, 0)
    return Module("batch", tapes, tapes, forward, (), shares=kept)


@lru_cache(maxsize=1024)
def batch_ends(batch: Module, saved: frozenset[int]) -> Module:
    """The return of ``forward_step``: inputs that no module saved end. Behind the stage's last module.

    ``saved`` are the ids that the stage's modules keep (``Module.saved_shared``).
    """
    tapes = Tapes(drops(hold for hold in batch.shares if hold.tensor not in saved), (), 0, 0)
    return Module("batch_ends", tapes, tapes, drops(batch.shares), ())


@lru_cache(maxsize=1024)
def batch_released(batch: Module, saved: frozenset[int]) -> Module:
    """The end of a stage's backward: the other inputs end. In front of the stage's first module."""
    tapes = Tapes((), drops(hold for hold in batch.shares if hold.tensor in saved), 0, 0)
    return Module("batch_released", tapes, tapes, (), ())


def _merged(shape: CoreShape) -> Tape:
    """Beginnings of documents of each sequence, which end when they are one tensor."""
    if shape.packed < 2:
        return ()
    size = (shape.packed, shape.s // shape.packed + 1)
    arrived = Hold(1 << 20, hold_bytes(size, "int32"), INPUTS, "documents_of_each", size, "int32")
    return (arrived, arrived.end)


def _inputs(shape: CoreShape, role: Role) -> tuple[int, ...]:
    documents = (DOCUMENTS,) if shape.packed else ()
    if role == "middle":
        return documents
    mask = (ATTENTION_MASK,) if shape.attention_mask else ()
    last = (LABELS, LOSS_MASK) if role in ("only", "last") else ()
    first = (POSITION_IDS, TOKENS) if role in ("only", "first") else ()
    return (*mask, *last, *first, *documents)


NAMES = {
    TOKENS: "tokens",
    POSITION_IDS: "position_ids",
    LABELS: "labels",
    LOSS_MASK: "loss_mask",
    ATTENTION_MASK: "attention_mask",
    DOCUMENTS: "documents",
}


def _input(shape: CoreShape, id: int) -> Hold:
    size, dtype = input_shape(shape, id), input_dtype(id)
    return Hold(id, hold_bytes(size, dtype), INPUTS, NAMES[id], size, dtype)


def input_shape(shape: CoreShape, id: int) -> Shape:
    """Of an input on this rank. Context parallelism cuts the mask's rows and not its columns. Of packed sequences there
    are as many beginnings as documents, of one sequence room for one more than tokens."""
    if id == DOCUMENTS:
        return (shape.s + 1,) if shape.packed == 1 else (shape.packed + 1,)
    return (shape.b, 1, shape.s, shape.s * shape.cp) if id == ATTENTION_MASK else (shape.b, shape.s)


def input_dtype(id: int) -> str:
    return {LOSS_MASK: "fp32", ATTENTION_MASK: "bool", DOCUMENTS: "int32"}.get(id, "int64")


def _arriving(shape: CoreShape, role: Role) -> dict[int, Hold]:
    """All tensors of the whole sequence, by id, each under an id of its own."""
    if role == "middle" and not shape.packed:
        return {}
    whole = replace(shape, s=shape.s * shape.cp, cp=1)
    every = (_input(whole, id) for id in _inputs(shape, "only"))
    return {hold.tensor: hold._replace(tensor=i, name=f"{hold.name}_whole") for i, hold in enumerate(every, 1)}


def input_of(r: Recorder, shape: CoreShape, id: int) -> Tensor:
    """An input as a module sees it: its end is no event there."""
    return r.outside(input_shape(shape, id), input_dtype(id), INPUTS, id)


def mask_id(shape: CoreShape) -> int:
    """Of the mask of core attention in a layer of ``shape``."""
    if not shape.keys:
        return ATTENTION_MASK
    return DECODER_MASK if shape.spec.causal else CROSS_MASK


def keep_mask(r: Recorder, shape: CoreShape) -> None:
    """A recomputed region saves all that it is given, the attention mask, too (``tensor_parallel/random.py``,
    ``CheckpointFunction``)."""
    if shape.attention_mask:
        r.saved_outside.add(mask_id(shape))
    if shape.packed:
        r.saved_outside.add(DOCUMENTS)


# -- embedding ---------------------------------------------------------------------------------------


def gpt_embedding(r: Recorder, shape: CoreShape, *, tied_here: bool = False) -> Tensor:
    """``LanguageModelEmbedding`` on the batch's tokens and position ids."""
    tokens, positions = input_of(r, shape, TOKENS), input_of(r, shape, POSITION_IDS)
    return r.embedded(embedding(r, shape, tokens, positions, tied_here=tied_here))


def embedding(
    r: Recorder,
    shape: CoreShape,
    tokens: Tensor,
    positions: Tensor,
    types: Tensor | None = None,
    *,
    tied_here: bool = False,
) -> Tensor:
    """``LanguageModelEmbedding.forward``: (s, b, h), or (s/t, b, h) with sequence parallelism, of (b, s) ids.

    The words' and positions' embeddings are variables of the frame. Without learned positions and token types
    sequence parallelism reduce-scatters the words within the lookup; else it takes a slice, a view. Both are cloned.
    """
    spec, b, s, h = shape.spec, shape.b, shape.s, shape.spec.hidden
    learned = spec.positions == "learned"
    scattered = shape.sequence_parallel and not learned and types is None
    permuted = b > 1 and s > 1
    words = vocab_parallel_embedding(r, shape, tokens, tied_here=tied_here, scatters=scattered)
    hidden, places, kinds = words, None, None
    if learned:
        table = r.parameter("position.weight", (spec.positions_max, h), shape.dtype)
        places = lookup(r, table, positions, "position_embeddings", permuted=permuted)
        hidden = ops.add(r, words, places, "embedding_sum")
    if not scattered:
        hidden = transposed(r, hidden, (s, b, h), "embedding_transposed")
    if types is not None:
        table = r.parameter("token_type.weight", (spec.token_types, h), shape.dtype)
        kinds = lookup(r, table, types, "token_type_embeddings", permuted=permuted).view(s, b, h)
        hidden = ops.add(r, hidden, kinds, "embedding_with_types")
    if shape.fp32_residual:
        hidden = ops.cast(r, hidden, "fp32", "embedding_fp32")
    if shape.sequence_parallel:
        hidden = hidden if scattered else own_rows(r, hidden, shape.hidden, "grad_embedding_gathered")
        hidden = cloned(r, hidden, "embedding_cloned") if shape.clones_embedding else hidden
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    del words, places, kinds
    return hidden


def vocab_parallel_embedding(
    r: Recorder, shape: CoreShape, ids: Tensor, *, tied_here: bool = False, scatters: bool = False
) -> Tensor:
    """``VocabParallelEmbedding.forward``: (b, s, h), or (s/t, b, h) where it reduce-scatters, of (b, s) ids.

    With t > 1 foreign tokens are looked up as 0 and their rows zeroed in place; backward zeroes them in a
    copy of the gradient. The mask and the shifted tokens are saved.
    """
    b, s, h, dtype = shape.b, shape.s, shape.spec.hidden, shape.dtype
    weight = r.parameter(WORD, (shape.vocab // shape.t, h), dtype)
    tokens, foreign = ids, None
    if shape.t > 1:
        names = ("tokens_below", "tokens_above", "tokens_foreign", "tokens_cloned", "masked_input")
        foreign, tokens = masked(r, (b, s), names)
    tied, permuted = shape if tied_here and weight.node is not None else None, b > 1 and s > 1
    out = lookup(r, weight, tokens, "word_embeddings", sorts=shape.deterministic, permuted=permuted, tied=tied)
    if foreign is not None:
        size = size_of(out.shape, dtype)
        summed = [] if scatters else [Exchange("all-reduce", size)]
        zeroed = fresh(out, "grad_word_embeddings_zeroed")
        node = r.node((out,), (foreign,), zeroed, work=Operator((Stream(size), *summed)))
        out = Tensor(out.storage, out.shape, dtype, node)
    if scatters:
        out = transposed(r, out, (s, b, h), "word_embeddings_transposed")
        ends = ("word_embeddings_scattered", "grad_embedding_gathered")
        out = moved(r, out, shape.hidden[0], "reduce-scatter", ends, back=COMMUNICATION)
    del tokens, foreign
    return out


def lookup(
    r: Recorder,
    weight: Tensor,
    indices: Tensor,
    name: str,
    *,
    sorts: bool = False,
    permuted: bool = False,
    tied: CoreShape | None = None,
) -> Tensor:
    """``F.embedding``, or ``weight[indices]`` (``sorts``, deterministic mode): saves the indices.

    Backward makes a dense gradient of the whole table either way. ``permuted``: the incoming gradient is not
    contiguous and is copied first. ``tied``: the head's gradient of the same weight has been waiting in autograd's
    input buffer, and this one is added to it in place.
    """
    out = r.empty((*indices.shape, weight.shape[1]), weight.dtype, name)
    table, dtype, n = weight.shape, weight.dtype, prod(indices.shape)
    waiting: list[Tensor] = []
    if tied is not None and not tied.gradient_fusion and r.grad_enabled:
        waiting.append(r.outside(table, dtype, Category.GRADIENTS, TIED_GRADIENT, drops=True))
    sums = tied is not None and tied.gradient_fusion

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = _table_gradient(r, table, dtype, n, name, sorts, permuted)
        waiting.clear()
        return [r.empty(table, dtype, "grad_tied_sum")] if sums else [made]

    out.node = r.node((weight,), (indices,), backward, work=looked_up(out.shape, dtype))
    return out


def _table_gradient(r: Recorder, table: Shape, dtype: str, n: int, name: str, sorts: bool, permuted: bool) -> Tensor:
    """``index_backward`` (``sorts``) or ``embedding_dense_backward_cuda``, with what they allocate inside."""
    if not sorts or not r.kernel_workspaces:
        return table_gradient(r, table, dtype, n, name, copies=permuted)
    grad = r.empty(table, dtype, f"grad_{name}_weight")
    inside = [r.empty((n, table[1]), dtype, f"grad_{name}_contiguous", WORKSPACES)] if permuted else []
    inside += sorted_indices(r, n)
    inside.clear()
    return grad


def transposed(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """``x.transpose(0, 1).contiguous()``: a copy, unless one of the two dimensions is 1; its gradient is a view."""
    if x.shape[0] == 1 or x.shape[1] == 1:
        back = x.shape
        node = r.node((x,), (), lambda r, gradients: [one and one.view(*back) for one in gradients])
        return Tensor(x.storage, shape, x.dtype, node)
    return ops.contiguous(r, x, shape, name)


def cloned(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``clone`` (``clone_scatter_output_in_embedding``), so that the whole tensor can end."""
    return r.empty(x.shape, x.dtype, name).by(r.node((x,), (), lambda r, gradients: gradients))


# -- head --------------------------------------------------------------------------------------------


def final_norm(r: Recorder, x: Tensor, shape: CoreShape, name: str = "final_norm") -> Tensor:
    """``TransformerBlock.final_layernorm``: ``TENorm`` in both implementations where Transformer Engine is installed
    (``transformer_block.py``, ``LayerNormImpl``)."""
    return te.norm(r, x, name, shape)


def output_layer(
    r: Recorder, hidden: Tensor, shape: CoreShape, *, tied_here: bool = False, bias: bool = False
) -> Tensor:
    """``ColumnParallelLinear`` in both implementations: logits (s, b, v/t) in the hidden state's dtype.

    Sequence parallelism gathers the input into a buffer that is never freed (``gather_buffer``), forward and
    backward; the shard is what is saved. A bias is added out of place. Under gradient accumulation fusion
    the weight's gradient goes into ``main_grad``, and autograd gets a static dummy (``dummy_gradient``). The
    gradient of a weight tied to this stage's embedding waits for the embedding's. Logits of another dtype
    (``_linear_forward``) have a gradient of it, which is cast first. In 8 bits it is Transformer Engine's
    (``TELMHeadColumnParallelLinear``); its weight is kept in 16 bits, and has copies.
    """
    if shape.low_head and shape.low is not None:
        own = replace(shape, low=replace(shape.low, parameters=False))
        return te.column_linear(
            r, hidden, "head", shape.vocab // shape.t, own, bias=False, skip_bias=False, category=LOGITS
        )[0]
    s, b, v, h, dtype = shape.s, shape.b, shape.vocab // shape.t, shape.spec.hidden, hidden.dtype
    wide = shape.logits or dtype
    name = WORD if shape.spec.tied_embeddings else "head.weight"
    parameters = [r.parameter(name, (v, h), shape.dtype)]
    if parameters[0].node is None:
        return _frozen_output_layer(r, hidden, shape, v)
    if bias:
        parameters.append(r.parameter("head.bias", (v,), shape.dtype))
    scattered, fused = shape.sequence_parallel, shape.gradient_fusion
    shard = hidden.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        cast = [r.empty((s, b, v), dtype, "grad_logits_cast", LOGITS)] if wide != dtype else []
        grad_input = r.empty((s, b, h), dtype, "grad_head_input")
        received = r.empty(shard, dtype, "grad_head_input_scattered") if scattered else grad_input
        grad_weight = None
        if not fused and tied_here:
            size = hold_bytes((v, h), dtype)
            r.events.append(Hold(TIED_GRADIENT, size, Category.GRADIENTS, "grad_head_weight", (v, h), dtype))
        elif not fused:
            grad_weight = r.empty((v, h), dtype, "grad_head_weight")
        made = [received, grad_weight, *([summed(r, (s * b, v), (v,), dtype, "grad_head_bias")] if bias else [])]
        cast.clear()
        return made

    work = shape.ranks.column(s * b, v, h, dtype, shape.added(r.summed))
    node = r.node((hidden, *parameters), (hidden,), backward, work=work)
    logits = r.empty((s, b, v), wide, "logits", LOGITS)
    if bias:
        logits = r.empty((s, b, v), dtype, "logits_biased", LOGITS)
    return logits.by(node)


def _frozen_output_layer(r: Recorder, hidden: Tensor, shape: CoreShape, v: int) -> Tensor:
    """``linear_with_frozen_weight``: (s, b, v) of an input that is gathered, if it is, into a tensor of its own, whose
    gradient is reduce-scattered; nothing is saved but the weight."""
    whole, dtype, total = (shape.s, shape.b, shape.spec.hidden), hidden.dtype, hidden
    if shape.sequence_parallel:
        names = ("head_input_gathered", "grad_head_input_scattered")
        total = moved(r, hidden, shape.s, "all-gather", names, kept=COMMUNICATION)
    alone = replace(shape.ranks, sequence=False) if not shape.sequence_parallel else Ranks(1, False)
    work = alone.column(prod(whole[:-1]), v, whole[-1], dtype, trained=False)
    node = r.node((total,), (), fresh(total, "grad_head_input"), work=work)
    return r.empty((*whole[:-1], v), dtype, "logits", LOGITS).by(node)


def gpt_head(r: Recorder, hidden: Tensor, shape: CoreShape, *, tied_here: bool = False) -> Tensor:
    """``GPTModel._postprocess`` and ``loss_func``: the loss. The 16-bit logits live until ``_postprocess`` returns."""
    per_token = _losses(r, hidden, shape, tied_here)
    return _masked(r, per_token, shape)


def gpt_loss_of(r: Recorder, logits: Tensor, shape: CoreShape) -> Tensor:
    """The same behind the output layer, whose ``logits`` (s, b, v/t) the caller holds."""
    return _masked(r, language_model_loss(r, logits, shape), shape)


def _masked(r: Recorder, per_token: Tensor, shape: CoreShape) -> Tensor:
    return gpt_loss(r, per_token, input_of(r, shape, LOSS_MASK), per_token_loss=shape.per_token_loss)


def _losses(r: Recorder, hidden: Tensor, shape: CoreShape, tied_here: bool) -> Tensor:
    logits = output_layer(r, hidden, shape, tied_here=tied_here)
    loss = language_model_loss(r, logits, shape)
    return loss  # noqa: RET504 - the variable of the logits ends with this frame


def gather_buffer(shape: CoreShape) -> Shape:
    """What the head takes from the static ``"mpu"`` buffer (``GlobalMemoryBuffer``); ``(0,)`` if nothing."""
    return (shape.s, shape.b, shape.spec.hidden) if shape.sequence_parallel and not shape.low_head else (0,)


def dummy_gradient(shape: CoreShape) -> Shape | None:
    """Shape of the head's static dummy gradient in the parameters' dtype (Transformer Engine's ``get_dummy_wgrad``)."""
    return (shape.vocab // shape.t, shape.spec.hidden) if shape.gradient_fusion else None


def rotary_table(shape: CoreShape) -> tuple[Hold, ...]:
    """``RotaryEmbedding``: inverse frequencies, and the angles (s, 1, 1, d) that ``lru_cache`` keeps, both fp32, of the
    d features of a head that turn.

    Every stage's model has its own, made by its first forward pass (``rotary_pos_embedding.py``). Of packed sequences
    it has as many rows as the longest document, at most those of a sequence, and many tables are kept.
    """
    d = shape.spec.rotary_features
    sizes: list[tuple[str, Shape]] = [("rotary_inverse_frequencies", (d // 2,))]
    sizes += [("rotary_angles", (shape.attended[1], 1, 1, d))] * (TABLES if shape.packed else 1)
    return tuple(Hold(0, hold_bytes(size, "fp32"), Category.BUFFERS, name, size, "fp32") for name, size in sizes)
