"""Layouts on a GPU whose speed nobody has published: ranked as on another one, with times that are not told."""

from __future__ import annotations

from ...device.gpus import MULTIPROCESSORS
from ...plan.errors import PlanError
from ...plan.resolved import ResolvedPlan
from .hardware import SPEEDS
from .shape import Shape
from .step import StepTime, step_time, step_total

STAND_IN = "a100-80gb"


def is_timed(gpu: str | None) -> bool:
    """Whether the speed of ``gpu`` is published, so that it has times."""
    return gpu in SPEEDS and gpu in MULTIPROCESSORS


def check_timed(gpu: str | None) -> None:
    """``PlanError`` where ``gpu`` has no times."""
    if gpu is not None and not is_timed(gpu):
        known = ", ".join(sorted(set(SPEEDS) & set(MULTIPROCESSORS)))
        problem = "has no published speed, and so no time: --objective memory and gpus need none; these have one: "
        raise PlanError("hardware.gpu", gpu, problem + known)


def on_timed_gpu(plan: ResolvedPlan) -> ResolvedPlan:
    """A resolved plan whose GPU has times: ``STAND_IN`` in place of one that has none, or is not named."""
    if is_timed(plan.hardware.gpu):
        return plan
    return plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"gpu": STAND_IN})})


def ranking_time(plan: ResolvedPlan) -> StepTime:
    """``step_time`` of a resolved plan, on a GPU that has times."""
    return step_time(on_timed_gpu(plan))


def ranking_seconds(plan: ResolvedPlan, shape: Shape | None = None) -> float:
    """The total of that alone; the ``shape`` may be known."""
    return step_total(on_timed_gpu(plan), shape)
