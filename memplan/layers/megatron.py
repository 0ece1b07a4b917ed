"""Transformer layers, embedding, head and losses as Megatron-LM wrote them in 2021/22 and BigScience's fork runs them.

bigscience-workshop/Megatron-DeepSpeed, ``megatron/model/transformer.py``, ``fused_softmax.py``,
``fused_bias_gelu.py``, ``fused_layer_norm.py``, ``language_model.py``, ``gpt_model.py``, ``megatron/mpu/layers.py``,
``mpu/mappings.py`` and ``mpu/cross_entropy.py`` (November 2021). Tensor-parallel collectives work in place and allocate
nothing here. Sequence parallelism and selective recompute are those of Korthikanti et al. (arXiv 2205.05198).

Shapes: s sequence, b micro-batch, h hidden, a heads, d head size, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from ..plan.spec import ModelSpec
from ..tape.events import Category
from ..values import dataclass
from . import ops
from .autograd import Gradients, Recorder, Tensor, size_of
from .gradients import fresh, fresh_each, viewed
from .huggingface import layer_norm
from .module import STALE
from .recompute import recomputed_reentrant
from .reductions import summed
from .work import NOTHING, Exchange, Operator, Ranks, Stream, in_place, parallel_cross_entropy

LOGITS = Category.LOGITS


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """One micro-batch of one architecture on one tensor-parallel rank."""

    spec: ModelSpec
    b: int
    s: int
    t: int
    dtype: str
    vocab: int
    """Padded vocabulary, a multiple of 128 t (``megatron/tokenizer``, ``_vocab_size_with_padding``)."""
    sequence_parallel: bool = False
    selective: bool = False
    fused_softmax: bool = True

    @property
    def ranks(self) -> Ranks:
        """How they share linear layers."""
        return Ranks(self.t, self.sequence_parallel)

    @property
    def hidden(self) -> tuple[int, int, int]:
        """Shape of the hidden state outside the tensor-parallel regions: (s, b, h), or (s/t, b, h)."""
        return (self.s // self.t if self.sequence_parallel else self.s, self.b, self.spec.hidden)


def softmax_is_fused(b: int, s: int, heads: int) -> bool:
    """``FusedScaleMaskSoftmax.is_kernel_available`` (limit 2048 of November 2021)."""
    return 16 < s <= 2048 and s % 4 == 0 and (b * heads) % 4 == 0


def column_parallel(r: Recorder, x: Tensor, name: str, n: int, shape: ParallelShape, *, bias: bool) -> Tensor:
    """``ColumnParallelLinear``: n outputs on this rank. With sequence parallelism the input is gathered,
    used, dropped, and gathered again in backward: only its shard is saved."""
    h = x.shape[-1]
    weight = r.parameter(f"{name}.weight", (n, h), x.dtype)
    added = [r.parameter(f"{name}.bias", (n,), x.dtype)] if bias else []
    if not shape.sequence_parallel:
        return ops.linear(r, x, weight, added[0] if bias else None, name=name, parallel=shape.ranks.column)
    s, b, dtype, shard = shape.s, shape.b, x.dtype, x.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gathered = r.empty((s, b, h), dtype, f"{name}_gathered", Category.COMMUNICATION_BUFFERS)
        grad = r.empty((s, b, h), dtype, f"grad_{name}_input")
        grad_weight = r.empty((n, h), dtype, f"grad_{name}_weight")
        grad_bias = [summed(r, (s * b, n), (n,), dtype, f"grad_{name}_bias")] if bias else []
        scattered = r.empty(shard, dtype, f"grad_{name}_scattered")
        del gathered, grad
        return [scattered, grad_weight, *grad_bias]

    work = shape.ranks.column(s * b, n, h, dtype)
    node = r.node((x, weight, *added), (x, weight), backward, work=work)
    out = r.in_turn(((s, b, h), dtype, f"{name}_gathered", Category.COMMUNICATION_BUFFERS), ((s, b, n), dtype, name))
    return out.by(node)


def row_parallel(r: Recorder, x: Tensor, name: str, shape: ParallelShape) -> Tensor:
    """``RowParallelLinear`` without its bias (``skip_bias_add``): all-reduced in place, or reduce-scattered."""
    h = shape.spec.hidden
    weight = r.parameter(f"{name}.weight", (h, x.shape[-1]), x.dtype)
    out = ops.linear(r, x, weight, name=name, parallel=shape.ranks.row)
    if not shape.sequence_parallel:
        return out

    return r.empty(shape.hidden, out.dtype, f"{name}_scattered").by(
        r.node((out,), (), fresh(out, f"grad_{name}_gathered"), work=NOTHING)
    )


def bias_dropout_add(r: Recorder, x: Tensor, residual: Tensor, name: str, p: float) -> Tensor:
    """``bias_dropout_add_fused_train``: one fused kernel that keeps the mask; the bias is added here."""
    bias = r.parameter(f"{name}.bias", (x.shape[-1],), x.dtype)
    out = r.empty(x.shape, x.dtype, f"{name}_residual")
    mask = [r.empty(x.shape, "bool", f"{name}_dropout_mask")] if p > 0 and not r.evaluates else []
    shape, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(shape, dtype, f"grad_{name}_dropout")
        return [grad, r.empty(shape[-1:], dtype, f"grad_{name}_bias"), gradients[0]]

    out.node = r.node((x, bias, residual), mask, backward)
    return out


def bias_gelu(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``GeLUFunction``: one fused kernel, saves input and bias; the bias gradient is a sum of the input's."""
    bias = r.parameter(f"{name}.bias", (x.shape[-1],), x.dtype)
    backward = fresh_each((x, f"grad_{name}_gelu"), (bias, f"grad_{name}_bias"))
    return r.output((x, bias), (x, bias), backward, x.shape, x.dtype, f"{name}_gelu")


