"""PyTorch's tensor parallelism (``DTensor``, ``torch.distributed.tensor.parallel``) with sequence parallelism, on
one rank's local tensors.

Collectives are functional (``_functional_collectives.py``, ``all_gather_single`` and ``reduce_scatter_single`` of
torch 2.13) and work along dimension 0, so others are copied there or back. Their inputs are held until the output
has been waited for (``ProcessGroupNCCL.cpp``, ``stashed_for_allocator_safety_``). A gradient of a ``DTensor`` is
never added to in place, being of a subclass (``input_buffer.cpp``, ``can_accumulate_inplace``). Shapes: b
micro-batch, s sequence, h hidden, v vocabulary, t tensor-parallel size, n = b s tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tape.events import Category
from . import ops
from .autograd import Gradients, Recorder, Shape, Tensor, Unsummed, size_of
from .gradients import fresh
from .work import Exchange, Kind, Operator, Stream, Work, looked_up

PARTIAL = "partial"
"""Last part of the name of a parameter's gradient that has still to be summed over ranks."""

REPLICATED = "replicated"
"""That of one that every rank has whole, although it holds a part of the parameter."""

_FIRST = "first-"


def tagged(name: str, rows: int) -> str:
    """``name`` of a gradient of which the first ``rows`` are a parameter's: a view of it is left there."""
    return f"{name}/{_FIRST}{rows}"


def kept_of(name: str, shape: Shape) -> Shape:
    """The shape of the parameter whose gradient, called ``name``, is of ``shape``."""
    last = name.rpartition("/")[2]
    return (int(last.removeprefix(_FIRST)), *shape[1:]) if last.startswith(_FIRST) else shape


BUFFERS, LOGITS = Category.COMMUNICATION_BUFFERS, Category.LOGITS

Runner = Callable[[Recorder, Callable[[Recorder], Tensor]], Tensor]
"""Runs an operator, and may keep its output for recomputation."""


def apart(x: Tensor) -> Tensor:
    """``x`` as a ``DTensor``, gradients of whose readers are summed in a tensor of their own."""
    if x.node is not None:
        x.node.apart = True
    return x


# -- redistribution ---------------------------------------------------------------------------------


def all_gather(r: Recorder, shape: Shape, dtype: str, t: int, name: str) -> Tensor:
    """(b, s / t, h) of every rank as (b, s, h): a view of what was received with one sequence, else a copy."""
    b, s, h = shape
    received = r.empty((b * t, s, h), dtype, f"{name}_received", Category.TEMPORARIES if b == 1 else BUFFERS)
    if b == 1:  # _maybe_view_chunk_cat
        return received.view(1, s * t, h)
    return r.empty((b, s * t, h), dtype, name)


def reduce_scatter(r: Recorder, shape: Shape, dtype: str, t: int, name: str, run: Runner | None = None) -> Tensor:
    """This rank's part, of ``shape`` (b, s / t, h), of the sum of all ranks' (b, s, h), sent as a copy."""
    b, s, h = shape
    sent = r.empty((b * t, s, h), dtype, f"{name}_sent", BUFFERS)
    out = _received(r, shape, dtype, name, run)
    del sent
    return out


def _received(r: Recorder, shape: Shape, dtype: str, name: str, run: Runner | None) -> Tensor:
    return r.empty(shape, dtype, name) if run is None else run(r, lambda r: r.empty(shape, dtype, name))


def gathered(r: Recorder, x: Tensor, t: int, name: str) -> Tensor:
    """``Shard(1)`` to ``Replicate``: the whole sequence; its gradient is summed and scattered."""
    shape, dtype = x.shape, x.dtype
    out = all_gather(r, shape, dtype, t, name)

    size = t * size_of(shape, dtype)
    work = Operator(_moved("all-gather", size, shape), _moved("reduce-scatter", size, shape))
    out.node = r.node((x,), (), lambda r, gradients: [reduce_scatter(r, shape, dtype, t, f"grad_{name}")], work=work)
    return apart(out)


