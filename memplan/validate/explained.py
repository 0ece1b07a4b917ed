"""A request that failed, in the plan's terms: which tensor of the estimate it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..estimate import detail
from ..plan.plan import Plan
from ..report.units import size
from ..tape import Hold
from .readings import Failure

NEAR = 0.005
"""A request is known to two decimals of its unit, as PyTorch prints it."""


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
    """Tensors of one micro-batch whose size is printed like ``bytes_``."""
    unit = next(unit for unit in (2**30, 2**20, 2**10, 1) if bytes_ >= unit)
    for tape in detail(plan, stage):
        for event in tape.events:
            if isinstance(event, Hold) and abs(event.bytes - bytes_) <= NEAR * unit:
                yield Tensor(tape.module, tape.phase, event)