def attention_probabilities(r: Recorder, scores: Tensor, shape: ParallelShape) -> Tensor:
    """``FusedScaleMaskSoftmax``: one kernel whose backward writes into its incoming gradient, or five
    operators with an fp32 copy of the scores where the kernel does not fit."""
    if shape.fused_softmax:
        out = r.empty(scores.shape, scores.dtype, "probabilities")
        return out.by(r.node((scores,), (out,), lambda r, gradients: gradients, work=in_place(out.shape, out.dtype, 3)))
    upcast = ops.cast(r, scores, "fp32", "scores_fp32")
    upcast = ops.scale(r, upcast, "scores_scaled")
    upcast = ops.elementwise(r, "scores_masked", (upcast,))
    return ops.cast(r, ops.softmax(r, upcast, "probabilities_fp32"), scores.dtype, "probabilities")


def core_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: ParallelShape) -> tuple[Tensor, Tensor]:
    """Scores, softmax, dropout and context on (b a/t, s, d): the context as (s, b, h/t), and the scores,
    which ``ParallelAttention.forward`` keeps in a variable until it returns.

    ``baddbmm`` writes beside its first argument: scratch of the scores' size, or ALiBi's own tensor, which it copies
    into its result.
    """
    b, s, n, d = shape.b, shape.s, shape.spec.heads // shape.t, shape.spec.head_dim
    scores_shape = (b * n, s, s)
    alibi = shape.spec.positions == "alibi"
    scratch = [] if alibi else [r.empty(scores_shape, shape.dtype, "matmul_result")]
    if alibi and r.counts:
        r.work.append(Stream(2 * size_of(scores_shape, shape.dtype)))
    attention_scores = ops.matmul(r, q, k, scores_shape, "scores")
    scratch.clear()
    probabilities = attention_probabilities(r, attention_scores, shape)
    probabilities = ops.dropout(r, probabilities, shape.spec.attention_dropout, "attention_dropout")
    context = ops.matmul(r, probabilities, v, (b * n, s, d), "context")
    context = ops.contiguous(r, context, (s, b, n * d), "context_contiguous")
    return context, attention_scores


def context_alone(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: ParallelShape) -> Tensor:
    """``core_attention`` as a region of its own, for selective recompute."""
    context, _ = core_attention(r, q, k, v, shape)
    return context


def parallel_attention(r: Recorder, hidden: Tensor, shape: ParallelShape) -> Tensor:
    """``ParallelAttention.forward``: queries, keys and values are strided views of one tensor."""
    b, s, n, d = shape.b, shape.s, shape.spec.heads // shape.t, shape.spec.head_dim
    mixed = column_parallel(r, hidden, "qkv", 3 * n * d, shape, bias=True)
    q, k, v = ops.split(r, mixed, [(b * n, s, d)] * 3, "qkv")
    if shape.selective:
        context = recomputed_reentrant(r, lambda r, q, k, v: context_alone(r, q, k, v, shape), (q, k, v))
    else:
        context, _scores = core_attention(r, q, k, v, shape)
    return row_parallel(r, context, "attention_output", shape)


