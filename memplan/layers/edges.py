"""Where a stage begins and ends: hidden states that arrive from another device, or leave for one.

These are no operators, so their tapes are written out event by event. Equal ones are one module, by
which stages are known to be alike. And an embedding and a head that share a weight: the gradient of one waits for the
other's.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ..tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Hold, Seam, Tape, behind
from ..values import replace
from .autograd import Shape
from .module import SHARED, Module, Tapes, hold_bytes


def edge(name: str, tapes: Tapes, evaluation: Tape) -> Module:
    """A module without parameters that is the same in every role."""
    return Module(name, tapes, tapes, evaluation, ())


@lru_cache(maxsize=1024)
def arrive(shape: Shape, dtype: str, requires_grad: bool = True) -> Module:
    """``hidden.to(device)``: a copy appears here; its gradient, if any, goes back and is dropped."""
    size = hold_bytes(shape, dtype)
    hold = Hold(1, size, Category.ACTIVATIONS, "hidden_received", shape, dtype)
    backward = (Drop(GRAD_OUTPUT, size, Category.TEMPORARIES),) if requires_grad else ()
    return edge("arrive", Tapes((hold,), backward, 1, 0), (hold,))


@lru_cache(maxsize=1024)
def depart(shape: Shape, dtype: str, requires_grad: bool = True) -> Module:
    """The other side: the hidden state is dropped once copied; its gradient, if any, appears."""
    size = hold_bytes(shape, dtype)
    drop = Drop(INPUT, size, Category.ACTIVATIONS)
    hold = Hold(1, size, Category.TEMPORARIES, "grad_hidden_received", shape, dtype)
    if not requires_grad:
        return edge("depart", Tapes((drop,), (), 0, 0), (drop,))
    return edge("depart", Tapes((drop,), (hold,), 0, 1), (drop,))


PART_OUTPUT, FULL_OUTPUT, FULL_GRADIENT, RECEIVED = SHARED - 10, SHARED - 11, SHARED - 12, SHARED - 13
"""Ids of what DeepSpeed's pipeline engine keeps across the modules of one micro-batch."""


