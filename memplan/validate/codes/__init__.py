"""Whose code runs a plan: torch's own, or a framework's."""

from __future__ import annotations

from ...plan.plan import Plan
from ..native import Native, native
from ..readings import Code
from ..task import Task


def runs_by(plan: Plan, code: Code) -> Native:
    """What ``code`` runs for ``plan``. ``PlanError`` where it has nothing of the kind."""
    if code == "deepspeed":
        from .deepspeed import with_deepspeed

        return with_deepspeed(plan)
    return native(plan)


def of_task(task: Task) -> Native:
    """What a worker runs of it; the plan was checked, and turned into that of the code that runs."""
    if task.code == "deepspeed":
        from .deepspeed import WithDeepspeed

        return WithDeepspeed(task.plan, task.plan)
    return Native(task.plan, task.plan)
