"""Layouts on a GPU whose speed, or the network of whose systems, nobody has published: ranked as on another one, with
times that are not told."""

from __future__ import annotations

from ...device.gpus import MULTIPROCESSORS
from ...plan.errors import ABSENT, PlanError
from ...plan.plan import Plan, ResolvedPlan
from .hardware import GIGA, SPEEDS
from .shape import Shape
from .step import StepTime, step_time, step_total

STAND_IN = "a100-80gb"


def is_timed(gpu: str | None) -> bool:
    """Whether the speed of ``gpu`` is published, so that it has times."""
    return gpu in SPEEDS and gpu in MULTIPROCESSORS


def lacks_network(plan: Plan, gpus: int, gpu: str | None = None) -> bool:
    """Whether ``gpus`` of the plan's GPU, or of ``gpu``, are several nodes, between which no bandwidth is known."""
    gpu, hardware = gpu or plan.hardware.gpu or "", plan.hardware
    return gpus > hardware.gpus_per_node and hardware.network is None and gpu in SPEEDS and SPEEDS[gpu].network is None


def check_timed(plan: ResolvedPlan) -> None:
    """``PlanError`` where the plan's GPUs have no times."""
    gpu = plan.hardware.gpu
    if lacks_network(plan, plan.hardware.gpus):
        problem = f"is missing: nobody has published a system of several nodes with {gpu} and its network adapters; "
        problem += "--network 50 says 50 GB/s for each GPU, and --objective memory and gpus need none"
        raise PlanError("hardware.network", ABSENT, problem)
    if gpu is not None and not is_timed(gpu):
        known = ", ".join(sorted(set(SPEEDS) & set(MULTIPROCESSORS)))
        raise plan.wrong(
            "hardware.gpu",
            "has no published speed, and so no time: --objective memory and gpus need none; these have one: " + known,
        )


def on_timed_gpu(plan: ResolvedPlan, gpus: int = 0) -> ResolvedPlan:
    """A resolved plan whose GPU has times: ``STAND_IN`` in place of one that has none, or is not named; its network
    where that alone is not known, of the plan's GPUs or of all ``gpus`` of which it is a part."""
    network = SPEEDS[STAND_IN].network
    if not is_timed(plan.hardware.gpu):
        stand_in: dict[str, object] = {"gpu": STAND_IN}
    elif network is not None and lacks_network(plan, max(gpus, plan.hardware.gpus)):
        stand_in = {"network": network.value / GIGA}
    else:
        return plan
    return plan.model_copy(update={"hardware": plan.hardware.model_copy(update=stand_in)})


def ranking_time(plan: ResolvedPlan) -> StepTime:
    """``step_time`` of a resolved plan, on a GPU that has times."""
    return step_time(on_timed_gpu(plan))


def ranking_seconds(plan: ResolvedPlan, shape: Shape | None = None) -> float:
    """The total of that alone; the ``shape`` may be known."""
    return step_total(on_timed_gpu(plan), shape)
