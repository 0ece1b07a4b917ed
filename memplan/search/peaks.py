"""The fullest stage of a plan, without folding the others: the same bytes as the largest of ``estimate.fold``."""

from __future__ import annotations

from collections.abc import Iterable

from ..estimate import fold
from ..frameworks import megatron
from ..layers.module import Options
from ..pipeline import megatron_flight
from ..pipeline.megatron_flight import Range
from ..plan.plan import Plan
from ..program import Program, fold_program

UNBOUNDED = 1 << 62
"""Bytes; more than any rank has."""

Bound = tuple[int, int]
"""Requested bytes of the fullest stage, and which that is."""


def fullest(plan: Plan, enough: int | None = None) -> Bound:
    """Requested bytes of the fullest stage of a resolved plan, and which that is: of several the first. Where that is
    more than ``enough`` bytes, some stage that needs more, and what it needs at least.

    Stages of Megatron-Core are folded in the order of a bound from above, until no bound is larger than what was found.
    """
    if plan.framework != "megatron":
        return _first_largest(folded.peak for folded in fold(plan))
    ranges = [(between(program), program) for program in megatron.programs(plan, Options())]
    largest, at = max((bounds.least, -program.stage) for bounds, program in ranges)
    if enough is not None and largest > enough:
        return largest, -at
    largest = at = 0
    for bounds, program in sorted(ranges, key=lambda pair: -pair[0].most):
        if bounds.most < largest or (enough is not None and largest > enough):
            break
        peak = fold_program(program).peak
        largest, at = max((largest, at), (peak, -program.stage))
    return largest, -at


def stops_early(plan: Plan) -> bool:
    """Whether ``fullest`` of ``plan`` with ``enough`` may be less than the whole answer."""
    return plan.framework == "megatron"


def _first_largest(peaks: Iterable[int]) -> Bound:
    largest, at = max((peak, -stage) for stage, peak in enumerate(peaks))
    return largest, -at


def between(program: Program) -> Range:
    """Bounds of what a stage of Megatron-Core needs: all that is kept, with the most that passes in flight and one pass
    hold, or the step."""
    order, kept = program.order, program.kept
    assert order is not None
    assert kept is not None
    moving = megatron_flight.between(order.schedule, [chunk.passes for chunk in order.chunks], order.sizes)
    if moving is None:
        return Range(0, UNBOUNDED)
    reports = order.schedule.microbatches * order.sizes.report if order.schedule.last else 0
    step = reports + kept.optimizer.peak
    retained, idle, busy = order.retained.net, kept.between.net, kept.during.net
    return Range(
        retained + max(idle, busy + max(moving.least, step)), retained + max(idle, busy + max(moving.most, step))
    )
