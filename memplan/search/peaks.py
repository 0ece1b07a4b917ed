"""The fullest stage of a plan, without folding the others: the same bytes as the largest of ``estimate.fold``."""

from __future__ import annotations

from collections.abc import Iterable

from ..estimate import fold
from ..frameworks import megatron
from ..layers.module import Options
from ..pipeline import megatron_flight
from ..plan.plan import Plan
from ..program import Program, fold_program

UNBOUNDED = 1 << 62
"""Bytes; more than any rank has."""

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
    for bound, program in sorted(((at_most(one), one) for one in programs), key=lambda pair: -pair[0]):
        if bound < largest or (enough is not None and largest > enough):
            break
        peak = fold_program(program).peak
        largest, at = max((largest, at), (peak, -program.stage))
    return largest, -at


def _first_largest(peaks: Iterable[int]) -> Bound:
    largest, at = max((peak, -stage) for stage, peak in enumerate(peaks))
    return largest, -at


def at_most(program: Program) -> int:
    """A bound from above: all that is kept, with the most that passes in flight and one pass hold, or the step."""
    order, kept = program.order, program.kept
    assert order is not None
    assert kept is not None
    moving = megatron_flight.at_most(order.schedule, [chunk.passes for chunk in order.chunks], order.sizes)
    if moving is None:
        return UNBOUNDED
    reports = order.schedule.microbatches * order.sizes.report
    return order.retained.net + max(kept.between.net, kept.during.net + max(moving, reports + kept.optimizer.peak))
