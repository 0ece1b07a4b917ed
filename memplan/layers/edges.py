"""Where a stage begins and ends: hidden states that arrive from another device, or leave for one.

These are no operators, so their tapes are written out event by event.
"""

from __future__ import annotations

from ..tape import Category, Drop, Hold
from .autograd import Shape
from .module import GRAD_OUTPUT, INPUT, Module, Tapes, hold_bytes


def edge(name: str, tapes: Tapes, evaluation: tuple[Hold | Drop, ...]) -> Module:
    """A module without parameters that is the same in every role."""
    return Module(name, tapes, tapes, evaluation, ())


def arrive(shape: Shape, dtype: str) -> Module:
    """``hidden.to(device)``: a copy appears here; its gradient goes back and is dropped."""
    size = hold_bytes(shape, dtype)
    hold = Hold(1, size, Category.ACTIVATIONS, "hidden_received", shape, dtype)
    backward = (Drop(GRAD_OUTPUT, size, Category.TEMPORARIES),)
    return edge("arrive", Tapes((hold,), backward, 1, 0), (hold,))


def depart(shape: Shape, dtype: str) -> Module:
    """The other side: the hidden state is dropped once copied; its gradient appears."""
    size = hold_bytes(shape, dtype)
    drop = Drop(INPUT, size, Category.ACTIVATIONS)
    hold = Hold(1, size, Category.TEMPORARIES, "grad_hidden_received", shape, dtype)
    return edge("depart", Tapes((drop,), (hold,), 0, 1), (drop,))
