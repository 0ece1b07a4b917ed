"""trl's losses of labels' log-probabilities before release 1.15, which are taken of all logits.

trl 1.0 to 1.13: ``trainer/utils.py`` (``selective_log_softmax``, ``entropy_from_logits``),
``trainer/dpo_trainer.py`` (``DPOTrainer._compute_loss``), ``trainer/grpo_trainer.py``
(``GRPOTrainer._get_per_token_logps_and_entropies``). Log-probabilities are made sequence by sequence: in fp32 as
the difference between a logit and the logarithm of the sum, else by ``log_softmax``, whose results stay until backward.
DPOTrainer's logits, and its reference's, are in variables until it has computed its metrics.

torch 2.13: ``aten/src/ATen/native/ReduceOps.cpp`` (``logsumexp_out_impl``), ``torch/csrc/autograd/FunctionsManual.cpp``
(``logsumexp_backward``, ``unbind_backward``). Shapes: b sequences, s tokens whose labels count, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..tape.events import INPUT, Category, Drop, Hold, Tape
from . import ends, ops
from .autograd import Gradients, Recorder, Tensor
from .gradients import fresh, viewed
from .huggingface import LayerShape
from .log_probabilities import clipped

LOGITS = Category.LOGITS

Version = tuple[int, ...]

VIEWS: Version = (1, 6)
"""Logits of all but the last token are a view; before, ``_compute_loss`` copies them."""

DIVIDED: Version = (1, 10)
"""GRPOTrainer divides logits by the temperature into a new tensor; before, in place."""

CHUNK = 128
"""Rows of which an entropy is taken at once (``chunk_size``)."""

FIRST_OF_LOSS = ("logits_shifted", "logits_by_temperature", "logits_of_labels", "log_probabilities_of_sequence")
"""One of these is the first tensor that is made once the model has returned its logits."""

JOINED = ("input_ids", "attention_mask")
"""What GRPOTrainer makes of prompts and completions, until its loss is computed."""


def head(
    r: Recorder, hidden: Tensor, shape: LayerShape, kept: int | None, trl: Version, *, metrics: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss of pairs, or with ``kept`` tokens of completions that of groups, in the release ``trl``; and what is in
    variables until metrics are there, which the policy has, and its reference has not."""
    if kept is not None:
        return of_groups(r, hidden, shape, kept, trl), []
    return of_pairs(r, hidden, shape, trl, metrics=metrics)


def of_pairs(
    r: Recorder, hidden: Tensor, shape: LayerShape, trl: Version, *, metrics: bool
) -> tuple[Tensor, list[Tensor]]:
    """DPOTrainer's loss, behind which its metrics are; and what is in variables until these are there."""
    logits = returned(r, hidden, shape)
    b, s, _ = logits.shape
    variables = [logits]
    if trl < VIEWS:
        view = ends.all_but_last(r, logits, shape, "logits", LOGITS)
        variables += [view, *(r.empty((b, s - 1), "int64", name) for name in ("labels_shifted", "mask_shifted"))]
    else:
        view = rows_of(r, logits, s - 1, shape.slices_whole, grouped=False)
    taken = of_labels(r, view)
    sums = r.empty((b,), view.dtype, "log_probabilities_of_rows")
    sums.node = r.node((taken,), (), viewed(taken))
    loss = r.empty((), view.dtype, "loss")
    loss.node = r.node((sums,), (), fresh(sums, "grad_rows"))
    variables += [taken, sums]
    if metrics:
        variables += metrics_of_pairs(r, view, copies=trl >= VIEWS and b > 1)
    return loss, variables


def of_groups(r: Recorder, hidden: Tensor, shape: LayerShape, kept: int, trl: Version) -> Tensor:
    """GRPOTrainer's loss of the last ``kept`` tokens."""
    joined = [r.empty((shape.b, shape.s), "int64", name) for name in JOINED]
    loss = clipped(r, log_probabilities_of_groups(r, hidden, shape, kept, trl), kept)
    del joined
    return loss


def log_probabilities_of_groups(r: Recorder, hidden: Tensor, shape: LayerShape, kept: int, trl: Version) -> Tensor:
    """``_get_per_token_logps_and_entropies``, (b, kept)."""
    logits = returned(r, *ends.last_tokens(r, hidden, shape, kept + 1))
    view = rows_of(r, logits, kept, shape.slices_whole, grouped=True)
    if trl >= DIVIDED:
        view = ops.elementwise(r, "logits_by_temperature", (view,), category=LOGITS)
    else:
        view = divided_in_place(r, logits, view)
    taken = of_labels(r, view)
    entropies(r, view, copies=trl < DIVIDED and view.shape[0] > 1)
    joined = r.empty(taken.shape, taken.dtype, "log_probabilities_joined")
    return joined.by(r.node((taken,), (), viewed(taken)))


