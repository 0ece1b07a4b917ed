"""Other code than torch's own, which a validation can run: Megatron-Core's, and DeepSpeed's engine.

A module ``…_plan`` says, without torch, what is run for a plan; another one runs it in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ...plan.plan import Plan
from ..native import Native, native
from ..readings import Code, World

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ...program import Program
    from ...trace.surroundings import Surroundings
    from ...trace.traced import Traced
    from ..task import Task


class Runner(Protocol):
    """One code in a worker."""

    def training_of(self, plan: Plan, rank: int, within: Surroundings) -> AbstractContextManager[Any]:
        """The plan's model on ``rank``, with its optimizer, before the first iteration."""
        ...

    def followed(self, plan: Plan, rank: int, program: Program, within: Surroundings) -> Traced:
        """An iteration event by event, behind those that warm up."""
        ...


def planned(code: Code, plan: Plan, device: str) -> Native:
    """What ``code`` runs for ``plan``. ``PlanError`` where it has nothing of the kind, ``LackingError`` where it is not
    installed."""
    if code == "megatron":
        from .megatron_plan import megatron_core

        return megatron_core(plan, device)
    if code == "deepspeed":
        from .deepspeed import with_deepspeed

        found = with_deepspeed(plan)
        found.check_device(device)
        return found
    return native(plan)


def layout_of(task: Task) -> Native:
    """Which rank is of which stage."""
    if task.code == "megatron":
        from .megatron_plan import MegatronCore

        return MegatronCore(task.plan, task.plan)
    if task.code == "deepspeed":
        from .deepspeed import WithDeepspeed

        return WithDeepspeed(task.plan, task.plan)
    return Native(task.plan, task.plan)


def notes_of(code: Code, runs: Native, world: World, device: str) -> tuple[str, ...]:
    """What a reader of the report has to know."""
    if code == "megatron":
        from .megatron_plan import notes

        return notes(runs.runs, device, alone=world == "emulated")
    return runs.notes(world, device)


def packages_of(code: Code) -> tuple[str, ...]:
    """Whose versions a report names."""
    return PACKAGES[code]


PACKAGES: dict[Code, tuple[str, ...]] = {
    "torch": (),
    "megatron": ("megatron-core", "transformer-engine", "apex"),
    "deepspeed": ("deepspeed", "transformers"),
}


def code_of(task: Task) -> Runner | None:
    """What runs ``task``; ``None``: torch's own code."""
    if task.code == "megatron":
        from . import megatron_run

        return megatron_run
    if task.code == "deepspeed":
        from . import deepspeed_run

        return deepspeed_run
    return None
