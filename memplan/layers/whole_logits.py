"""trl's losses of labels' log-probabilities before release 1.15, which are taken of all logits, and metrics of these.

trl 0.10 to 1.13, as data of releases below: ``trainer/utils.py`` (``selective_log_softmax``, ``entropy_from_logits``),
``trainer/dpo_trainer.py`` (``DPOTrainer._compute_loss``; before 0.29 ``concatenated_forward`` and
``get_batch_loss_metrics``), ``trainer/grpo_trainer.py`` (``GRPOTrainer._get_per_token_logps_and_entropies``),
``trainer/sft_trainer.py`` (``SFTTrainer.compute_loss``). Log-probabilities are made sequence by sequence: in fp32 as
the difference between a logit and the logarithm of the sum, else by ``log_softmax``, whose results stay until backward.
From 0.29 on DPOTrainer's logits, and its reference's, are in variables until it has computed its metrics.

torch 2.13: ``aten/src/ATen/native/ReduceOps.cpp`` (``logsumexp_out_impl``), ``torch/csrc/autograd/FunctionsManual.cpp``
(``logsumexp_backward``, ``unbind_backward``), ``aten/src/ATen/native/cuda/SoftMax.cu`` (``host_softmax``, which copies
a view). Shapes: b sequences, s tokens whose labels count, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

from ..plan.releases import LOGITS_TO_KEEP, LOSS_FUNCTION
from ..tape.events import INPUT, Category, Drop, Event, Hold, Hook, Seam, Tape
from ..values import dataclass, replace
from . import ends, ops
from .autograd import Gradients, Recorder, Tensor
from .gradients import by_way_of, fresh, fresh_each, viewed
from .huggingface import LayerShape
from .log_probabilities import clipped

LOGITS = Category.LOGITS

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """How DPOTrainer computes from a release on."""

    since: Version
    rows: Literal["all", "view", "shifted"] = "all"
    """Log-probabilities are of all tokens, of a view of all but the last, or of that view with labels and masks
    beside it, which are copies."""
    at_once: bool = False
    """One ``log_softmax`` is of all sequences."""
    likelihood: bool = False
    """A cross entropy of the chosen sequences is computed, too, whether or not the loss has it (``rpo_alpha``)."""
    stays: bool = False
    """Logits are in variables until the loss is there, while the reference runs."""
    measures: bool = False
    """Entropies and the likeliest words are metrics."""
    hidden_states: bool = False
    """The model returns hidden states of all layers, which stay as long as its logits (``output_hidden_states``),"""
    cache: bool = False
    """or its cache of keys and values, as long, since nothing asks for none (``use_cache``)."""
    alone: bool = False
    """There is no reference: CPOTrainer's and ORPOTrainer's, whose cross entropy is part of the loss."""
    kernel: Literal["", "of-view", "of-copy"] = ""
    """One kernel makes log-probabilities of logits, which it keeps, and another their gradient: trl's, of a view
    (``kernels/logprob_entropy.py``, ``_LogProbEntropyFunction``), or Axolotl's, of a copy (July 2026,
    ``monkeypatch/trainer/utils.py``, ``_SelectiveLogSoftmaxTriton``), whose entropies are of one kernel, too."""


PAIRS = (
    Pairs((0, 10), "view", at_once=True, likelihood=True, stays=True),
    Pairs((0, 12), "view", at_once=True, cache=True),
    Pairs((0, 14), at_once=True, cache=True),
    Pairs((0, 15), cache=True),
    Pairs((0, 18)),
    Pairs((0, 19), hidden_states=True),
    Pairs((0, 29), "shifted", stays=True, measures=True),
    Pairs((1, 6), "view", stays=True, measures=True),
)


POLICY_ALONE = (
    Pairs((1, 0), "view", stays=True, alone=True),
    Pairs((1, 14), "view", stays=True, alone=True, kernel="of-view"),
)
"""``experimental/cpo/cpo_trainer.py`` with ``cpo_alpha`` 0."""

OF_PAIRS: Mapping[str, Sequence[Pairs]] = {
    "rows": PAIRS,
    "rows-of-copy": (Pairs((0, 0), "view", stays=True, measures=True, kernel="of-copy"),),
    "rows-alone": POLICY_ALONE,
    "rows-and-likelihood": tuple(replace(one, likelihood=True) for one in POLICY_ALONE),
}
"""By what becomes of log-probabilities (``TrainingLoop.reduced``)."""


@dataclass(frozen=True, slots=True)
class Groups:
    """How GRPOTrainer computes from a release on."""

    since: Version
    divides: Literal["", "in-place", "new"] = "new"
    """How logits are divided by the temperature, if they are."""
    entropies: Literal["", "sequence", "chunk"] = ""
    """Whether they are taken, and of what at once."""
    grouped: bool = True
    """All but the last token are a view, and the completion's are a view of that."""
    stays: bool = False
    """The model's output is in a variable."""
    cache: bool = False
    """The model returns its cache of keys and values, which ends once its logits are taken (``use_cache``)."""


