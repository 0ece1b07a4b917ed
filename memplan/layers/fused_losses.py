"""Heads and losses that never hold all logits at once, and heads on the last tokens alone.

Liger: ``ops/fused_linear_cross_entropy.py`` (0.5 to 0.8.5), called as ``LigerForCausalLMLoss`` does. Apple's cut
cross entropy: ``cce.py``, ``cce_lse_forward.py``, ``indexed_dot.py``, ``cce_backward.py`` (25.6, June 2025; Axolotl's
fork, 5f0c7a7, June 2026), its default ``cce`` with gradient filtering. torchtitan: ``components/loss.py``
(``ChunkedLossWrapper``, August 2026). transformers: ``logits_to_keep``.
Shapes: b micro-batch, s sequence, n = b s tokens, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..families import family
from ..plan.training_loops import Reduced
from ..tape.events import Category, Hook
from ..values import dataclass
from . import all_logits, ends, ops, scores, titan_loss, whole_logits
from .autograd import ITEMSIZE, Gradients, Leaf, Recorder, Tensor, Unsummed, size_of
from .gradients import watched
from .huggingface import LayerShape
from .kernels import CROSS_ENTROPIES
from .log_probabilities import averaged, clipped, clipped_rows, of_labels, summed
from .work import Kernel, Operator, Stream, linear

LOGITS, GRADIENTS, TEMPORARIES = Category.LOGITS, Category.GRADIENTS, Category.TEMPORARIES

CHUNKS = "chunks"
"""Where hooks run around chunks of the loss."""

Version = tuple[int, ...]

LOGITS_IN_16_BITS: Version = (0, 5)
"""Liger from which a chunk's logits are in the weight's dtype; before, they are upcast to fp32."""

PRODUCTS_CAST: Version = (0, 6, 2)
"""Liger from which the weight's gradient has a dtype of its own (``accum_dtype``), and products are cast."""

FP32_IN_PLACE: Version = (0, 8, 1)
"""Liger from which 16-bit products are added to fp32 in place (``addmm`` with ``out_dtype``)."""

SHARED_BUFFER: Version = (0, 8, 3)
"""Liger from which chunks share one buffer of logits, and 16-bit products are added to 16 bits in place."""


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """Which loss a head has, and its settings."""

    kind: str = "plain"
    chunks: int = 8
    """Chunked: equal parts of the n tokens (``num_chunks``)."""
    fp32_accumulators: bool = False
    """Liger: ``accum_dtype=torch.float32``; cut: ``accum_e_fp32`` and ``accum_c_fp32``."""
    liger: Version = (0, 8, 5)
    """Version of Liger."""
    fused_addmm: bool = True
    """Liger: compute capability 8.0 or higher, where 16-bit products are added in place."""
    logits_to_keep: int | None = None
    """Plain: logits, and labels, of the last tokens of each sequence only. Labels' log-probabilities: of
    completions."""
    outputs: tuple[str, ...] = ()
    """Of labels' log-probabilities: what is computed beside them (``log_probabilities.OUTPUTS``)."""
    reduced: Reduced = "rows"
    """Of labels' log-probabilities: what becomes of them (``TrainingLoop.reduced``)."""
    trl: Version = ()
    """Of whole logits, and of those that trl's SFTTrainer measures: its release."""
    accumulates: bool = False
    """Chunked: several micro-batches before a step. The gradient of the head's weight, which is born in the
    forward pass of the first one, is there already in all others."""

    sharded: bool = False
    """Chunked: hooks of ``fully_shard`` gather the weight before the chunks and reduce its gradient behind the last,
    until when they keep it"""
    casts: bool = False
    """in another dtype."""
    parallel: bool = False
    """Chunked: every tensor-parallel rank has a part of the vocabulary."""
    compiled: bool = False
    """Chunked: the loss of a chunk's logits is compiled."""
    product: Callable[..., Tensor] | None = None
    """Chunked: what multiplies, in place of ``ops.linear``."""
    around_head: Callable[[Recorder, Callable[[Recorder], Tensor]], Tensor] | None = None
    """Chunked: what the head does to its product."""

    @property
    def measured(self) -> Callable[[Recorder, Tensor], None] | None:
        """What SFTTrainer computes of the logits that the model returns."""
        return partial(whole_logits.measured, trl=self.trl) if self.kind == "plain" and self.trl else None

    @property
    def of_pairs(self) -> whole_logits.Pairs | None:
        """How trl's trainers of pairs take it of whole logits."""
        own = self.kind == WHOLE_LOGITS and self.reduced in whole_logits.OF_PAIRS
        return whole_logits.form(whole_logits.OF_PAIRS[self.reduced], self.trl) if own else None

    @property
    def of_groups(self) -> whole_logits.Groups | None:
        """How GRPOTrainer does."""
        own = self.kind == WHOLE_LOGITS and self.reduced == "clipped"
        return whole_logits.form(whole_logits.GROUPS, self.trl) if own else None

    @property
    def converts_itself(self) -> bool:
        """What the model returns under autocast is in fp32 before the loss is computed."""
        return self.kind == WHOLE_LOGITS

    @property
    def reads_weight(self) -> bool:
        """The model's own forward reads the head's weight, whose module does not run."""
        return self.kind in (LOG_PROBABILITIES, "liger")