def scattered(r: Recorder, x: Tensor, t: int, name: str, run: Runner | None = None) -> Tensor:
    """``Partial`` to ``Shard(1)``: this rank's part of the sequence; its gradient is gathered. ``run``: what
    becomes of the output in a recomputed region."""
    b, s, h = x.shape
    out = reduce_scatter(r, (b, s // t, h), x.dtype, t, name, run)
    size = size_of(x.shape, x.dtype)
    work = Operator(_moved("reduce-scatter", size, x.shape), _moved("all-gather", size, x.shape))
    out.node = r.node((x,), (), _gathers((b, s // t, h), x.dtype, t, name), work=work)
    return out


def everywhere(r: Recorder, x: Tensor, t: int, name: str) -> Tensor:
    """``gathered`` as a local tensor (``PrepareModuleInput`` with ``use_local_output``), whose gradient every rank is
    taken to have whole: this rank's part of it is copied."""
    shape, dtype = x.shape, x.dtype
    out = all_gather(r, shape, dtype, t, name)
    size = size_of(shape, dtype)
    work = Operator(_moved("all-gather", t * size, shape), (Stream(2 * size),))
    return out.by(r.node((x,), (), fresh(x, f"grad_{name}_part"), work=work))


def summed_back(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x`` itself, whose gradient is a sum over ranks (``Replicate``, with ``Partial`` gradients)."""
    shape, dtype = x.shape, x.dtype
    work = Operator((), (Exchange("all-reduce", size_of(shape, dtype)),))
    node = r.node((x,), (), fresh(x, f"grad_{name}_reduced"), work=work)
    return Tensor(x.storage, shape, dtype, node)


def _moved(kind: Kind, size: int, shape: Shape) -> Work:
    """A collective, and the copy of the whole along dimension 0: none of one sequence that is gathered."""
    copied = [Stream(2 * size)] if kind == "reduce-scatter" or shape[0] > 1 else []
    return (Exchange(kind, size), *copied)


def _gathers(shape: Shape, dtype: str, t: int, name: str) -> Callable[[Recorder, Gradients], Sequence[Tensor | None]]:

    return lambda r, gradients: [all_gather(r, shape, dtype, t, f"grad_{name}")]


# -- modules ----------------------------------------------------------------------------------------


def weighted(r: Recorder, x: Tensor, weight: Tensor, name: str) -> Tensor:
    """``x * weight`` of ``SequenceParallel``, (b, s / t, h) by (h): the weight's gradient is ``PARTIAL``."""
    shape, dtype, features = x.shape, x.dtype, weight.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        grad_weight = r.empty(shape, dtype, f"grad_{name}_weight")
        grad_x = r.empty(shape, dtype, f"grad_{name}_input")
        return [grad_x, Unsummed(grad_weight, features, f"grad_{name}_weight_sum/{PARTIAL}")]

    return r.output((x, weight), (weight, x), backward, shape, dtype, name)


def embedding(r: Recorder, weight: Tensor, tokens: Tensor, t: int, name: str) -> tuple[Tensor, list[Tensor]]:
    """``RowwiseParallel`` of ``nn.Embedding``: rows of this rank's (v / t, h), summed and scattered to
    (b, s / t, h); and what the collective holds until a reader waits for it.

    The gradient is ``REPLICATED``, (v, h): ``embedding_dense_backward`` takes no table in parts
    (``_ops/_embedding_ops.py``).
    """
    rows = _rows(r, weight, tokens, t, name)
    b, s, h = rows.shape
    sent = r.empty((b * t, s // t, h), rows.dtype, f"{name}_sent", BUFFERS)
    out = r.empty((b, s // t, h), rows.dtype, name)
    size = size_of((b, s, h), rows.dtype)
    work = Operator(_moved("reduce-scatter", size, rows.shape), _moved("all-gather", size, rows.shape))
    out.node = r.node((rows,), (), _gathers(out.shape, out.dtype, t, name), work=work)
    return out, [sent]


def _rows(r: Recorder, weight: Tensor, tokens: Tensor, t: int, name: str) -> Tensor:
    mask, local = masked(r, tokens.shape)
    whole, dtype = (t * weight.shape[0], weight.shape[1]), weight.dtype
    rows = r.empty((*tokens.shape, weight.shape[1]), dtype, f"{name}_rows")

    rows.node = r.node(
        (weight,),
        (tokens,),
        lambda r, gradients: [r.empty(whole, dtype, f"grad_{name}_weight/{REPLICATED}")],
        work=looked_up(rows.shape, dtype),
    )
    del mask, local
    return rows


INDICES = ("index_below", "index_above", "index_mask", "index_copy", "index_local")


def masked(r: Recorder, shape: Shape, names: tuple[str, str, str, str, str] = INDICES) -> tuple[Tensor, Tensor]:
    """Which indices are of other ranks, and where the own ones are (``_MaskPartial._partition_value``; Megatron's
    ``VocabParallelEmbedding.forward``)."""
    below, above = r.empty(shape, "bool", names[0]), r.empty(shape, "bool", names[1])
    mask = r.empty(shape, "bool", names[2])
    del below, above
    local = r.in_turn((shape, "int64", names[3]), (shape, "int64", names[4]))
    return mask, local


def gathered_logits(r: Recorder, x: Tensor, t: int) -> Tensor:
    """``Shard(-1)`` to ``Replicate``: (b, s, v) from every rank's (b, s, v / t); backward copies this rank's part."""
    b, s, v = x.shape
    dtype = x.dtype
    out = r.in_turn(
        ((b * t, s, v), dtype, "logits_received", LOGITS), ((b, s, v * t), dtype, "logits_gathered", LOGITS)
    )
    size = size_of(out.shape, dtype)
    work = Operator((Exchange("all-gather", size), Stream(2 * size, 1, True)))
    out.node = r.node((x,), (), fresh(x, "grad_logits_part", LOGITS), work=work)
    return out


# -- loss -------------------------------------------------------------------------------------------


def reduced(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``all_reduce``: a copy."""
    return r.empty(x.shape, x.dtype, name)


def log_softmax(r: Recorder, x: Tensor) -> Tensor:
    """``_log_softmax`` of ``tensor/parallel/loss.py`` on (b, s, v / t): saves its result. Backward hands on the
    gradient, as that of the negative log likelihood is this one's already."""
    tokens = (*x.shape[:-1], 1)
    shifted, top, total = exponentials(r, x)
    logarithm = r.empty(tokens, x.dtype, "exponentials_log")
    out = r.empty(x.shape, x.dtype, "log_probabilities", LOGITS)
    # the maximum; less it; exponentials; their sum; the logarithm of which is subtracted
    size, rows = size_of(x.shape, x.dtype), size_of(tokens, x.dtype)
    work = Operator((Stream(8 * size, 5, True), Exchange("all-reduce", rows, times=2)), ())
    out.node = r.node((x,), (out,), lambda r, gradients: gradients, work=work)
    del top, total, logarithm, shifted
    return out


def exponentials(r: Recorder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits less their maximum, that, and the sum of their exponentials, of all ranks."""
    tokens, dtype = (*x.shape[:-1], 1), x.dtype
    top = r.empty(tokens, dtype, "logits_max")
    top = reduced(r, top, "logits_max_reduced")
    shifted = r.empty(x.shape, dtype, "logits_shifted", LOGITS)
    total = r.in_turn((x.shape, dtype, "exponentials", LOGITS), (tokens, dtype, "exponentials_sum"))
    return shifted, top, reduced(r, total, "exponentials_sum_reduced")


def nll_loss(r: Recorder, x: Tensor, labels: Tensor) -> Tensor:
    """``_nll_loss_forward`` and ``_nll_loss_and_log_softmax_backward`` of ``tensor/parallel/loss.py``: saves x,
    labels and the total weight; a scalar."""
    shape, dtype = x.shape, x.dtype
    n = (shape[0] * shape[1],)
    column = (*n, 1)

    def chosen(name: str, shape: Shape, dtype: str) -> Tensor:
        """``torch.where(target != ignore_index, …, 0)``."""
        return r.in_turn((shape, "bool", "label_counted"), (shape, dtype, name))

    safe = chosen("labels_safe", n, "int64")
    mask, local = masked(r, column)
    picked = r.empty(column, dtype, "label_log_probability")
    del mask
    total = reduced(r, picked, "label_log_probability_reduced")
    result = r.empty(n, dtype, "negative_log_likelihood")
    result = chosen("negative_log_likelihood_counted", n, dtype)
    weight = r.in_turn((n, "bool", "label_counted"), ((), "int64", "labels_counted"), ((), dtype, "total_weight"))
    summed = r.empty((), dtype, "loss_sum")
    out = r.empty((), dtype, "loss")
    del summed, result, safe, local, picked, total

    # zeros with the label's entry; exponentials; their sum; the product with the loss's gradient
    size = size_of(shape, dtype)
    work = Operator((Exchange("all-reduce", size_of(n, dtype)),), (Stream(8 * size, 4, True),))
    out.node = r.node((x,), (x, labels, weight), lambda r, gradients: [_grad_logits(r, shape, dtype)], work=work)
    return out


def _grad_logits(r: Recorder, shape: Shape, dtype: str) -> Tensor:
    n = (shape[0] * shape[1],)
    column = (*n, 1)
    scaled = r.empty((), dtype, "grad_loss_scaled")
    safe = r.in_turn((column, "bool", "label_counted"), (column, "int64", "labels_safe"))
    at_label = r.empty(shape, dtype, "grad_at_label", LOGITS)
    mask, local = masked(r, n)
    update = r.in_turn((n, dtype, "index_mask_cast"), (n, dtype, "grad_at_label_update"))
    places = r.empty(n, "int64", "places")
    counted = r.empty(column, "bool", "label_counted")
    each = r.empty(column, dtype, "grad_loss_each")
    del counted, scaled
    difference = r.in_turn((shape, dtype, "exponentials", LOGITS), (shape, dtype, "grad_logits_unscaled", LOGITS))
    out = r.empty(shape, dtype, "grad_logits", LOGITS)
    del difference, each, places, update, mask, local, at_label, safe
    return out


def upcast(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x.float()`` of a ``DTensor``."""
    return apart(ops.cast(r, x, "fp32", name))
