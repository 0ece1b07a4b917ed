"""What lies before and after the layers in BigScience's Megatron-DeepSpeed: embedding, head and losses.

``megatron/model/language_model.py`` (``EmbeddingPipe``, ``parallel_lm_logits``), ``gpt_model.py``,
``mpu/layers.py`` (``VocabParallelEmbedding``) and ``mpu/cross_entropy.py``, November 2021.
Shapes: b micro-batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.spec import ModelSpec
from ..tape import Category
from . import ops
from .autograd import Gradients, Recorder, Tensor
from .megatron import ParallelShape, layer_norm
from .module import STALE

LOGITS = Category.LOGITS


def embedding(r: Recorder, shape: ParallelShape) -> Tensor:
    """``EmbeddingPipe.forward``: (b, s, h).

    The vocabulary-parallel lookup keeps the shifted indices (int64) and the mask of foreign tokens
    (bool); its backward zeroes those rows in a copy of the gradient before the dense (v/t, h) gradient.
    """
    spec, b, s, h, dtype = shape.spec, shape.b, shape.s, shape.spec.hidden, shape.dtype
    words = vocab_parallel_embedding(r, shape)
    if spec.embedding_norm:
        words = layer_norm(r, words, "embedding_norm")
    hidden = words
    if spec.positions == "learned":
        table = r.parameter("position.weight", (spec.positions_max, h), dtype)
        ids = r.outside((b, s), "int64", Category.INPUTS)
        places = ops.embedding(r, table, ids, "position_embeddings")
        hidden = ops.add(r, words, places, "embedding_sum")
        del places
    del words
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def vocab_parallel_embedding(r: Recorder, shape: ParallelShape) -> Tensor:
    b, s, h, dtype = shape.b, shape.s, shape.spec.hidden, shape.dtype
    weight = r.parameter("word.weight", (shape.vocab // shape.t, h), dtype)
    if shape.t == 1:
        return ops.embedding(r, weight, r.outside((b, s), "int64", Category.INPUTS), "word_embeddings")
    below, above = r.empty((b, s), "bool", "tokens_below"), r.empty((b, s), "bool", "tokens_above")
    foreign = r.empty((b, s), "bool", "tokens_foreign")
    del below, above
    indices = r.empty((b, s), "int64", "masked_input")
    out = ops.embedding(r, weight, indices, "word_embeddings")
    zeroed = out.view(*out.shape)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [r.empty((b, s, h), dtype, "grad_word_embeddings_zeroed")]

    zeroed.node = r.node((out,), (foreign,), backward)
    return zeroed


def transposed(r: Recorder, x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The lambdas of the layer list, ``x.transpose(0, 1).contiguous()``: a copy, whose gradient is a view.

    For b = 1 the copy is made, too: a transposed dimension of size 1 counts as contiguous only where
    its strides do not matter, so this one is a view.
    """
    if shape[0] == 1 or shape[1] == 1:
        return view(r, x, shape)
    return ops.contiguous(r, x, shape, "transposed")


