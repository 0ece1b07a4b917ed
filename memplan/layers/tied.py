"""Embedding and head that share a weight: the gradient of one waits for the other's."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..tape import Category, Drop, Hold, Tape
from .module import SHARED, Module

TIED_GRADIENT = SHARED - 6
"""Id of the gradient of a tied head while it waits for the embedding's."""


@lru_cache(maxsize=1024)
def with_waiting_gradient(embedding: Module, head: Module) -> tuple[Module, Module]:
    """Embedding and head that share a weight, whose gradients are one parameter's.

    The head's gradient waits in the input buffer of the weight's one ``AccumulateGrad`` node, where the
    embedding's is added to it in place; only then is their sum added to what earlier micro-batches left.
    In the first micro-batch it becomes the gradient itself, which the head's ``first`` tape says already.
    Source: torch 2.13, ``engine.cpp`` (``Engine::evaluate_function``), ``input_buffer.cpp``
    (``InputBuffer::add``), ``accumulate_grad.h`` (``accumulateGrad``).
    """
    (word,) = (parameter.shape for parameter in head.parameters if parameter.name == "word.weight")
    gradient = next(
        event
        for event in head.first.forward + head.first.backward
        if isinstance(event, Hold) and event.category is Category.GRADIENTS and event.shape == word
    )

    def waiting(tape: Tape) -> Tape:
        return tuple(
            event._replace(tensor=TIED_GRADIENT)
            if isinstance(event, Hold) and event.tensor == gradient.tensor
            else event
            for event in tape
            if not (isinstance(event, Drop) and event.tensor == gradient.tensor)
        )

    (hold,) = (
        event
        for event in head.steady.forward + head.steady.backward
        if isinstance(event, Hold) and event.tensor == gradient.tensor
    )
    tapes = head.steady
    steady = replace(tapes, forward=waiting(tapes.forward), backward=waiting(tapes.backward))
    ended = (*embedding.steady.backward, Drop(TIED_GRADIENT, hold.bytes, hold.category))
    return replace(embedding, steady=replace(embedding.steady, backward=ended)), replace(head, steady=steady)
