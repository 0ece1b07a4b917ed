"""Operators that choose, count and move rows, as routers of experts use them: what each allocates, saves, and does in
backward (``tools/autograd/derivatives.yaml``, ``FunctionsManual.cpp``).

Backward formulas that fill zeros (``index_backward``, ``value_selecting_reduction_backward``, ``gather_backward``) fill
them in place, as they do where no tensor subclass is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .autocast import promoted, set_by_autocast
from .autograd import Backward, Gradients, Recorder, Shape, Tensor, Unsummed, incoming
from .gradients import fresh
from .work import ITEMSIZE, REPEATED, STRIDED, TOP_K, Operator, Stream


def top_k(r: Recorder, x: Tensor, k: int, name: str) -> tuple[Tensor, Tensor]:
    """``x.topk(k)``: values, and indices in int64, which are saved."""
    shape, dtype = x.shape, x.dtype
    values = r.empty((*shape[:-1], k), dtype, f"{name}_values")
    indices = r.empty((*shape[:-1], k), "int64", f"{name}_indices")
    node = r.node((x,), (indices,), fresh(x, f"grad_{name}"), work=Operator(issue=(top_k_issue(shape), 0)))
    return values.by(node), indices


def top_k_issue(shape: Shape) -> int:
    """``Stream.issue`` of ``torch.topk`` along rows."""
    return TOP_K.of(prod(shape), prod(shape[:-1]))


def largest_last(r: Recorder, x: Tensor) -> Tensor:
    """``x.max(-1, keepdim=True).values``: saves where they are, in int64."""
    values = r.empty((*x.shape[:-1], 1), x.dtype, "largest_score")
    where = r.empty(values.shape, "int64", "largest_score_indices")
    return values.by(r.node((x,), (where,), fresh(x, "grad_largest_score")))


def clamped(r: Recorder, x: Tensor, name: str, *, bounds: int) -> Tensor:
    """``x.clamp`` with one or both bounds, of a half of each row: saves x; backward compares with each, joins what both
    say in place, and takes the gradient or nought (``FunctionsManual.cpp``, ``clamp_backward``). Halves of rows, and
    nought, which is one number, are read by an index for each element."""
    shape, dtype = x.shape, x.dtype
    n, e = prod(shape), ITEMSIZE[dtype]
    indexed = STRIDED.of(n)
    compared = [Stream((e + 1) * n, issue=indexed)] * bounds + [Stream(3 * n)] * (bounds - 1)
    taken = Stream((2 * e + 1) * n, issue=indexed)
    done = Operator(None, (Stream(e), *compared, taken), (indexed, 0))

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        nought = r.empty((), dtype, f"{name}_nought")
        inside = [r.empty(shape, "bool", f"{name}_inside") for _ in range(bounds)]
        gradient = r.empty(shape, dtype, f"grad_{name}")
        del inside, nought
        return [gradient]

    return r.output((x,), (x,), backward, shape, dtype, name, work=done)


def gathered(r: Recorder, x: Tensor, indices: Tensor, name: str) -> Tensor:
    """``x.gather(-1, indices)`` or, of rows, ``x[indices]``: saves the indices."""
    shape, dtype = x.shape, x.dtype
    of_rows = len(indices.shape) < len(shape)
    chosen = (*indices.shape, *shape[1:]) if of_rows else indices.shape
    done = Operator(issue=(0, REPEATED.of(0, -(-prod(indices.shape) // shape[0])) if of_rows else 0))

    return r.output((x,), (indices,), fresh(x, f"grad_{name}"), chosen, dtype, name, work=done)


def scattered(r: Recorder, values: Tensor, indices: Tensor, shape: Shape, name: str) -> Tensor:
    """``torch.full(shape, c).scatter_(-1, indices, values)``: saves the indices, by which the gradient is gathered."""
    out = r.empty(shape, values.dtype, name)
    return out.by(r.node((values,), (indices,), fresh(values, f"grad_{name}_values")))


def repeated_rows(r: Recorder, x: Tensor, times: int) -> Tensor:
    """``x.repeat(times, 1)`` of (n, h): the gradient is summed."""
    rows, *row = x.shape
    return r.output((x,), (), fresh(x, "grad_rows_sum"), (times * rows, *row), x.dtype, "rows")


def picked(r: Recorder, x: Tensor, indices: Tensor, shape: Shape, name: str) -> Tensor:
    """``x[i, j]`` to ``shape``, with indices that are views of one tensor, which is saved."""
    return r.output((x,), (indices,), fresh(x, f"grad_{name}"), shape, x.dtype, name)


def added_rows(r: Recorder, x: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """``x.index_add_(0, indices, rows)``: saves both; the gradient of x goes through, that of rows is chosen."""
    like, dtype = rows.shape, rows.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [incoming(gradients), r.empty(like, dtype, "grad_experts_output_rows")]

    return Tensor(x.storage, x.shape, x.dtype, r.node((x, rows), (indices, rows), backward))


def sum_last(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``x.sum(-1, keepdim=True)``: saves nothing; the gradient is expanded, a view, or copied into another dtype."""
    shape, dtype = x.shape, x.dtype
    summed = set_by_autocast(r, "sum") or dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        return [incoming(gradients).view(*shape) if summed == dtype else r.empty(shape, dtype, f"grad_{name}_whole")]

    return r.empty((*shape[:-1], 1), summed, name).by(r.node((x,), (), backward))


