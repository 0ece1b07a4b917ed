"""The fullest stage of a plan, without folding the others: the same bytes as the largest of ``estimate.fold``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..estimate import fold
from ..frameworks import megatron
from ..layers.module import Options
from ..pipeline.megatron_fold import most_in_flight, reduced
from ..pipeline.megatron_interleaved import table
from ..pipeline.megatron_schedule import Schedule
from ..plan.plan import Plan
from ..program import Order, Program, fold_program

EXCHANGED = 8
"""Hidden states between stages beyond one for every pass in flight and three for every chunk (inputs kept with
their gradients, and a gradient on its way): what is received ahead of its pass."""

Bound = tuple[int, int]
"""Requested bytes of the fullest stage, and which that is."""


def fullest(plan: Plan, enough: int | None = None) -> Bound:
    """Requested bytes of the fullest stage of a resolved plan, and which that is: of several the first.

    Stages of Megatron-Core are folded in the order of a bound from above, until no bound is larger than what was found;
    and no more of them once one needs more than ``enough`` bytes.
    """
    if plan.framework != "megatron":
        return _first_largest(folded.peak for folded in fold(plan))
    programs = megatron.programs(plan, Options())
    largest, at = 0, 0
    known: list[tuple[Program, int]] = []
    for bound, program in sorted(((at_most(one), one) for one in programs), key=lambda pair: -pair[0]):
        if bound < largest or (enough is not None and largest > enough):
            break
        if min((beside(other, peak, program) for other, peak in known), default=bound) < largest:
            continue
        peak = fold_program(program).peak
        known.append((program, peak))
        largest, at = max((largest, at), (peak, -program.stage))
    return largest, -at


def stops_early(plan: Plan) -> bool:
    """Whether ``fullest`` of ``plan`` with ``enough`` may be less than the whole answer."""
    return plan.framework == "megatron" and plan.layout.pp > 1


def _first_largest(peaks: Iterable[int]) -> Bound:
    largest, at = max((peak, -stage) for stage, peak in enumerate(peaks))
    return largest, -at


def at_most(program: Program) -> int:
    """A bound from above: all that is kept, what every pass in flight saved, and the largest pass on top."""
    order, kept = _of(program), program.kept
    assert kept is not None
    passes = [chunk.passes for chunk in order.chunks]
    flights = most_in_flight(order.schedule)
    saved = sum(count * max(0, one.forward.net) for count, one in zip(flights, passes, strict=True))
    largest = max(max(one.forward.peak, one.backward.peak) for one in passes)
    hidden = order.exchanged * (sum(flights) + 3 * len(passes) + EXCHANGED)
    small = 512 * (sum(flights) + 2 * order.schedule.microbatches + EXCHANGED)
    moving = saved + largest + hidden + small + max(0, kept.optimizer.peak)
    return max(kept.between.net, kept.during.net) + order.retained.net + moving


APART = 4
"""Hidden states by which the tensors between stages of two ranks in the middle of a pipeline may differ."""


def beside(known: Program, peak: int, program: Program) -> int | float:
    """A bound from above for ``program`` from the ``peak`` of a stage in front of it that holds the same.

    Both run the same passes in the same order, the later stage with fewer in flight. Where all chunks are alike, to
    every pass of the later stage there is one of the earlier stage with as many more in flight as it has at most
    (``tests/search/test_search.py``).
    """
    one, other = _of(known), _of(program)
    same = one.chunks == other.chunks and known.kept is program.kept and len(set(map(id, one.chunks))) == 1
    middle = not (one.schedule.first or one.schedule.last or other.schedule.first or other.schedule.last)
    if not same or not middle or known.stage > program.stage:
        return float("inf")
    saved = min(max(0, chunk.passes.forward.net - one.exchanged) for chunk in one.chunks)
    fewer = most_at_once(one.schedule) - most_at_once(other.schedule)
    return peak - fewer * saved + APART * (one.exchanged + 512)


@lru_cache(maxsize=1 << 14)
def most_at_once(plan: Schedule) -> int:
    """Passes in flight at once, of all chunks together, at most."""
    short = reduced(plan)
    return min(short.warmup + 1, len(table(short)))


def _of(program: Program) -> Order:
    assert program.order is not None
    return program.order