def returned(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """The model's logits, which Accelerate casts to fp32 when autocast has ended, and its cache
    (``ConvertOutputsToFp32``)."""
    logits = ends.logits_of(r, hidden, shape)
    r.casts.clear()
    return logits if r.autocast is None else ops.cast(r, logits, "fp32", "logits_fp32", LOGITS)


def rows_of(r: Recorder, logits: Tensor, kept: int, sliced: int, *, grouped: bool) -> Tensor:
    """A view of all but the last of ``kept`` + 1 tokens, whose gradient is laid into zeros, and of these, if
    ``grouped``, of the last ``kept``."""
    b, _, v = logits.shape
    dtype = logits.dtype

    def slice_of(x: Tensor) -> Tensor:
        x = ops.sliced_whole(r, x, sliced * grouped, "logits", LOGITS)
        node = r.node((x,), (), fresh(x, "grad_logits_sliced", LOGITS))
        return ops.sliced_whole(r, Tensor(x.storage, (b, kept, v), dtype, node), sliced, "logits", LOGITS)

    view = slice_of(logits)
    return slice_of(view) if grouped else view


def divided_in_place(r: Recorder, logits: Tensor, view: Tensor) -> Tensor:
    """``logits.div_`` of a view: backward lays its gradient into zeros of the whole, copies these, and divides a
    copy of the view's part (``CopySlices``)."""
    whole, part, dtype = logits.shape, view.shape, logits.dtype

    def copied(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        result = r.empty(whole, dtype, "grad_logits_copied", LOGITS)
        cloned = r.empty(part, dtype, "grad_logits_of_view", LOGITS)
        divided = r.empty(part, dtype, "grad_logits_by_temperature", LOGITS)
        del cloned, divided
        return [result]

    base = Tensor(logits.storage, whole, dtype, r.node((logits,), (), copied))
    node = r.node((base,), (), fresh(base, "grad_logits_strided", LOGITS))
    return Tensor(logits.storage, part, dtype, node)


def of_labels(r: Recorder, logits: Tensor) -> Tensor:
    """``selective_log_softmax``, (b, s)."""
    b, s, _ = logits.shape
    dtype = logits.dtype
    if dtype == "fp32":
        zeros = fresh(logits, "grad_logits_of_labels", LOGITS)
        chosen = r.empty((b, s), dtype, "logits_of_labels").by(r.node((logits,), (logits,), zeros))
        sums = joined(r, [log_sum(r, one) for one in unbound(r, logits)], "log_sums")
        return ops.add(r, chosen, sums, "label_log_probabilities", negated=True)

    def chosen_of(one: Tensor) -> Tensor:
        every = ops.log_softmax(r, one, "log_probabilities_of_sequence")
        back = fresh(every, "grad_log_probabilities", LOGITS)
        return r.empty((s,), dtype, "log_probabilities_of_labels").by(r.node((every,), (every,), back))

    return joined(r, [chosen_of(one) for one in unbound(r, logits)], "label_log_probabilities")


def unbound(r: Recorder, x: Tensor) -> list[Tensor]:
    """Views of each sequence, whose gradients are stacked."""
    b, *rest = x.shape
    node = r.node((x,), (), fresh(x, "grad_logits_stacked", LOGITS), outputs=b)
    return [Tensor(x.storage, tuple(rest), x.dtype, node, slot) for slot in range(b)]


def joined(r: Recorder, rows: list[Tensor], name: str) -> Tensor:
    """``torch.stack`` of one-dimensional ``rows``, whose gradients are views of the incoming one."""
    node = r.node(rows, (), viewed(*rows))
    out = r.empty((len(rows), *rows[0].shape), rows[0].dtype, name)
    rows.clear()
    return out.by(node)


def log_sum(r: Recorder, row: Tensor) -> Tensor:
    """``torch.logsumexp`` of a row (s, v)."""
    whole, dtype = row.shape, row.dtype
    exponentials = r.empty(whole, dtype, "logits_less_largest", LOGITS)
    out = r.empty(whole[:1], dtype, "log_sum_of_sequence")
    del exponentials

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        less = r.empty(whole, dtype, "logits_less_log_sum", LOGITS)
        probabilities = r.empty(whole, dtype, "probabilities_of_sequence", LOGITS)
        gradient = r.empty(whole, dtype, "grad_logits_of_sequence", LOGITS)
        del probabilities, less
        return [gradient]

    return out.by(r.node((row,), (row, out), backward))


def entropies(r: Recorder, logits: Tensor, *, copies: bool) -> Tensor:
    """``entropy_from_logits``, without a graph; ``copies``: of a view whose sequences do not follow one another."""
    *tokens, v = logits.shape
    n, dtype = tokens[0] * tokens[1], logits.dtype
    flat = r.empty((n, v), dtype, "logits_flat", LOGITS) if copies else logits
    sizes = [min(CHUNK, n - start) for start in range(0, n, CHUNK)]  # those between the second and the last are alike
    chunk = partial(r.empty, dtype=dtype, category=LOGITS)
    logarithms = None
    for size in sizes[:2] + sizes[2:][-1:]:
        made = chunk((size, v), name="log_probabilities_of_chunk")
        logarithms = made
        del made
        exponentials = chunk((size, v), name="probabilities_of_chunk")
        product = chunk((size, v), name="entropy_of_chunk")
        del exponentials, product
    out = r.empty((n,), dtype, "entropies")
    del flat, logarithms
    return out


def metrics_of_pairs(r: Recorder, logits: Tensor, *, copies: bool) -> list[Tensor]:
    """What DPOTrainer logs: entropies; of chosen and of rejected labels the logits' means, which a mask copies; and of
    the chosen the likeliest words."""
    b, s, v = logits.shape
    half = (b // 2 * s, v)
    of_tokens = entropies(r, logits, copies=copies)
    for name in ("chosen", "rejected"):
        masked = r.empty(half, logits.dtype, f"logits_{name}", LOGITS)
        means = r.empty(half[:1], logits.dtype, f"mean_logits_{name}")
        del masked, means
    return [of_tokens, r.empty((b // 2, s), "int64", "likeliest_words")]


# -- tapes -------------------------------------------------------------------------------------------


def hidden_ended(tape: Tape) -> Tape:
    """``tape`` with the end of the head's input where the model has returned, if no operator has saved it."""
    ended = [event for event in tape if isinstance(event, Drop) and event.tensor == INPUT]
    if not ended:
        return tape
    rest = [event for event in tape if event not in ended]
    at = next(place for place, one in enumerate(rest) if isinstance(one, Hold) and one.name in FIRST_OF_LOSS)
    return (*rest[:at], *ended, *rest[at:])
