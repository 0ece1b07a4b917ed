"""Backward functions that many operators have: fresh gradients like the inputs, views of the incoming one, and hooks
that hand it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tape.events import Category
from .autograd import Backward, Gradients, Recorder, Tensor, incoming
from .work import NOTHING, Shape

Made = tuple[Shape, str, str] | tuple[Shape, str, str, Category]
"""Shape, dtype, name and category of a new tensor."""


def each(*made: Made) -> Backward:
    """Makes new tensors, in their order."""
    return lambda r, gradients: [r.empty(*one) for one in made]


def fresh(x: Tensor, name: str, category: Category = Category.TEMPORARIES) -> Backward:
    """Makes a new tensor of the shape and dtype of ``x``."""
    return each((x.shape, x.dtype, name, category))


def fresh_each(*inputs: tuple[Tensor, str]) -> Backward:
    """Makes one like each of ``inputs``, under its name, in their order."""
    return each(*((x.shape, x.dtype, name) for x, name in inputs))


def needed(*inputs: tuple[Tensor, str], last_first: bool = False) -> Backward:
    """The same for those of ``inputs`` that need a gradient; ``last_first``: the last one's is made first."""
    likes = [(x.shape, x.dtype, name) if x.node is not None else None for x, name in inputs]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [like and r.empty(*like) for like in (likes[::-1] if last_first else likes)]
        return made[::-1] if last_first else made

    return backward


def by_way_of(*made: Made) -> Backward:
    """Makes a tensor of each shape, dtype, name and category; the last is the gradient, and those before it end then,
    the newest first."""

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        tensors = [r.empty(*one) for one in made]
        return [tensors.pop()]

    return backward


def viewed(*inputs: Tensor) -> Backward:
    """Hands on views of the incoming gradient, each in the shape of one of ``inputs``."""
    shapes = [x.shape for x in inputs]
    return lambda r, gradients: [incoming(gradients).view(*shape) for shape in shapes]


def watched(r: Recorder, x: Tensor, then: Callable[[Recorder], None]) -> Tensor:
    """``x`` itself; ``then`` runs when its gradient comes, and those of parameters are there."""

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        then(r)
        return gradients

    return Tensor(x.storage, x.shape, x.dtype, r.node((x,), (), backward, work=NOTHING))