@lru_cache(maxsize=1024)
def pipe_receive(shape: Shape, dtype: str, t: int) -> Module:
    """``PipelineEngine._exec_recv_activations`` and the head of ``_exec_forward_pass``.

    With t > 1 activations travel in t parts: the receive buffer is cloned, cloned again, and gathered
    into a full tensor (NCCL's list ``all_gather`` goes through one flat copy,
    ``ProcessGroupNCCL.cpp``, ``newLikeFlat``); with t = 1 the clone and the received tensor both stay.
    Afterwards the gradient goes back in parts, too (``_exec_send_grads``).
    """
    full = hold_bytes(shape, dtype)
    activations, buffers = Category.ACTIVATIONS, Category.COMMUNICATION_BUFFERS
    back = Drop(GRAD_OUTPUT, full, Category.TEMPORARIES)
    if t == 1:
        received = Hold(RECEIVED, full, activations, "pipe_received", shape, dtype)
        cloned = Hold(1, full, activations, "pipe_input", shape, dtype)
        ended = Drop(RECEIVED, full, activations)
        return edge("receive", Tapes((received, cloned), (ended, back), 1, 0), (received, cloned, ended))
    part = hold_bytes((prod(shape) // t,), dtype)
    forward: Tape = (
        Hold(2, part, buffers, "pipe_received_part", (), dtype),
        Hold(3, part, buffers, "pipe_input_part", (), dtype),
        Hold(1, full, activations, "pipe_input", shape, dtype),
        Hold(4, full, buffers, "all_gather_flat", shape, dtype),
        Drop(4, full, buffers),
        Drop(3, part, buffers),
        Drop(2, part, buffers),
    )
    backward: Tape = (Hold(5, part, buffers, "grad_part", (), dtype), back, Drop(5, part, buffers))
    return edge("receive", Tapes(forward, backward, 1, 0), forward)


@lru_cache(maxsize=1024)
def pipe_send(shape: Shape, dtype: str, t: int) -> Module:
    """``_exec_send_activations`` and the head of ``_exec_backward_pass``.

    The output is kept as this rank's part; for backward the whole output and the whole gradient are
    rebuilt, and both stay until the stage's backward has ended (``pipe_ends``).
    """
    full = hold_bytes(shape, dtype)
    activations, buffers, temporaries = Category.ACTIVATIONS, Category.COMMUNICATION_BUFFERS, Category.TEMPORARIES
    gradient = Hold(FULL_GRADIENT, full, temporaries, "pipe_gradient", shape, dtype)
    if t == 1:
        kept = Hold(PART_OUTPUT, full, activations, "pipe_output", shape, dtype)
        # the output itself is kept: it changes hands rather than being copied
        forward: Tape = (Drop(INPUT, full, activations), kept)
        return edge("send", Tapes(forward, (gradient,), 0, FULL_GRADIENT), (Drop(INPUT, full, activations),))
    part = hold_bytes((prod(shape) // t,), dtype)
    kept = Hold(PART_OUTPUT, part, activations, "pipe_output_part", (), dtype)
    backward: Tape = (
        Hold(FULL_OUTPUT, full, temporaries, "pipe_output_rebuilt", shape, dtype),
        gradient,
        Hold(4, full, buffers, "all_gather_flat", shape, dtype),
        Drop(4, full, buffers),
    )
    drop = Drop(INPUT, full, activations)
    return edge(
        "send", Tapes((kept, drop), backward, 0, FULL_GRADIENT), (kept, drop, Drop(PART_OUTPUT, part, activations))
    )


@lru_cache(maxsize=1024)
def pipe_ends(shape: Shape, dtype: str, t: int) -> Module:
    """The end of a stage's backward: what ``pipe_send`` kept is dropped."""
    full = hold_bytes(shape, dtype)
    kept = hold_bytes((prod(shape) // t,), dtype)
    backward: Tape = (
        Drop(FULL_GRADIENT, full, Category.TEMPORARIES),
        *((Drop(FULL_OUTPUT, full, Category.TEMPORARIES),) if t > 1 else ()),
        Drop(PART_OUTPUT, kept, Category.ACTIVATIONS),
    )
    return edge("ends", Tapes((), backward, 0, 0), ())


# -- tied embedding and head ---------------------------------------------------------------------------

TIED_GRADIENT = SHARED - 6
"""Id of the gradient of a tied head while it waits for the embedding's."""


@lru_cache(maxsize=1024)
def with_waiting_gradient(embedding: Module, head: Module, *, apart: bool = False) -> tuple[Module, Module]:
    """Embedding and head that share a weight, whose gradients are one parameter's.

    The head's gradient waits in the input buffer of the weight's one ``AccumulateGrad`` node, where the
    embedding's is added to it in place; only then is their sum added to what earlier micro-batches left.
    In the first micro-batch it becomes the gradient itself, which the head's ``first`` tape says already.
    ``apart``: on a GPU the head's gradient is a view (``nn.Linear``'s, of a transposed product), to which nothing
    is added in place (``can_accumulate_inplace``): the sum is a third tensor, which fake traces leave out.
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

    def waits(tapes: Tapes) -> Tapes:
        return replace(tapes, forward=waiting(tapes.forward), backward=waiting(tapes.backward))

    hooked = any(isinstance(event, Seam) and event.hook is not None for event in head.first.backward)
    in_head, first, later = head.first, embedding.first.backward, embedding.steady.backward
    if apart:
        first, later = _summed_apart(first, word, stays=not hooked), _summed_apart(later, word)
        in_head = in_head if hooked else waits(in_head)
    ended = behind(later, (Drop(TIED_GRADIENT, hold.bytes, hold.category),))
    made = replace(
        embedding,
        first=replace(embedding.first, backward=first),
        steady=replace(embedding.steady, backward=ended),
    )
    return made, replace(head, first=in_head, steady=waits(head.steady))


def _summed_apart(backward: Tape, word: Shape, *, stays: bool = False) -> Tape:
    """The embedding's, with the sum of its gradient and the head's from when both are there. The sum ``stays`` and the
    head's ends, or, which comes to as many bytes, the other way round. Of the three, one is more than a fake trace
    has: until one ends, the sum counts as a workspace."""
    gradient = next(one for one in reversed(backward) if isinstance(one, Hold) and one.shape == word)
    at = next(at for at, one in enumerate(backward) if isinstance(one, Drop) and one.tensor == gradient.tensor)
    id = 1 + max(one.tensor for one in backward if not isinstance(one, Seam))
    kind = Category.WORKSPACES
    total = gradient._replace(tensor=id, category=kind, name="grad_tied_sum")
    ends = Drop(TIED_GRADIENT if stays else id, total.bytes, kind)
    after = (ends, backward[at]) if stays else (backward[at], ends)
    return (*backward[:at], total, *after, *backward[at + 1 :])
