"""Bytes that a rank of Megatron-Core holds while its passes run, from below and above: from their order alone.

What lives between stages is decided by the scope of variables (``megatron_schedule``), which takes a run of the whole
schedule to know. What passes in flight have saved follows from sums over the order of passes, and of the tensors
between stages there are ``AHEAD`` more than one input for every pass in flight, at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add, sub

from ..tape.program import Passes
from ..values import NamedTuple, replace
from .megatron_fold import Sizes, reduced, saved_by_flight
from .megatron_interleaved import table
from .megatron_schedule import Schedule

AHEAD = 7
"""Hidden states between stages beyond one input for every pass in flight, at most, and beside those that a group of
more micro-batches than stages lets the first and the last stage receive early: the pass's own input and output,
gradients of inputs that variables and requests still hold, what was received for the next pass of either kind
(``tests/schedules/test_megatron_flight.py`` compares with the run)."""


class _Sums(NamedTuple):
    """Of a rank's passes in their order, forward and backward apart."""

    held: list[int]
    """Bytes that the first n forward passes have saved, for n from 0 to all."""
    forward: list[int]
    """The same where the next forward pass peaks."""
    backward: list[int]
    """Bytes that the first n backward passes have given back, less the peak of the next."""
    ended: list[int]
    """Bytes that they have given back."""


@lru_cache(maxsize=1 << 10)
def _sums(plan: Schedule, saved: tuple[int, ...], forward: tuple[int, ...], backward: tuple[int, ...]) -> _Sums:
    """``plan`` is reduced, and of whatever stage."""
    chunks = [chunk for _, chunk in table(plan)]
    back = [plan.chunks - 1 - chunk for chunk in chunks]
    held = [0, *accumulate([saved[chunk] for chunk in chunks])]
    ended = [0, *accumulate([saved[chunk] for chunk in back])]
    return _Sums(
        held,
        list(map(add, held, [forward[chunk] for chunk in chunks])),
        list(map(sub, ended, [backward[chunk] for chunk in back])),
        ended,
    )


class Range(NamedTuple):
    """Bounds of a number of bytes, both included."""

    least: int
    most: int


def between(plan: Schedule, chunks: Sequence[Passes], sizes: Sizes) -> Range | None:
    """Bytes above those with which an iteration begins, where the peak of ``fold_iteration`` lies; ``None`` where
    backward leaves other than forward has made, or what goes between stages has several sizes.

    From below: every pass in flight has its input and a stub, but that the output of the last one may not have become
    one; of what is there when an iteration begins, two hidden states for each chunk that receives one have ended.
    """
    if sizes.edges:
        return None
    weights: list[int] = []
    receiving = 0
    for chunk, passes in enumerate(chunks):
        receives, sends = plan.receives(chunk), plan.sends(chunk)
        saved = saved_by_flight(passes, sends, receives, sizes.hidden)
        if saved is None:
            return None
        receiving += receives
        weights.append(saved[0] + receives * sizes.hidden + sends * sizes.stub)
    longest = reduced(replace(plan, stage=0))
    sums = _sums(
        replace(longest, stage=0),
        tuple(weights),
        tuple([passes.forward.peak for passes in chunks]),
        tuple([passes.backward.peak for passes in chunks]),
    )
    most = _most(sums, min(plan.warmup, longest.microbatches * plan.chunks))
    early = (plan.group - plan.stages) * (plan.first or plan.last)
    reports = plan.microbatches * sizes.report if plan.last else 0
    return Range(
        max(0, most - 2 * receiving * sizes.hidden - sizes.stub),
        most + (AHEAD + early) * sizes.hidden + (1 + early) * sizes.stub + reports,
    )


def _most(sums: _Sums, warmup: int) -> int:
    """Where ``warmup`` forward passes run first, then one of each kind in turns, then what is left of backward."""
    held, forward, backward, ended = sums
    total = len(forward)
    return max(
        max(forward[:warmup], default=0),
        max(map(sub, forward[warmup:], ended), default=0),
        max(map(sub, held[warmup + 1 :], backward), default=0),
        held[total] - min(backward[total - warmup :], default=held[total]),
    )
