"""torchtitan's cross entropy as one kernel in either direction, and of logits of which every tensor-parallel rank has a
part of the vocabulary.

``torchtitan/components/loss.py`` (``cross_entropy_loss``, ``_LossParallelCrossEntropy``) of 21 August 2026 (commit
b5bcd76): a Python function on local tensors, in fp32. Shapes: n tokens, v entries of the vocabulary here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tape.events import Category
from .autograd import Gradients, Recorder, Shape, Tensor, size_of
from .gradients import fresh
from .tensor_parallel import exponentials, reduced
from .work import Exchange, Operator, Stream

LOGITS = Category.LOGITS


def compiled(r: Recorder, logits: Tensor, labels: Tensor, *, averages: bool = False) -> Tensor:
    """``torch.compile`` of ``cross_entropy_loss`` (``BaseLoss._maybe_compile``), as Inductor partitions it: saves
    (…, v) ``logits`` in 16 bits, labels, and of each token the maximum and the logarithm of the sum, in fp32, and the
    number of tokens where it ``averages`` over them; the logits' gradient is in 16 bits at once."""
    shape, dtype, column = logits.shape, logits.dtype, (*logits.shape[:-1], 1)
    top = r.empty(column, "fp32", "logits_max")
    logarithm = r.empty(column, "fp32", "exponentials_log")
    loss = r.empty((), "fp32", "loss")
    saved = [logits, labels, top, logarithm]
    if averages:
        saved.append(r.empty((), "fp32", "total_weight"))
    size = size_of(shape, dtype)
    work = Operator((Stream(2 * size, 2, True),), (Stream(2 * size, 1, True),))

    loss.node = r.node((logits,), saved, fresh(logits, "grad_logits", LOGITS), work=work)
    return loss


def vocab_parallel(r: Recorder, logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over (n, v) fp32 ``logits``: saves logarithms of probabilities, as large as they are, and labels."""
    shape, dtype = logits.shape, logits.dtype
    column = (shape[0], 1)
    shifted, top, total = exponentials(r, logits)
    out = r.in_turn((column, dtype, "exponentials_log"), (shape, dtype, "log_probabilities", LOGITS))
    places = _places(r, shape[0])
    picked = r.empty(column, dtype, "label_log_probability")
    picked = reduced(r, picked, "label_log_probability_reduced")
    result = r.empty((shape[0],), dtype, "negative_log_likelihood")
    result = _counted(r, "negative_log_likelihood_counted", result.shape, dtype)
    loss = r.empty((), dtype, "loss")
    # the maximum; less it; exponentials; their sum; the logarithm of which is subtracted
    size, rows = size_of(shape, dtype), size_of(column, dtype)
    work = Operator(
        (Stream(8 * size, 5, True), Exchange("all-reduce", rows, times=3)),
        (Stream(9 * size, 4, True),),  # zeros with the label's entry; exponentials; their sum; times the gradient
    )
    loss.node = r.node((logits,), (out, labels), lambda r, gradients: _gradient(r, gradients, shape, dtype), work=work)
    del result, picked, places, shifted, top, total
    return loss


def _places(r: Recorder, n: int) -> tuple[Tensor, ...]:
    """Labels that count, which of them are other ranks', and where the own ones are."""
    safe = _counted(r, "labels_safe", (n,), "int64")
    below = r.empty((n,), "bool", "label_below")
    above = r.empty((n,), "bool", "label_above")
    outside = r.empty((n,), "bool", "label_of_others")
    del below, above
    return safe, outside, r.empty((n,), "int64", "labels_local")


def _counted(r: Recorder, name: str, shape: Shape, dtype: str) -> Tensor:
    """``torch.where(labels != IGNORE_INDEX, …, 0)``."""
    counted = r.empty(shape[:1], "bool", "label_counted")
    zero = r.empty((), dtype, "zero")
    out = r.empty(shape, dtype, name)
    del zero, counted
    return out


def _gradient(r: Recorder, gradients: Gradients, shape: Shape, dtype: str) -> Sequence[Tensor | None]:
    n = shape[0]
    places = _places(r, n)
    at_label = r.empty(shape, dtype, "grad_at_label", LOGITS)
    rows = r.empty((n,), "int64", "row_numbers")
    update = r.in_turn(((n,), dtype, "label_of_others_cast"), ((n,), dtype, "grad_at_label_update"))
    each = _counted(r, "grad_loss_each", (n, 1), dtype)
    both = r.in_turn((shape, dtype, "exponentials", LOGITS), (shape, dtype, "grad_logits_unscaled", LOGITS))
    out = r.empty(shape, dtype, "grad_logits", LOGITS)
    del both, each, update, rows, at_label, places
    return [out]
