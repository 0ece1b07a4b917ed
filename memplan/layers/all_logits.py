"""A loss of labels' log-probabilities that is taken of all logits in fp32, as LLaMA-Factory's DPO takes it.

LLaMA-Factory of August 2026: ``train/dpo/trainer.py`` (``concatenated_forward``, ``get_batch_loss_metrics``) and
``train/trainer_utils.py`` (``get_batch_logps``). The logits in fp32 stay in variables until the loss is there, while a
reference runs. Their ``log_softmax`` is of all but the last token, whose view CUDA's kernel copies
(``aten/src/ATen/native/cuda/SoftMax.cu``, ``host_softmax``: ``input_.contiguous()``). Shapes: b sequences, s tokens,
v vocabulary.
"""

from __future__ import annotations

from ..tape.events import Category
from . import ends, ops
from .autograd import Recorder, Tensor
from .gradients import fresh, viewed
from .huggingface import LayerShape

LOGITS = Category.LOGITS


def head(r: Recorder, hidden: Tensor, shape: LayerShape) -> tuple[Tensor, list[Tensor]]:
    """The loss, and what is in variables until it is there."""
    narrow = ends.logits_of(r, hidden, shape)
    logits = ops.cast(r, narrow, "fp32", "logits_fp32", LOGITS)
    del narrow
    sums = summed(r, logits)
    loss = r.empty((), "fp32", "loss")
    return loss.by(r.node((sums,), (), fresh(sums, "grad_rows"))), [logits, sums]


def summed(r: Recorder, logits: Tensor) -> Tensor:
    """``get_batch_logps``: sums (b,) of the labels' log-probabilities."""
    b, s, v = logits.shape
    tokens, words = (b, s - 1), (b, s - 1, v)
    labels = r.empty(tokens, "int64", "labels_cloned")
    mask = r.empty(tokens, "bool", "label_mask")
    sliced = r.node((logits,), (), fresh(logits, "grad_logits_sliced", LOGITS))
    view = Tensor(logits.storage, words, "fp32", sliced)
    copied = r.empty(words, "fp32", "logits_shifted", LOGITS).by(r.node((view,), (), lambda r, gradients: gradients))
    every = ops.log_softmax(r, copied)
    del copied, view
    taken = r.empty(tokens, "fp32", "label_log_probabilities").by(
        r.node((every,), (labels,), fresh(every, "grad_log_probabilities", LOGITS))
    )
    del every
    masked = ops.elementwise(r, "masked_log_probabilities", (taken,), (mask,))
    sums = r.empty((b,), "fp32", "log_probabilities_of_rows")
    return sums.by(r.node((masked,), (), viewed(masked)))
