"""Tensors that ranks hand to one another, and whose gradients go the other way
(``megatron/core/tensor_parallel/mappings.py``; ``transformer/moe/token_dispatcher.py``, which calls them)."""

from __future__ import annotations

from ...tape.events import Category
from ..autograd import Recorder, Shape, Tensor, size_of
from ..gradients import fresh
from ..work import Axis, Exchange, Kind, Operator, exchanged

COMMUNICATION, TEMPORARIES = Category.COMMUNICATION_BUFFERS, Category.TEMPORARIES


def moved(
    r: Recorder,
    x: Tensor,
    rows: int,
    kind: Kind,
    names: tuple[str, str],
    axis: Axis = "tp",
    *,
    kept: Category = TEMPORARIES,
    back: Category = TEMPORARIES,
) -> Tensor:
    """A fresh tensor of so many ``rows`` by a collective of ``kind``, whose gradient comes by its opposite. ``names``:
    of the tensor and of that gradient, which are in categories ``kept`` and ``back``."""
    opposite: dict[Kind, Kind] = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
    done = exchanged(kind, size_of((max(rows, x.shape[0]), *x.shape[1:]), x.dtype), opposite.get(kind, kind), axis)
    name, gradient = names
    return r.output((x,), (), fresh(x, gradient, back), (rows, *x.shape[1:]), x.dtype, name, kept, done)


def side_by_side(r: Recorder, x: Tensor, name: str, gradient: str, ranks: int) -> Tensor:
    """``gather_from_tensor_model_parallel_region``: parts of the last dimension, received one behind the other, are put
    side by side; of the ``gradient`` a rank copies its own."""
    if ranks == 1:
        return x
    first, *between, last = x.shape
    joined = r.in_turn(
        ((first * ranks, *between, last), x.dtype, f"{name}_received", COMMUNICATION),
        ((first, *between, last * ranks), x.dtype, f"{name}_gathered"),
    )
    work = Operator((Exchange("all-gather", size_of(joined.shape, x.dtype)),))
    return joined.by(r.node((x,), (), fresh(x, gradient), work=work))


def own_rows(r: Recorder, x: Tensor, size: Shape, gradient: str) -> Tensor:
    """``scatter_to_sequence_parallel_region``: a view of this rank's tokens, whose gradient is gathered."""
    work = Operator((), (Exchange("all-gather", size_of(x.shape, x.dtype)),))
    seen = x.view(*size)
    seen.node = r.node((x,), (), fresh(x, gradient, COMMUNICATION), work=work)
    return seen
