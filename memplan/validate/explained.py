"""A request that failed, in the plan's terms: which tensor of the estimate it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..estimate import detail
from ..plan.plan import Plan
from ..report.units import MIB, size
from ..tape import Hold
from .readings import Failure

NEAR = 0.005
"""A request is known to two decimals of its unit, as PyTorch prints it."""
EXACT, ROUND = 10 * MIB, 2 * MIB
"""What PyTorch prints is the segment that it could not get: of requests from ``EXACT`` bytes on the next multiple of
``ROUND``. Smaller ones share segments, whose size says nothing (``CUDACachingAllocator.cpp``,
``get_allocation_size``)."""


class Tensor(NamedTuple):
    module: str
    phase: str
    hold: Hold

    def __str__(self) -> str:
        shape = " x ".join(f"{length:,}" for length in self.hold.shape)
        return f"{self.hold.name} of {self.module} in {self.phase} ({shape} in {self.hold.dtype})"


def explained(failure: Failure, plan: Plan, stage: int) -> Failure:
    """``failure`` with the tensor of its size, where the estimate for ``stage`` has one."""
    if failure.kind != "out-of-memory" or failure.failing is None:
        return failure
    found = next(_of_size(plan, stage, failure.failing), None)
    if found is None:
        return failure
    return failure.model_copy(update={"message": f"{failure.message} {size(failure.failing)} is {found}."})


def _of_size(plan: Plan, stage: int, bytes_: int) -> Iterator[Tensor]:
    """Tensors of one micro-batch whose size, or else whose segment's, is printed like ``bytes_``."""
    unit = next(unit for unit in (2**30, 2**20, 2**10, 1) if bytes_ >= unit)
    tensors = [
        Tensor(tape.module, tape.phase, event)
        for tape in detail(plan, stage)
        for event in tape.events
        if isinstance(event, Hold)
    ]
    for size_of in (_bytes, _segment):
        yield from (one for one in tensors if abs(size_of(one.hold) - bytes_) <= NEAR * unit)


def _bytes(hold: Hold) -> int:
    return hold.bytes


def _segment(hold: Hold) -> int:
    return -(-hold.bytes // ROUND) * ROUND if hold.bytes >= EXACT else hold.bytes