GROUPS = (
    Groups((0, 15), divides="", cache=True),
    Groups((0, 16), cache=True),
    Groups((0, 19), grouped=False, cache=True),
    Groups((0, 20), entropies="sequence", cache=True),
    Groups((0, 22), entropies="sequence"),
    Groups((0, 23), entropies="chunk"),
    Groups((1, 0), "in-place", "chunk"),
    Groups((1, 10), entropies="chunk", stays=True),
)


@dataclass(frozen=True, slots=True)
class Supervised:
    """What SFTTrainer measures of the logits from a release on, behind the model's own loss."""

    since: Version
    entropies: Literal["", "sequence", "chunk", "chunk-of-shifted"] = ""
    """Whether they are taken, of what at once, and of all logits or those of all but the last token."""
    copies: int = 1
    """Of the logits of all but the last token, none of which ends before the last is made."""


SUPERVISED = (
    Supervised((0, 0), copies=0),
    Supervised((0, 15)),
    Supervised((0, 22), "sequence"),
    Supervised((0, 23), "chunk"),
    Supervised((1, 3), "chunk-of-shifted", 2),
    Supervised((1, 6), "chunk-of-shifted", 0),
)

Form = TypeVar("Form", Pairs, Groups, Supervised)


def form(forms: Sequence[Form], trl: Version) -> Form:
    """What the release ``trl`` does."""
    return [one for one in forms if one.since <= trl][-1]


CHUNK = 128
"""Rows of which an entropy is taken at once (``chunk_size``)."""

FIRST_OF_LOSS = (
    "labels_cloned", "logits_shifted", "logits_by_temperature", "logits_of_labels", "log_probabilities_of_sequence",
    "log_probabilities",
)  # fmt: skip
"""One of these is the first tensor that is made once the model has returned its logits,"""

LOSS = "loss"
"""and this one once all that it has returned has ended, where hidden states are among it."""

JOINED = ("input_ids", "attention_mask")
"""What GRPOTrainer makes of prompts and completions, until its loss is computed;"""

CONCATENATED = (*JOINED, "labels", "loss_mask")
"""DPOTrainer before 0.29 of prompts, of chosen and of rejected sequences, until log-probabilities are there."""


