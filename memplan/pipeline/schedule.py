"""In which order a stage runs its micro-batches, folded.

1F1B (``deepspeed/runtime/pipe/schedule.py``, ``TrainSchedule``; PipeDream-flush): stage k of p runs
p − k − 1 forward passes, then one forward and one backward in turn, then the remaining backward
passes. GPipe runs all forward passes, then all backward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..tape import ZERO, Excursion


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Micro-batches whose activations a stage holds at once, at most."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


@dataclass(frozen=True, slots=True)
class Leg:
    """A run of equal steps: ``what`` happens ``times`` times, beginning with micro-batch ``first``."""

    what: str
    """``F`` forward, ``B`` backward, ``FB`` a forward then the backward of an older micro-batch."""
    times: int
    forward: int
    """Micro-batch of the first forward pass."""
    backward: int
    """Micro-batch of the first backward pass."""


def legs(flight: int, microbatches: int) -> Sequence[Leg]:
    """The legs of one iteration with at most ``flight`` micro-batches in flight; GPipe is all in flight."""
    warm_up = flight - 1
    return (
        Leg("F", warm_up, 0, 0),
        Leg("FB", microbatches - warm_up, warm_up, 0),
        Leg("B", warm_up, microbatches, microbatches - warm_up),
    )


@dataclass(frozen=True, slots=True)
class Passes:
    """The excursions of one micro-batch: ``first`` leaves gradients behind, ``steady`` does not."""

    forward: Excursion
    first: Excursion
    steady: Excursion


def fold_iteration(passes: Passes, flight: int, microbatches: int) -> Excursion:
    """All micro-batches of an iteration; the place of the peak begins with its micro-batch."""
    total = ZERO
    seen_first = False
    for leg in legs(flight, microbatches):
        if not leg.times:
            continue
        times, forward, backward = leg.times, leg.forward, leg.backward
        if "B" in leg.what and not seen_first:
            seen_first = True
            if "F" in leg.what:
                total = total.then(passes.forward.within(str(forward)))
            total = total.then(passes.first.within(str(backward)))
            times, forward, backward = times - 1, forward + 1, backward + 1
        if leg.what == "F":
            total = total.then(numbered(passes.forward, times, forward))
        elif leg.what == "B":
            total = total.then(numbered(passes.steady, times, backward))
        else:
            pair = passes.forward.within(str(forward)).then(passes.steady.within(str(backward)))
            total = total.then(pair.times(times))
    return total


def numbered(excursion: Excursion, times: int, first: int) -> Excursion:
    """``excursion`` repeated, its place prefixed by the micro-batch in which the peak is reached."""
    at = first + times - 1 if excursion.net > 0 else first
    return excursion.times(times).within(str(at))
