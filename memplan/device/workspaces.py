"""Which PyTorch a plan runs on, and what its cuBLAS takes from the caching allocator."""

from __future__ import annotations

from ..plan.errors import PlanError
from ..plan.resolved import ResolvedPlan
from ..tape.events import Category, Hold, rounded
from . import facts
from .gpus import GPUS

THREADS = 2
"""Threads with a cuBLAS handle, and so a workspace, of their own: the main one, and autograd's for the device
(``CUDABlasHandlePool.cpp``, ``getCurrentCUDABlasHandle``: handles are reserved thread by thread)."""


def torch_version(plan: ResolvedPlan) -> facts.Version:
    """Major and minor of the PyTorch that a resolved plan runs on."""
    major, minor, *_ = plan.torch.split(".") if plan.torch is not None else ("2", "13")
    return int(major), int(minor)


def cublas_workspaces(plan: ResolvedPlan) -> tuple[Hold, ...]:
    """Workspaces of a training job whose products go through PyTorch, in forward and in backward."""
    if plan.hardware.gpu is None:
        return ()
    capability = GPUS[plan.hardware.gpu].compute_capability
    if capability is None:
        return ()
    try:
        found = facts.cublas_workspaces(capability, plan.environment, torch_version(plan))
    except ValueError as error:
        raise PlanError("environment", dict(plan.environment), str(error)) from None
    return tuple(
        Hold(0, rounded(fact.bytes), Category.WORKSPACES, fact.name)
        for fact in found[:1]
        for _ in range(THREADS)
        if fact.held and fact.bytes
    )
