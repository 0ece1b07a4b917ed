"""The fullest stage of a plan, without folding the others: the same bytes as the largest of ``estimate.fold``."""

from __future__ import annotations

from collections.abc import Iterable

from ..estimate import fold
from ..frameworks import megatron
from ..layers.module import Options
from ..pipeline.megatron_fold import most_in_flight
from ..plan.plan import Plan
from ..program import Order, Program, fold_program

EXCHANGED = 8
"""Hidden states between stages beyond one for every pass in flight and three for every chunk (inputs kept with
their gradients, and a gradient on its way): what is received ahead of its pass."""


def fullest(plan: Plan) -> tuple[int, int]:
    """Requested bytes of the fullest stage of a resolved plan, and which that is.

    Stages of Megatron-Core are folded in the order of a bound from above, until no bound is larger than what was found.
    """
    if plan.framework != "megatron":
        return _first_largest(folded.peak for folded in fold(plan))
    programs = megatron.programs(plan, Options())
    largest, at = 0, 0
    for bound, program in sorted(((at_most(one), one) for one in programs), key=lambda pair: -pair[0]):
        if bound < largest:
            break
        largest, at = max((largest, at), (fold_program(program).peak, -program.stage))
    return largest, -at


def _first_largest(peaks: Iterable[int]) -> tuple[int, int]:
    largest, at = max((peak, -stage) for stage, peak in enumerate(peaks))
    return largest, -at


def at_most(program: Program) -> int:
    """A bound from above: all that is kept, what every pass in flight saved, and the largest pass on top."""
    order, kept = program.order, program.kept
    assert isinstance(order, Order)
    assert kept is not None
    passes = [chunk.passes for chunk in order.chunks]
    flights = most_in_flight(order.schedule)
    saved = sum(count * max(0, one.forward.net) for count, one in zip(flights, passes, strict=True))
    largest = max(max(one.forward.peak, one.backward.peak) for one in passes)
    hidden = order.exchanged * (sum(flights) + 3 * len(passes) + EXCHANGED)
    small = 512 * (sum(flights) + 2 * order.schedule.microbatches + EXCHANGED)
    moving = saved + largest + hidden + small + max(0, kept.optimizer.peak)
    return max(kept.between.net, kept.during.net) + order.retained.net + moving
