"""A head that gives each sequence scores, the model's own loss of these, and trl's of those of pairs.

transformers 5.23, ``modeling_layers.py`` (``GenericForSequenceClassification.forward``; families with a class of their
own have the same code): one linear layer without a bias gives every token its scores, of which those of the last token
that is no padding are taken. The model's own loss is a cross entropy over the scores,
of one score a squared error (``loss/loss_utils.py``, ``ForSequenceClassificationLoss``). trl 1.16,
``trainer/reward_trainer.py`` (``RewardTrainer.compute_loss``): the mean of
``-logsigmoid(chosen - rejected)``, whose CUDA kernel has no buffer (``log_sigmoid_forward_cuda``). What the sort behind
``index_put`` takes inside is not counted, nor metrics of a number each, which end with the loss. Shapes: b sequences,
b / 2 pairs, s tokens, n labels.
"""

from __future__ import annotations

from ..families import family
from ..tape.events import Category
from . import ops
from .autograd import Recorder, Tensor
from .ends import cross_entropy
from .gradients import by_way_of, fresh
from .huggingface import LayerShape


def head(r: Recorder, hidden: Tensor, shape: LayerShape, *, of_pairs: bool) -> tuple[Tensor, Tensor]:
    """Loss, and the scores (b, n) that the model returns."""
    spec, b, s = shape.spec, shape.b, shape.s
    if (own := family(spec.family).scores) is not None:
        scores = own(r, hidden, shape)
        return loss_of_labels(r, scores), scores
    weight = r.parameter("head.weight", (spec.labels, spec.hidden), shape.dtype)
    logits = ops.linear(r, hidden, weight, None, name="scores_of_tokens", category=Category.LOGITS)
    last, mask, indices = last_tokens(r, b, s)
    scores = taken(r, logits, last)
    loss = None if of_pairs else loss_of_labels(r, scores)
    del logits, last, mask, indices
    if loss is not None:
        return loss, scores
    if r.autocast is not None:
        scores = ops.cast(r, scores, "fp32", "scores_fp32")
    return loss_of_pairs(r, scores), scores


def loss_of_labels(r: Recorder, scores: Tensor) -> Tensor:
    """``ForSequenceClassificationLoss`` of (b, n) and labels (b,), which for one score are floating-point numbers of
    its dtype."""
    b, n = scores.shape
    if n > 1:
        return cross_entropy(r, scores, r.outside((b,), "int64", Category.INPUTS))
    (scores,) = ops.entering(r, "mse_loss", scores.view(b), name="scores")
    dtype = scores.dtype
    saved = (scores, r.outside((b,), dtype, Category.INPUTS))
    return r.empty((), dtype, "loss").by(r.node((scores,), saved, fresh(scores, "grad_scores")))


def last_tokens(r: Recorder, b: int, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sequence the last one that is no padding, and variables of ``forward``."""
    mask = r.in_turn(((b, s), "bool", "differs_from_padding"), ((b, s), "int32", "non_pad_mask"))
    indices = r.empty((s,), "int32", "token_indices")
    last = r.in_turn(((b, s), "int32", "indices_of_tokens"), ((b,), "int64", "last_non_pad_token"))
    return last, mask, indices


def taken(r: Recorder, logits: Tensor, last: Tensor) -> Tensor:
    """``logits[arange(b), last]``, (b, n); the gradient is laid into zeros."""
    whole, dtype = logits.shape, logits.dtype
    rows = r.empty(whole[:1], "int64", "rows")
    out = r.empty((whole[0], whole[2]), dtype, "scores")
    node = r.node((logits,), (rows, last), fresh(logits, "grad_scores_of_tokens"))
    return out.by(node)


def loss_of_pairs(r: Recorder, scores: Tensor) -> Tensor:
    """The first half of the rows was chosen, the second rejected."""
    whole, pairs, dtype = scores.shape, (scores.shape[0] // 2,), scores.dtype
    halves = by_way_of((pairs, dtype, "grad_rejected"), (whole, dtype, "grad_scores"))
    difference = r.empty(pairs, dtype, "difference").by(r.node((scores,), (), halves))
    logarithm = ops.elementwise(r, "log_sigmoid", (difference,), (difference,))
    mean = r.empty((), dtype, "mean").by(
        r.node((logarithm,), (), lambda r, gradients: [r.empty(pairs, dtype, "grad_log_sigmoid_mean")])
    )
    del logarithm
    return ops.elementwise(r, "loss", (mean,))
