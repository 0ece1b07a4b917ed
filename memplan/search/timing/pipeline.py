"""Seconds of a pipeline's passes from the seconds of its stages: a fold, and the simulation that it is tested against.

Sends are part of a stage's forward and backward here: Megatron's and DeepSpeed's schedules wait for them, but where an
interleaved schedule overlaps them.

The fold: some stage is the slowest. It works without a pause from its first forward pass to its last backward pass, but
for one micro-batch's way through the stages before and behind it. So with ``f_i`` and ``b_i`` of stage i and ``m``
micro-batches,

    1F1B         sum_i (f_i + b_i) + (m - 1) max_i (f_i + b_i)
    GPipe        sum_i f_i + (m - 1) max_i f_i  +  sum_i b_i + (m - 1) max_i b_i
    interleaved  m max_i (f_i + b_i) + one chunk's forward and backward through the other stages, and what the slowest
                 stage waits where their chunks are slower than its own

where ``f_i`` is the sum over a stage's chunks. Equal stages: (m + p - 1) (f + b), and for v chunks (m + (p - 1) / v)
(f + b), as in arXiv 2104.04473, section 2.2. GPipe's is exact. The others are exact where all stages are equal, or only
the ends slower; where stages differ in size alone they are an upper bound, off by a pass through the pipeline at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """Seconds of one micro-batch through a stage (or one of its chunks)."""

    forward: float
    backward: float


def seconds(stages: Sequence[Sequence[Stage]], microbatches: int, schedule: str = "1f1b") -> float:
    """Of all passes of an iteration; ``stages`` by stage, then by chunk."""
    if schedule == "gpipe":
        forwards = [sum(chunk.forward for chunk in stage) for stage in stages]
        backwards = [sum(chunk.backward for chunk in stage) for stage in stages]
        slowest = max(forwards) + max(backwards)
        return sum(forwards) + sum(backwards) + (microbatches - 1) * slowest
    wholes = [sum(chunk.forward + chunk.backward for chunk in stage) for stage in stages]
    slowest = max(wholes)
    if len(stages[0]) == 1:
        return sum(wholes) + (microbatches - 1) * slowest
    at = wholes.index(slowest)
    before, behind = stages[:at], stages[at + 1 :]
    ways = sum(sum(stage[0]) for stage in before) + sum(sum(stage[-1]) for stage in behind)
    return microbatches * slowest + ways + (len(stages) - 1) * _late(stages[at], before, behind)


def _late(slowest: Sequence[Stage], before: Sequence[Sequence[Stage]], behind: Sequence[Sequence[Stage]]) -> float:
    """Seconds that the slowest stage waits for each of the p - 1 other micro-batches of a round, which run a chunk one
    after the other: where the first chunk of a stage before takes longer than its own, or the last of one behind."""
    first, last = slowest[0], slowest[-1]
    forward = max((stage[0].forward for stage in before), default=0.0)
    backward = max((stage[0].backward for stage in before), default=0.0)
    end = max((sum(stage[-1]) for stage in behind), default=0.0)
    return max(0.0, forward - first.forward) + max(0.0, backward - first.backward) + max(0.0, end - sum(last))


class Pass(NamedTuple):
    """One pass of a stage, as a schedule orders it."""

    forward: bool
    chunk: int
    microbatch: int


def simulated(stages: Sequence[Sequence[Stage]], orders: Sequence[Sequence[Pass]]) -> float:
    """The same by running every stage's passes in order, each as soon as its stage is free and what it needs is there.

    ``orders`` holds each stage's passes. Hidden states go to the next stage, from the last stage to the first stage's
    next chunk; gradients the other way.
    """
    count, chunks = len(stages), len(stages[0])
    ended: dict[tuple[bool, int, int], float] = {}
    free, at = [0.0] * count, [0] * count
    waiting = sum(map(len, orders))
    while waiting:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                one = order[at[stage]]
                place = one.chunk * count + stage
                needed = _needed(one, place, count * chunks)
                if needed is not None and needed not in ended:
                    break
                start = max(free[stage], 0.0 if needed is None else ended[needed])
                times = stages[stage][one.chunk]
                free[stage] = start + (times.forward if one.forward else times.backward)
                ended[(one.forward, place, one.microbatch)] = free[stage]
                at[stage] += 1
                waiting -= 1
                moved = True
        if not moved:
            raise ValueError("the order of passes deadlocks")
    return max(free)


def _needed(one: Pass, place: int, places: int) -> tuple[bool, int, int] | None:
    """The pass whose result ``one`` takes in: ``(forward, place in the model, micro-batch)``."""
    if one.forward:
        return None if place == 0 else (True, place - 1, one.microbatch)
    return (True, place, one.microbatch) if place == places - 1 else (False, place + 1, one.microbatch)


def one_chunk_orders(count: int, microbatches: int, schedule: str = "1f1b") -> list[list[Pass]]:
    """1F1B or GPipe, a chunk a stage."""
    orders = []
    for stage in range(count):
        warm_up = microbatches if schedule == "gpipe" else min(count - stage - 1, microbatches)
        order = [Pass(True, 0, number) for number in range(warm_up)]
        for number in range(microbatches - warm_up):
            order += [Pass(True, 0, warm_up + number), Pass(False, 0, number)]
        order += [Pass(False, 0, number) for number in range(microbatches - warm_up, microbatches)]
        orders.append(order)
    return orders