def view(r: Recorder, x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The same storage; a node of its own, so that the module has something to run backward."""
    back = x.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = gradients[0]
        assert gradient is not None
        return [gradient.view(*back)]

    return Tensor(x.storage, shape, x.dtype, r.node((x,), (), backward))


def final_norm(r: Recorder, hidden: Tensor) -> Tensor:
    """``MixedFusedLayerNorm``."""
    return layer_norm(r, hidden, "final_norm")


def head(r: Recorder, hidden: Tensor, shape: ParallelShape) -> tuple[Tensor, Tensor]:
    """``EmbeddingPipe`` as head, ``float16_to_fp32`` and ``CrossEntropy``: ``(loss, logits kept by the engine)``.

    The pipeline engine stores the model's output in the slot of its micro-batch (two on the last
    stage) and never clears it (``runtime/pipe/engine.py``, ``_exec_forward_pass``), so two copies of
    the fp32 logits stay; a new one displaces the older.
    """
    b, s, v = shape.b, shape.s, shape.vocab // shape.t
    weight = r.parameter("word.weight", (v, shape.spec.hidden), shape.dtype)
    logits = ops.linear(r, hidden, weight, name="logits", category=LOGITS)
    upcast = ops.cast(r, logits, "fp32", "logits_fp32", LOGITS)
    del logits
    stale = r.outside((b, s, v), "fp32", LOGITS, STALE, drops=True)
    del stale
    return vocab_parallel_cross_entropy(r, upcast), upcast


def vocab_parallel_cross_entropy(r: Recorder, logits: Tensor) -> Tensor:
    """``_VocabParallelCrossEntropy`` on (b, s, v/t) fp32, all in the logits' own storage.

    The maximum is subtracted, the exponential taken and the division done in place, and in backward
    the saved softmax becomes the gradient; only (b, s)-sized tensors are new.
    """
    b, s = logits.shape[:2]
    maximum, where = r.empty((b, s), "fp32", "logits_max"), r.empty((b, s), "int64", "logits_argmax")
    del where
    outside = r.empty((b, s), "bool", "target_mask")
    target = r.empty((b * s,), "int64", "masked_target")
    predicted, total = r.empty((b, s), "fp32", "predicted_logits"), r.empty((b, s), "fp32", "sum_exp_logits")
    out = r.empty((b, s), "fp32", "loss_per_token")
    del maximum, predicted, total
    softmax = logits.storage
    shape = logits.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [Tensor(softmax, shape, "fp32")]

    out.node = r.node((logits,), (outside, target), backward)
    loss = r.empty((), "fp32", "loss")
    loss.node = r.node((out,), (), lambda r, gradients: [r.empty((b, s), "fp32", "grad_loss_per_token")])
    return loss


def adaptive_sizes(spec: ModelSpec, cutoffs: tuple[int, ...], div_value: float) -> list[tuple[int, int]]:
    """(projection width, outputs) of each tail cluster of ``torch.nn.AdaptiveLogSoftmaxWithLoss``."""
    edges = [*cutoffs, spec.vocab]
    return [(int(spec.hidden // div_value ** (i + 1)), edges[i + 1] - edges[i]) for i in range(len(cutoffs))]


def adaptive_head(
    r: Recorder, hidden: Tensor, shape: ParallelShape, cutoffs: tuple[int, ...], div_value: float
) -> Tensor:
    """``torch.nn.AdaptiveLogSoftmaxWithLoss`` on (b s, h) in the parameters' dtype, whole on every rank.

    An upper bound: every tail cluster is given all b s tokens, while each token enters at most one
    (``torch/nn/modules/adaptive.py``). No part is sharded by tensor parallelism.
    """
    n, dtype = shape.b * shape.s, shape.dtype
    x = hidden.view(n, shape.spec.hidden)
    tails = adaptive_sizes(shape.spec, cutoffs, div_value)
    first = cutoffs[0] + len(tails)
    out = adaptive_cluster(r, x, r.parameter("head.weight", (first, shape.spec.hidden), dtype), "head_logits")
    for i, (width, outputs) in enumerate(tails):
        part = ops.linear(
            r, x, r.parameter(f"tail.{i}.projection", (width, shape.spec.hidden), dtype), name=f"tail_{i}_projection"
        )
        part = adaptive_cluster(r, part, r.parameter(f"tail.{i}.weight", (outputs, width), dtype), f"tail_{i}_logits")
        out = ops.add(r, out, part, "loss")
    return out


def adaptive_cluster(r: Recorder, x: Tensor, weight: Tensor, name: str) -> Tensor:
    """The logits of one cluster, ``log_softmax`` in fp32 over it, and the gather of its targets: a scalar."""
    logits = ops.linear(r, x, weight, name=name, category=LOGITS)
    upcast = ops.cast(r, logits, "fp32", "cluster_logits_fp32", LOGITS)
    labels = r.empty((logits.shape[0],), "int64", "relative_target")
    del logits
    log_probabilities = ops.log_softmax(r, upcast)
    return ops.nll_loss(r, log_probabilities, labels)