def head(
    r: Recorder, hidden: Tensor, shape: LayerShape, how: Pairs | Groups, kept: int, *, metrics: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss of pairs, or that of groups of ``kept`` tokens of completions; and what is in variables until
    metrics are there, which the policy has, and its reference has not."""
    if isinstance(how, Groups):
        own = of_groups if metrics else log_probabilities_of_groups
        return own(r, hidden, shape, kept, how), []
    if how.alone:
        return of_policy_alone(r, hidden, shape, how)
    if not how.measures:
        return of_concatenated(r, hidden, shape, how, metrics=metrics)
    return of_pairs(r, hidden, shape, how, metrics=metrics)


def of_pairs(
    r: Recorder, hidden: Tensor, shape: LayerShape, how: Pairs, *, metrics: bool
) -> tuple[Tensor, list[Tensor]]:
    """DPOTrainer's loss, behind which its metrics are; and what is in variables until these are there."""
    logits = returned(r, hidden, shape)
    b, s, _ = logits.shape
    variables = [logits]
    if how.rows == "shifted":
        view = ends.all_but_last(r, logits, shape, "logits", LOGITS)
        variables += [view, *(r.empty((b, s - 1), "int64", name) for name in ("labels_shifted", "mask_shifted"))]
    else:
        view = rows_of(r, logits, s - 1, shape.slices_whole, grouped=False)
    loss, made = loss_of_rows(r, LABELS[how.kernel](r, view))
    variables += made
    if metrics:
        variables += metrics_of_pairs(r, view, copies=how.rows == "view" and b > 1, at_once=how.kernel == "of-copy")
    return loss, variables


def of_concatenated(
    r: Recorder, hidden: Tensor, shape: LayerShape, how: Pairs, *, metrics: bool
) -> tuple[Tensor, list[Tensor]]:
    """The same before 0.29: what the model has returned ends with ``concatenated_forward``, before the reference runs,
    unless the policy's logits are needed for metrics."""
    b = shape.b
    joined = [r.empty((b, shape.s), "int64", name) for name in CONCATENATED]
    logits = returned(r, hidden, shape)
    s, view = shape.s, logits
    if how.rows == "view":
        s, view = s - 1, rows_of(r, logits, s - 1, shape.slices_whole, grouped=False)
    taken = of_labels_at_once(r, view, copies=s < shape.s and b > 1) if how.at_once else of_labels(r, view)
    likelihood = [likelihood_of_chosen(r, logits, shape)] if how.likelihood else []
    if not how.likelihood:
        for name in ("chosen", "rejected"):
            r.empty((b // 2 * (shape.s - 1), shape.spec.vocab), logits.dtype, f"logits_{name}", LOGITS)
    variables = [logits, *likelihood] if how.stays and metrics else []
    likelihood.clear()
    del hidden, logits, view, joined
    loss, made = loss_of_rows(r, taken)
    return loss, [*variables, *made]


def loss_of_rows(r: Recorder, taken: Tensor, *others: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss of the sums of rows and of ``others`` of one number, and what is in variables."""
    sums = r.empty(taken.shape[:1], taken.dtype, "log_probabilities_of_rows")
    sums.node = r.node((taken,), (), viewed(taken))
    loss = r.empty((), taken.dtype, LOSS)
    loss.node = r.node(
        (sums, *others), (), fresh_each((sums, "grad_rows"), *((one, "grad_likelihood") for one in others))
    )
    return loss, [taken, sums]


def of_policy_alone(r: Recorder, hidden: Tensor, shape: LayerShape, how: Pairs) -> tuple[Tensor, list[Tensor]]:
    """CPOTrainer's and ORPOTrainer's loss (``concatenated_forward``, ``get_batch_logps``); and what is in variables
    until metrics are there, the logits among it."""
    b, s = shape.b, shape.s
    joined = [r.empty((b, s), "int64", name) for name in CONCATENATED[:3]]
    logits = returned(r, hidden, shape)
    joined.append(r.empty((b, s), "int64", "labels_cloned"))
    likelihood = [trained_likelihood(r, logits, shape)] if how.likelihood else []
    joined.append(r.empty((b, s - 1), "int64", "labels_shifted"))
    view = rows_of(r, logits, s - 1, shape.slices_whole, grouped=False)
    taken = LABELS[how.kernel](r, view)
    del hidden, view, joined
    loss, made = loss_of_rows(r, taken, *likelihood)
    return loss, [logits, *made]


def trained_likelihood(r: Recorder, logits: Tensor, shape: LayerShape) -> Tensor:
    """``cross_entropy_loss`` of the chosen half."""
    half, s, v = shape.b // 2, *logits.shape[1:]
    chosen = Tensor(
        logits.storage, (half, s, v), logits.dtype, r.node((logits,), (), fresh(logits, "grad_logits_halved", LOGITS))
    )
    shifted = ends.all_but_last(r, chosen, shape, "logits", LOGITS)
    labels = r.empty((half * (s - 1),), "int64", "labels_chosen")
    return ends.cross_entropy(r, shifted, labels)


def of_labels_by_kernel(r: Recorder, logits: Tensor) -> Tensor:
    """The same by trl's kernel: a number for each token, in fp32, of the labels' log-probabilities, of entropies and
    two that backward needs beside the logits."""
    tokens = logits.shape[:-1]
    taken, entropy, *needed = (
        r.empty(tokens, "fp32", name) for name in ("label_log_probabilities", "entropies", "log_z", "expected_logits")
    )
    del entropy
    return taken.by(r.node((logits,), (logits, *needed), fresh(logits, "grad_logits_of_labels", LOGITS)))


def of_labels_at_once(r: Recorder, logits: Tensor, *, copies: bool) -> Tensor:
    """``logits.log_softmax(-1)`` of all sequences, and the labels' of it, (b, s); ``copies``: of a view."""
    b, s, _ = whole = logits.shape
    given = logits
    if copies:
        given = r.empty(whole, logits.dtype, "logits_shifted", LOGITS)
        given.node = r.node((logits,), (), lambda r, gradients: gradients)
    every = ops.log_softmax(r, given, "log_probabilities")
    del given
    back = fresh(every, "grad_log_probabilities", LOGITS)
    return r.empty((b, s), logits.dtype, "label_log_probabilities").by(r.node((every,), (every,), back))


def likelihood_of_chosen(r: Recorder, logits: Tensor, shape: LayerShape) -> Tensor:
    """``cross_entropy_loss`` of the chosen half, with a graph that no backward runs through."""
    half = shape.b // 2
    s, v = logits.shape[1:]
    given = Tensor(logits.storage, (half * (s - 1), v), logits.dtype)
    if half > 1:
        given = r.empty((half * (s - 1), v), logits.dtype, "logits_chosen", LOGITS)
    given.node = r.node((logits,), (), lambda r, gradients: [None])
    labels = r.empty((half * (s - 1),), "int64", "labels_chosen")
    return ends.cross_entropy(r, given, labels)


def of_groups(r: Recorder, hidden: Tensor, shape: LayerShape, kept: int, how: Groups) -> Tensor:
    """GRPOTrainer's loss of the last ``kept`` tokens."""
    joined = [r.empty((shape.b, shape.s), "int64", name) for name in JOINED]
    loss = clipped(r, log_probabilities_of_groups(r, hidden, shape, kept, how), kept)
    del joined
    return loss


def log_probabilities_of_groups(r: Recorder, hidden: Tensor, shape: LayerShape, kept: int, how: Groups) -> Tensor:
    """``_get_per_token_logps_and_entropies``, (b, kept)."""
    asked = shape.transformers >= LOGITS_TO_KEEP  # others take no notice of the argument
    logits = returned(r, *(ends.last_tokens(r, hidden, shape, kept + 1) if asked else (hidden, shape)))
    output = [logits] if how.stays else []
    view = rows_of(r, logits, kept, shape.slices_whole, grouped=how.grouped)
    if how.divides == "new":
        view = ops.elementwise(r, "logits_by_temperature", (view,), category=LOGITS)
    elif how.divides:
        view = divided_in_place(r, logits, view)
    del logits
    taken = of_labels(r, view)
    if how.entropies:
        copies = how.divides == "in-place" and view.shape[0] > 1
        entropies(r, view, copies=copies, at_once=CHUNK if how.entropies == "chunk" else kept)
    output.clear()
    joined = r.empty(taken.shape, taken.dtype, "log_probabilities_joined")
    return joined.by(r.node((taken,), (), viewed(taken)))


def measured(r: Recorder, logits: Tensor, trl: Version) -> None:
    """What SFTTrainer computes of the model's logits, without a graph but for the first copy: entropies, and the
    likeliest words, which are labels or not."""
    how = form(SUPERVISED, trl)
    b, s, v = logits.shape
    if how.entropies in ("sequence", "chunk"):
        entropies(r, logits, copies=False, at_once=s if how.entropies == "sequence" else CHUNK)
    copies: list[Tensor] = []
    for number in range(max(how.copies, how.entropies == "chunk-of-shifted")):
        if how.copies and b > 1:
            copies.append(r.empty((b, s - 1, v), logits.dtype, "logits_shifted", LOGITS))
        if how.entropies == "chunk-of-shifted" and not number:
            shifted = Tensor(logits.storage, (b, s - 1, v), logits.dtype)
            entropies(r, shifted, copies=not how.copies and b > 1, at_once=CHUNK)
            del shifted
    if how.copies or how.entropies:
        r.empty((b, s - 1), "int64", "likeliest_words")
    copies.clear()


def returned(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """The model's logits, which Accelerate casts to fp32 when autocast has ended, and its cache
    (``ConvertOutputsToFp32``); before 4.46 the model itself does."""
    logits = ends.logits_of(r, hidden, shape)
    r.casts.clear()
    upcast = r.autocast is not None or shape.transformers < LOSS_FUNCTION
    return ops.cast(r, logits, "fp32", "logits_fp32", LOGITS) if upcast else logits


def rows_of(r: Recorder, logits: Tensor, kept: int, sliced: int, *, grouped: bool) -> Tensor:
    """A view of all but the last token, whose gradient is laid into zeros, and of these, if ``grouped``, of the last
    ``kept``."""
    b, _, v = logits.shape
    dtype = logits.dtype

    def slice_of(x: Tensor, kept: int) -> Tensor:
        x = ops.sliced_whole(r, x, sliced * grouped, "logits", LOGITS)
        node = r.node((x,), (), fresh(x, "grad_logits_sliced", LOGITS))
        return ops.sliced_whole(r, Tensor(x.storage, (b, kept, v), dtype, node), sliced, "logits", LOGITS)

    view = slice_of(logits, logits.shape[1] - 1)
    return slice_of(view, kept) if grouped else view


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

    chosen_ones: list[Tensor] = []
    variable = None
    for one in unbound(r, logits):
        every = ops.log_softmax(r, one, "log_probabilities_of_sequence")
        variable = every
        back = fresh(every, "grad_log_probabilities", LOGITS)
        made = r.empty((s,), dtype, "log_probabilities_of_labels").by(r.node((every,), (every,), back))
        chosen_ones.append(made)
    result = joined(r, chosen_ones, "label_log_probabilities")
    del variable, every
    return result


def of_labels_of_copy(r: Recorder, logits: Tensor) -> Tensor:
    """The same by Axolotl's: of a copy of the view, unless that is of one sequence; in fp32, and cast."""
    b, s, v = logits.shape
    given = logits
    if b > 1:
        copied = r.node((logits,), (), lambda r, gradients: gradients)
        given = r.empty((b * s, v), logits.dtype, "logits_shifted", LOGITS).by(copied)
    labels = r.empty((b * s,), "int64", "labels_shifted")
    taken = r.empty((b * s,), "fp32", "label_log_probabilities")
    sums = r.empty((b * s,), "fp32", "log_sums")
    taken.node = r.node((given,), (given, labels, sums), fresh(given, "grad_logits_of_labels", LOGITS))
    del given, labels, sums
    return ops.cast(r, taken, logits.dtype, "label_log_probabilities_cast").view(b, s)


LABELS: Mapping[str, Callable[[Recorder, Tensor], Tensor]] = {
    "": of_labels,
    "of-view": of_labels_by_kernel,
    "of-copy": of_labels_of_copy,
}
"""``selective_log_softmax`` by its kernel (``Pairs.kernel``)."""


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
    out = r.in_turn((whole, dtype, "logits_less_largest", LOGITS), (whole[:1], dtype, "log_sum_of_sequence"))
    made = ("logits_less_log_sum", "probabilities_of_sequence", "grad_logits_of_sequence")
    backward = by_way_of(*((whole, dtype, name, LOGITS) for name in made))
    return out.by(r.node((row,), (row, out), backward))


def entropies(r: Recorder, logits: Tensor, *, copies: bool, at_once: int = CHUNK) -> Tensor:
    """``entropy_from_logits``, without a graph, of so many tokens ``at_once``; ``copies``: of a view whose sequences do
    not follow one another."""
    *tokens, v = logits.shape
    n, dtype = tokens[0] * tokens[1], logits.dtype
    flat = r.empty((n, v), dtype, "logits_flat", LOGITS) if copies else logits
    sizes = [
        min(at_once, n - start) for start in range(0, n, at_once)
    ]  # those between the second and the last are alike
    chunk = partial(r.empty, dtype=dtype, category=LOGITS)
    logarithms = None
    for size in sizes[:2] + sizes[2:][-1:]:
        logarithms = chunk((size, v), name="log_probabilities_of_chunk")
        exponentials = chunk((size, v), name="probabilities_of_chunk")
        product = chunk((size, v), name="entropy_of_chunk")
        del exponentials, product
    out = r.empty((n,), dtype, "entropies")
    del flat, logarithms
    return out


def metrics_of_pairs(r: Recorder, logits: Tensor, *, copies: bool, at_once: bool) -> list[Tensor]:
    """What DPOTrainer logs: entropies, by chunks or all ``at_once`` in a kernel; of chosen and of rejected labels the
    logits' means, which a mask copies; and of the chosen the likeliest words."""
    b, s, v = logits.shape
    half = (b // 2 * s, v)
    of_tokens = r.empty((b * s,), "fp32", "entropies") if at_once else entropies(r, logits, copies=copies)
    for name in ("chosen", "rejected"):
        masked = r.empty(half, logits.dtype, f"logits_{name}", LOGITS)
        means = r.empty(half[:1], logits.dtype, f"mean_logits_{name}")
        del masked, means
    return [of_tokens, r.empty((b // 2, s), "int64", "likeliest_words")]


# -- tapes -------------------------------------------------------------------------------------------


def hidden_ended(tape: Tape, behind: Sequence[str] = FIRST_OF_LOSS) -> Tape:
    """``tape`` with the hooks behind the model's forward where the model has returned, before the first tensor of
    ``FIRST_OF_LOSS``; and with the end of the head's input, if no operator has saved it, before the first of
    ``behind``."""
    hooks = [event for event in tape if isinstance(event, Seam) and event.hook is Hook.AFTER_FORWARD]
    ended = [event for event in tape if isinstance(event, Drop) and event.tensor == INPUT]
    return _before(_before(tape, hooks, FIRST_OF_LOSS), ended, behind)


def hooked_behind_loss(tape: Tape) -> Tape:
    """The head's backward ``tape`` with the hooks before the model's backward where its logits have their gradient."""
    hooks = [event for event in tape if isinstance(event, Seam) and event.hook is Hook.BEFORE_BACKWARD]
    return _before(tape, hooks, OF_PRODUCT)


OF_PRODUCT = ("grad_logits_weight", "grad_logits_input")
"""Backward of the product that makes logits begins with one of these."""


def _before(tape: Tape, events: Sequence[Event], names: Sequence[str]) -> Tape:
    """``tape`` with its own ``events`` before the first tensor that is called as one of ``names``, if there is one."""
    rest = [event for event in tape if event not in events]
    places = (place for place, one in enumerate(rest) if isinstance(one, Hold) and one.name in names)
    if not events or (at := next(places, None)) is None:
        return tape
    return (*rest[:at], *events, *rest[at:])