def sum_of_rows(r: Recorder, x: Tensor, k: int) -> Tensor:
    """``x.view(n, k, h).sum(1)`` of (n k, h): the expanded gradient is copied, to be seen as rows again or into the
    rows' own dtype."""
    rows, h = x.shape
    summed = set_by_autocast(r, "sum") or x.dtype
    node = r.node((x,), (), fresh(x, "grad_experts_sum_rows"))
    return r.empty((rows // k, h), summed, "experts_sum").by(node)


def divided_in_place(r: Recorder, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``x /= y`` with y broadcast: saves y and a copy of x as it was."""
    before = r.empty(x.shape, x.dtype, f"{name}_before") if r.grad_enabled and y.node is not None else None
    saved = (y, before) if before is not None else (y,)
    return Tensor(x.storage, x.shape, x.dtype, r.node((x, y), saved, of_quotient(x, y, name)))


def divided(r: Recorder, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``x / y`` with y broadcast: saves both."""
    return r.output((x, y), (y, x), of_quotient(x, y, name), x.shape, x.dtype, name)


def of_quotient(x: Tensor, y: Tensor, name: str) -> Backward:
    """Gradients of ``x / y`` with y broadcast: that of y takes four tensors."""
    shape, small, dtype, wide = x.shape, y.shape, x.dtype, promoted(x.dtype, y.dtype)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        quotient = r.empty(shape, wide, f"{name}_quotient")
        again = r.empty(shape, wide, f"{name}_quotient_again")
        negated = r.empty(shape, dtype, f"{name}_negated")
        whole = r.empty(shape, wide, f"grad_{name}_other")
        del negated, again, quotient
        grad_x = r.empty(shape, wide, f"grad_{name}_self")
        return [grad_x, Unsummed(whole, small, f"grad_{name}_other_sum")]

    return backward


def written(r: Recorder, x: Tensor, parts: Sequence[Tensor], name: str) -> Tensor:
    """``x[..., i:j].copy_(part)`` of each part, of a new tensor (``CopySlices``)."""
    for at, part in enumerate(parts):
        x = _written(r, x, part, f"{name}_{at}")
    return x


def _written(r: Recorder, x: Tensor, part: Tensor, name: str) -> Tensor:
    """Backward copies the whole gradient, then the slice's, which ``CopyBackwards`` casts to the dtype of ``part``; of
    what was there before it is nought."""
    whole, shape, dtype, of, needs = x.shape, part.shape, x.dtype, part.dtype, x.node is not None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        result = r.empty(whole, dtype, f"grad_{name}_whole")
        made = r.empty(shape, dtype, f"grad_{name}")
        zeros = r.empty(shape, dtype, f"grad_{name}_before") if needs else None
        made = made if of == dtype else r.empty(shape, of, f"grad_{name}_cast")
        del zeros
        return [result if needs else None, made]

    return Tensor(x.storage, whole, dtype, r.node((x, part), (), backward))