PLAIN = HeadLoss()

LOG_PROBABILITIES = "log-probabilities"
"""The kind of trl's loss of labels' log-probabilities,"""

SCORES = "scores"
"""of scores of whole sequences,"""

LABELS = "labels"
"""the model's own loss of these,"""

ALL_LOGITS = "all-logits"
"""LLaMA-Factory's of log-probabilities of all logits,"""

WHOLE_LOGITS = "whole-logits"
"""and trl's before 1.15."""

JOINED = ("input_ids", "attention_mask", "labels")
"""What GRPOTrainer makes of prompts and completions, until its loss is computed."""


def head(r: Recorder, hidden: Tensor, shape: LayerShape, loss: HeadLoss = PLAIN) -> tuple[Tensor, list[Tensor]]:
    """Loss, and what the model returns beside it."""
    if loss.kind == LOG_PROBABILITIES:
        weight, kept = head_weight(r, shape), loss.logits_to_keep
        joined = [r.empty((shape.b, shape.s), "int64", name) for name in JOINED] if kept else []
        computed, others = of_labels(r, hidden, weight, loss.outputs, kept)
        returned = [computed, *others]
        if loss.reduced == "clipped" and kept:
            reduced, returned = clipped(r, computed, kept), []
        elif loss.reduced == "clipped-rows" and kept:
            reduced, returned = clipped_rows(r, computed, kept), []
        elif loss.reduced == "tokens":
            reduced, of_tokens = averaged(r, computed)
            returned.insert(1, of_tokens)
        else:
            reduced = summed(r, computed)
        del joined
        return reduced, returned
    if loss.kind in (SCORES, LABELS):
        computed, given = scores.head(r, hidden, shape, of_pairs=loss.kind == SCORES)
        return computed, [given]
    if loss.kind == ALL_LOGITS:
        return all_logits.head(r, hidden, shape)
    if loss.kind == WHOLE_LOGITS:
        how = loss.of_pairs or loss.of_groups
        assert how is not None
        return whole_logits.head(r, hidden, shape, how, loss.logits_to_keep or 0, metrics=bool(loss.outputs))
    match loss.kind:
        case "chunked":
            return chunked_head(r, hidden, shape, loss), []
        case "cut":
            return cut_head(r, hidden, shape, loss), []
        case "liger" if r.grad_enabled:
            if loss.liger < LOGITS_IN_16_BITS:
                return shifted_liger_head(r, hidden, shape), []
            return liger_head(r, hidden, shape, loss), []
    if shape.slices_whole and shape.transformers >= family(shape.spec.family).logits_to_keep and shape.spec.causal:
        hidden = ops.sliced_whole(r, hidden, 3 if loss.logits_to_keep is None else 2, "hidden")
    if loss.logits_to_keep is not None:
        hidden, shape = ends.last_tokens(r, hidden, shape, loss.logits_to_keep)
    kernel = CROSS_ENTROPIES.get(loss.kind) if r.grad_enabled else None
    computed, logits = ends.head(r, hidden, shape, kernel, shifts=loss.kind == "unsloth")
    return computed, [logits]