def parallel_mlp(r: Recorder, hidden: Tensor, shape: ParallelShape) -> Tensor:
    """``ParallelMLP.forward``."""
    intermediate = column_parallel(r, hidden, "up", shape.spec.ffn // shape.t, shape, bias=False)
    intermediate = bias_gelu(r, intermediate, "up")
    return row_parallel(r, intermediate, "down", shape)


def layer(r: Recorder, hidden: Tensor, shape: ParallelShape) -> Tensor:
    """``ParallelTransformerLayer.forward`` (pre-norm, fused bias-dropout-add)."""
    p = shape.spec.hidden_dropout
    normed = layer_norm(r, hidden, "attention_norm")
    attended = parallel_attention(r, normed, shape)
    summed = bias_dropout_add(r, attended, hidden, "attention_output", p)
    normed = layer_norm(r, summed, "mlp_norm")
    fed = parallel_mlp(r, normed, shape)
    output = bias_dropout_add(r, fed, summed, "down", p)
    return output  # noqa: RET504


# -- embedding, head and losses ----------------------------------------------------------------------


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
    size = size_of(out.shape, dtype)

    zeroed.node = r.node(
        (out,),
        (foreign,),
        fresh(out, "grad_word_embeddings_zeroed"),
        work=Operator((Stream(size), Exchange("all-reduce", size))),
    )
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
    return Tensor(x.storage, shape, x.dtype, r.node((x,), (), viewed(x)))


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
    logits = ops.linear(r, hidden, weight, name="logits", category=LOGITS, parallel=Ranks(shape.t, False).column)
    upcast = ops.cast(r, logits, "fp32", "logits_fp32", LOGITS)
    del logits
    r.outside((b, s, v), "fp32", LOGITS, STALE, drops=True)
    return vocab_parallel_cross_entropy(r, upcast, shape.t), upcast


def vocab_parallel_cross_entropy(r: Recorder, logits: Tensor, t: int) -> Tensor:
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

    work = parallel_cross_entropy(shape, t)
    out.node = r.node((logits,), (outside, target), lambda r, gradients: [Tensor(softmax, shape, "fp32")], work=work)
    return r.empty((), "fp32", "loss").by(r.node((out,), (), fresh(out, "grad_loss_per_token")))


EULER = 0.5772
"""By which the harmonic number of n exceeds its logarithm."""


def adaptive_sizes(spec: ModelSpec, cutoffs: tuple[int, ...], div_value: float) -> list[tuple[int, int]]:
    """(projection width, outputs) of each tail cluster of ``torch.nn.AdaptiveLogSoftmaxWithLoss``."""
    edges = [*cutoffs, spec.vocab]
    return [(int(spec.hidden // div_value ** (i + 1)), edges[i + 1] - edges[i]) for i in range(len(cutoffs))]


def adaptive_head(
    r: Recorder, hidden: Tensor, shape: ParallelShape, cutoffs: tuple[int, ...], div_value: float
) -> Tensor:
    """``torch.nn.AdaptiveLogSoftmaxWithLoss`` on (b s, h) in the parameters' dtype, whole on every rank.

    Memory is an upper bound: every tail cluster is given all b s tokens, while each token enters at most one
    (``torch/nn/modules/adaptive.py``). Work is counted of the tokens that do, under Zipf's law. No part is sharded by
    tensor parallelism.
    """
    n, dtype = shape.b * shape.s, shape.dtype
    x = hidden.view(n, shape.spec.hidden)
    tails = adaptive_sizes(shape.spec, cutoffs, div_value)
    first = cutoffs[0] + len(tails)
    out = adaptive_cluster(r, x, r.parameter("head.weight", (first, shape.spec.hidden), dtype), "head_logits")
    edges = (*cutoffs, shape.spec.vocab)
    for i, (width, outputs) in enumerate(tails):
        if r.counts:
            share = log(edges[i + 1] / edges[i]) / (log(edges[-1]) + EULER)
            x = hidden.view(max(1, int(n * share)), shape.spec.hidden)
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
