"""In which order a stage of one chunk runs its micro-batches: one at a time, 1F1B, or GPipe.

1F1B (``deepspeed/runtime/pipe/schedule.py``, ``TrainSchedule``; PipeDream-flush): stage k of p runs
p − k − 1 forward passes, then one forward and one backward in turn, then the remaining backward
passes. GPipe runs all forward passes, then all backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ..tape.events import ZERO, Excursion, Hold, compose
from ..tape.program import Action, Chunk, Exchanged, Role, Span, end_of_gradients, first_backward, passes_of
from ..values import dataclass

PAIRS = 3
"""Backward passes that stand for all of an iteration's in the allocator's replay: from the second on they are alike."""


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Micro-batches whose activations a stage holds at once, at most."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


def one_chunk(spans: tuple[Span, ...], microbatches: int, *, last: tuple[Span, ...] = ()) -> OneChunk:
    """One micro-batch at a time."""
    return OneChunk((Chunk(spans, last=last),), microbatches)


@dataclass(frozen=True, eq=False)
class OneChunk:
    """``in_flight`` − 1 forward passes, then a forward and a backward in turn, then the remaining backward passes."""

    chunks: tuple[Chunk, ...]
    microbatches: int
    in_flight: int = 1
    moves_gradients: bool = False
    """Gradients are moved into a static buffer behind every backward pass, and end there; else every micro-batch adds
    to them, and they end with the step (``zero_grad(set_to_none=True)``)."""

    @property
    def shortened(self) -> Iterator[Action]:
        """Up to ``PAIRS`` backward passes; what is in flight then is dropped, which only frees memory."""
        warm_up, count = self.in_flight - 1, min(PAIRS, self.microbatches)
        for number in range(warm_up):
            yield Action("forward", 0, number)
        for number in range(count):
            if warm_up + number < self.microbatches:
                yield Action("forward", 0, warm_up + number)
            yield Action("backward", 0, number)

    @property
    def exchanged(self) -> Exchanged:
        return Exchanged(gradients=self.moves_gradients)

    @property
    def carried(self) -> Excursion:
        return ZERO

    def role(self, microbatch: int) -> Role:
        if self.moves_gradients or not microbatch:
            return "first"
        return "last" if self.chunks[0].last and microbatch == min(PAIRS, self.microbatches) - 1 else "steady"

    def begun(self, chunk: int, tensor: str) -> Hold:
        raise NotImplementedError("no tensor is exchanged between passes")

    @property
    def after_forward(self) -> int:
        return self.chunks[0].passes.forward.net

    @cached_property
    def whole(self) -> Excursion:
        """The place of the peak begins with its micro-batch."""
        (chunk,), warm_up, last = self.chunks, self.in_flight - 1, self.microbatches - 1
        passes, first = chunk.passes, first_backward(chunk.spans)
        forward, backward = passes.forward, passes.backward
        if self.moves_gradients:
            first = backward = first.then(end_of_gradients(first))
        others = last - warm_up - bool(chunk.last)
        parts = [
            numbered(forward, warm_up, 0),
            forward.within(str(warm_up)),
            first.within("0"),
            forward.within(str(warm_up + 1)).then(backward.within("1")).times(others),
            numbered(backward, warm_up, last + 1 - warm_up),
        ]
        if chunk.last:
            parts += [passes_of(chunk.last).forward.within(str(last)), first_backward(chunk.last).within(str(last))]
        return compose(parts)


def numbered(excursion: Excursion, times: int, first: int) -> Excursion:
    """``excursion`` repeated, its place prefixed by the micro-batch in which the peak is reached."""
    at = first + times - 1 if excursion.net > 0 else first
    return excursion.times(times).within(str(at))