def head_weight(r: Recorder, shape: LayerShape, parts: int = 1) -> Tensor:
    """(v, h), or one of so many ``parts`` of it."""
    spec = shape.spec
    name = "word.weight" if spec.tied_embeddings else "head.weight"
    return r.parameter(name, (spec.vocab // parts, spec.hidden), shape.dtype)


# -- Liger ------------------------------------------------------------------------------------------


def liger_chunk(n: int, h: int, v: int) -> int:
    """Tokens in a chunk, whose logits are about as large as the hidden states: n / (v / h), both quotients rounded
    up, then up to a power of two."""
    tokens = -(-n // -(-v // h))
    return 1 << (tokens - 1).bit_length()


def liger_head(r: Recorder, hidden: Tensor, shape: LayerShape, loss: HeadLoss) -> Tensor:
    """``LigerFusedLinearCrossEntropyFunction``: gradients are made chunk by chunk in forward, and kept for backward."""
    b, s, h = hidden.shape
    dtype, n = shape.dtype, b * s
    weight = head_weight(r, shape)
    labels = r.empty((b, s + 1), "int64", "labels_padded")
    shifted = r.empty((b, s), "int64", "labels_shifted") if b > 1 else labels
    grad_input = r.empty((n, h), dtype, "grad_head_input")
    total, grad_weight = liger_chunks(r, weight, loss, n)
    held = [grad_input.view(b, s, h), *([grad_weight] if grad_weight is not None else [])]
    del grad_input, grad_weight, labels, shifted

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        one = r.empty((), "fp32", "one")
        equal = r.empty((), "bool", "is_one")
        every = r.empty((), "bool", "all_are_one")
        del one, equal, every
        return handed_back(r, held)

    total.node = r.node((hidden, weight), (), backward, work=liger_work(n, weight, dtype))
    return total


def shifted_liger_head(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """The same up to 0.4.2, which fms-acceleration has, too (``fused_ops/liger_ce``): a copy of the hidden states of
    all tokens but the last of each sequence, and logits of a chunk in fp32 (``lce_forward``)."""
    b, s, h = hidden.shape
    n, dtype = b * (s - 1), r.autocast or shape.dtype
    shifted = ends.all_but_last(r, hidden, shape, "hidden", TEMPORARIES)
    labels = ends.shifted_labels(r, shape)
    weight = head_weight(r, shape)
    v, trained = weight.shape[0], weight.node is not None
    held = [r.empty((v, h), weight.dtype, "grad_head_weight", GRADIENTS)] if trained else []
    held.insert(0, r.empty((n, h), shifted.dtype, "grad_head_input"))
    total = upcast_chunks(r, n, (v, h), dtype)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        return handed_back(r, held)

    total.node = r.node((shifted.view(n, h), weight), (), backward, work=liger_work(n, weight, dtype))
    del shifted, labels
    return total


def upcast_chunks(r: Recorder, n: int, weight: tuple[int, int], dtype: str) -> Tensor:
    """The loop of ``fused_linear_cross_entropy_forward``, whose variables keep a chunk's logits until the next one's
    take their names: logits, upcast; their gradient over them, cast, scaled, and its product with the weight."""
    v, h = weight
    losses = r.empty((n,), "fp32", "losses")
    chunk = liger_chunk(n, h, v)
    logits = scaled = None
    for start in range(0, n, chunk):
        rows = min(chunk, n - start)
        logits = r.empty((rows, v), dtype, "logits_chunk", LOGITS)
        for name, to in (("logits_chunk_fp32", "fp32"), ("grad_logits_chunk", dtype)):
            logits = r.empty((rows, v), to, name, LOGITS)
        scaled = r.empty((rows, v), dtype, "grad_logits_scaled", LOGITS)
        r.empty((rows, h), dtype, "grad_input_chunk")
    total = r.empty((), "fp32", "loss")
    del logits, scaled, losses
    return total


def liger_work(n: int, weight: Tensor, dtype: str) -> Operator:
    """Chunk by chunk, all in forward: logits; a kernel that reads them twice and writes their gradients; products with
    the weight and, added to its gradient unless it is frozen, with the hidden states. Backward multiplies what it finds
    with the loss's gradient, unless that is 1, as it is."""
    (v, h), trained = weight.shape, weight.node is not None
    rows, size = liger_chunk(n, h, v), size_of((n, v), dtype)
    kernels: list[Kernel] = []
    for start in range(0, n, rows):
        part = min(rows, n - start)
        product = linear(part, v, h, dtype, needs_weight=trained, written=2 * ITEMSIZE[dtype])
        kernels += [*(product.forward or ()), Stream(3 * size * part / n, 1, True), *(product.backward or ())]
    return Operator(kernels, ())


def liger_chunks(r: Recorder, weight: Tensor, loss: HeadLoss, n: int) -> tuple[Tensor, Tensor | None]:
    """The loop of ``fused_linear_cross_entropy_forward``, in which logits become their gradient in place: the loss,
    and the weight's gradient unless it is frozen.

    From 0.8.3 on all chunks share a buffer; before, a chunk's logits end when the next one's have taken their names,
    of which 0.8.1 has one more (``grad_logits_t``).
    """
    (v, h), dtype = weight.shape, weight.dtype
    trained, accumulator = weight.node is not None, "fp32" if loss.fp32_accumulators else dtype
    grad_weight = r.empty((v, h), accumulator, "grad_head_weight", GRADIENTS) if trained else None
    losses = r.empty((n,), "fp32", "losses")
    mask = r.empty((n,), "bool", "target_mask")
    r.empty((), "int64", "target_count")
    chunk = min(liger_chunk(n, h, v), n)
    shares = loss.liger >= SHARED_BUFFER
    in_place = adds_in_place(loss, dtype)
    logits = r.empty((chunk, v), dtype, "logits_of_chunks", LOGITS) if shares else None
    transposed = None
    for start in range(0, n, chunk):
        rows = min(chunk, n - start)
        if not shares:
            logits = r.empty((rows, v), dtype, "logits_chunk", LOGITS)
            r.empty((rows, h), dtype, "grad_input_chunk")
            transposed = logits if loss.liger >= FP32_IN_PLACE and trained else None
        if trained and not in_place:
            product = r.empty((v, h), dtype, "grad_weight_chunk")
            in_fp32 = r.empty((v, h), "fp32", "grad_weight_chunk_fp32") if dtype != "fp32" else product
            del product, in_fp32
    if shares:
        del logits
        logits = None
    total = r.empty((), "fp32", "loss")
    if trained and loss.fp32_accumulators and dtype != "fp32":
        accumulated = grad_weight
        grad_weight = r.empty((v, h), dtype, "grad_head_weight", GRADIENTS)
        del accumulated
    del logits, transposed, losses, mask
    return total, grad_weight


def adds_in_place(loss: HeadLoss, dtype: str) -> bool:
    """Whether ``addmm`` adds a chunk's product to the weight's gradient; else the product is made, cast to fp32 and
    added, two temporaries as large as the weight."""
    if loss.liger < PRODUCTS_CAST:
        return True
    if dtype == "fp32" or not loss.fused_addmm:
        return False
    return loss.liger >= (FP32_IN_PLACE if loss.fp32_accumulators else SHARED_BUFFER)


def handed_back(r: Recorder, held: list[Tensor]) -> list[Tensor | Unsummed | None]:
    """Gradients that were made in forward, under the names of those of backward; a frozen weight has none."""
    shapes = [(gradient.shape, gradient.dtype) for gradient in held]
    held.clear()
    made = [r.empty(shape, dtype, f"grad_head_{name}") for name, (shape, dtype) in zip(NAMES, shapes, strict=False)]
    return [*made, *[None] * (len(NAMES) - len(made))]


NAMES = ("input", "weight")


# -- cut cross entropy ------------------------------------------------------------------------------


def cut_head(r: Recorder, hidden: Tensor, shape: LayerShape, loss: HeadLoss) -> Tensor:
    """``LinearCrossEntropyFunction`` on n = b (s - 1) tokens with labels: no logits at all; saves hidden states, the
    log-sum-exp, indices of tokens (which end with the loss), and the mean logit of every word, by which backward orders
    the vocabulary. Nothing is made for a frozen weight but that order. What CUB takes inside ``nonzero`` and ``sort``
    is not counted."""
    b, s, h = hidden.shape
    n, weight = b * (s - 1), head_weight(r, shape)
    v, dtype = weight.shape[0], weight.dtype
    if hidden.dtype != dtype:  # apply_lce of Axolotl's fork; Apple's casts within its function
        hidden = ops.cast(r, hidden, dtype, "hidden_of_loss")
    needs_x, needs_weight = hidden.node is not None, weight.node is not None
    valids = cut_valids(r, b, s)
    lse = r.empty((n,), "fp32", "log_sum_exp")
    locks = r.empty((-(-n // 128),), "int32", "locks")
    average = r.empty((v,), "fp32", "logit_average") if needs_x or needs_weight else None  # of evaluation, too
    del locks
    nll = r.empty((n,), "fp32", "negative_log_likelihood")
    if shape.spec.logit_softcap is not None:
        nll = r.empty((n,), "fp32", "negative_log_likelihood_capped")
    total = r.empty((), "fp32", "loss")
    accumulator = "fp32" if loss.fp32_accumulators else dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        order = r.in_turn(
            ((v,), "fp32", "logit_average_sorted"),
            ((v,), "int64", "vocabulary_order_int64"),
            ((v,), "int32", "vocabulary_order"),
        )
        grad_hidden = r.empty((b, s, h), accumulator, "grad_head_input") if needs_x else None
        grad_weight = r.empty((v, h), accumulator, "grad_head_weight") if needs_weight else None
        columns = -(-h // 64)
        rows = [*([n] if needs_x else []), *([v] if needs_weight else [])]
        locks = [r.empty((-(-count // 128), columns), "int32", "locks") for count in rows]
        if grad_weight is not None and accumulator != dtype:
            grad_weight = r.empty((v, h), dtype, "grad_head_weight")
        if grad_hidden is not None and accumulator != dtype:
            grad_hidden = r.empty((b, s, h), dtype, "grad_head_input")
        del locks, order
        return [grad_hidden, grad_weight]

    saved = [hidden, lse, valids, *([average] if average is not None else [])]
    product = linear(n, v, h, dtype, needs_x=needs_x, needs_weight=needs_weight)
    work = product.after((), product.forward or ())  # backward computes the logits again, which are never written
    total.node = r.node((hidden, weight), saved, backward, work=work)
    del nll
    return total


def cut_valids(r: Recorder, b: int, s: int) -> Tensor:
    """``_build_flat_valids``: places of the labels behind the first token of each sequence, none of them ignored."""
    n = b * (s - 1)
    return r.in_turn(
        ((b, s - 1), "bool", "labels_mask"),
        ((n, 2), "int64", "label_places_int64"),
        ((n, 2), "int32", "label_places"),
        ((n,), "int64", "label_indices"),
    )


# -- torchtitan's chunks ----------------------------------------------------------------------------


def chunked_head(r: Recorder, hidden: Tensor, shape: LayerShape, loss: HeadLoss, parts: int = 1) -> Tensor:
    """``ChunkedLossWrapper``: head, loss and their backward chunk by chunk, all in forward; the gradient of the hidden
    states is gathered in fp32 and kept for backward in the model's dtype. ``parts`` of the vocabulary are on as many
    ranks."""
    b, s, h = hidden.shape
    dtype = shape.dtype
    weight = head_weight(r, shape, parts)
    total, grad, weight_grad = chunks(r, hidden, weight, loss)
    if grad is None:
        return total
    held = [grad.view(b, s, h)]
    del grad
    born = [weight_grad] if weight_grad is not None else []
    del weight_grad
    first = r.first_microbatch and not loss.sharded
    like = (weight.shape, dtype)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        grad_hidden = held.pop()
        born.clear()
        return [grad_hidden, r.empty(*like, "grad_head_weight") if first else None]

    total.node = r.node((hidden, weight), (), backward, work=Operator(()))
    return total


def chunks(r: Recorder, hidden: Tensor, weight: Tensor, loss: HeadLoss) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loop over chunks: the total, the hidden states' gradient, and the weight's where it was not there before.
    The logits of a chunk end when the next one's are there, or the function returns; so does its loss."""
    (b, s, h), v = hidden.shape, weight.shape[0]
    rows = b * s // loss.chunks
    gathered = r.empty((b * s, h), "fp32", "grad_hidden_accumulator") if r.grad_enabled else None
    total = r.empty((), "fp32", "total_loss")
    gradient = logits = chunk_loss = None
    chunk_seam(r, loss, Hook.BEFORE_FORWARD)
    for number in range(loss.chunks):
        x, x_leaf = r.leaf(Tensor(hidden.storage, (rows, h), hidden.dtype), "chunk")
        w, w_leaf = r.leaf(Tensor(weight.storage, (v, h), weight.dtype), "weight")
        if weight.node is None:  # frozen
            w.node = None
        elif loss.sharded:
            x = watched(r, x, partial(sent, w_leaf, loss, number))
        product = partial(loss.product or ops.linear, x=x, weight=w, name="logits_chunk", category=LOGITS)
        logits = loss.around_head(r, product) if loss.around_head else product(r)
        del product
        chunk_loss = summed_loss(r, logits, rows, loss)
        total = r.empty((), "fp32", "total_loss")
        if r.grad_enabled:
            one = r.empty((), "fp32", "grad_loss")
            r.backward([chunk_loss.view()], [one])
            del one
            arrived = w_leaf.take()
            if gradient is None and arrived is not None and not loss.accumulates:
                gradient = arrived
                r.recategorise(gradient.storage, GRADIENTS)
            del arrived
            in_fp32 = r.empty((rows, h), "fp32", "grad_chunk_fp32") if hidden.dtype != "fp32" else None
            del in_fp32
            x_leaf.take()
    chunk_seam(r, loss, Hook.AFTER_FORWARD)
    if gathered is not None and hidden.dtype != "fp32":
        gathered = r.empty((b * s, h), hidden.dtype, "grad_hidden_accumulated")
    del logits, chunk_loss
    return total, gathered, gradient


def chunk_seam(r: Recorder, loss: HeadLoss, hook: Hook) -> None:
    """Where hooks of ``fully_shard`` run: before and behind all chunks, and behind the backward of the first and of the
    last."""
    if loss.sharded and r.seams:
        r.seam(CHUNKS, hook)


def sent(leaf: Leaf, loss: HeadLoss, number: int, r: Recorder) -> None:
    """``FSDPParamGroup.post_backward`` of chunk ``number``: the first one's gradient of the weight is kept, cast or as
    it is, others are added to it, and the last one reduces the sum."""
    gradient = leaf.take()
    if number or not loss.casts:
        gradient = None
    if not number:
        chunk_seam(r, loss, Hook.BEFORE_BACKWARD)
    del gradient
    if number == loss.chunks - 1:
        chunk_seam(r, loss, Hook.AFTER_BACKWARD)


def summed_loss(r: Recorder, logits: Tensor, rows: int, loss: HeadLoss) -> Tensor:
    """``cross_entropy_loss`` in fp32, divided by the number of tokens of all ranks."""
    labels = r.outside((rows,), "int64", Category.INPUTS)
    if loss.compiled:
        computed = titan_loss.compiled(r, logits, labels)
    else:
        upcast = ops.cast(r, logits, "fp32", "logits_chunk_fp32", LOGITS)
        computed = (titan_loss.vocab_parallel if loss.parallel else ends.cross_entropy)(r, upcast, labels)
        del upcast
    return ops.elementwise(r, "loss_scaled", (computed,))
