"""DistributedDataParallel in a plan, as plain data for the worker."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.errors import PlanError
from ..plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Replicated:
    """``DistributedDataParallel`` around the model, as rank ``rank`` of ``ranks`` sees it."""

    ranks: int
    rank: int
    """The one whose share of optimizer states needs most; 0 where all are alike."""
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    broadcast_buffers: bool
    syncs_each: bool
    """Every micro-batch reduces its gradients; else the last one alone (``no_sync``)."""
    zero: bool
    """The optimizer is a ``ZeroRedundancyOptimizer``."""
    parameters_as_bucket_view: bool


def replicated_of(plan: Plan, *, has_recipe: bool) -> Replicated | None:
    """``None`` where the plan's framework is another. Which rank needs most is found with a model's recipe."""
    if plan.framework != "ddp":
        return None
    if plan.layout.zero and not has_recipe:
        problem = "must be 0 for an architecture without a recipe: which rank needs most is not known"
        raise PlanError("layout.zero", plan.layout.zero, problem)
    from ..frameworks.ddp_programs import fullest_rank

    given = plan.ddp
    assert plan.layout.dp is not None
    return Replicated(
        ranks=plan.layout.dp,
        rank=fullest_rank(plan) if plan.layout.zero else 0,
        bucket_cap_mb=given.bucket_cap_mb,
        gradient_as_bucket_view=given.gradient_as_bucket_view,
        static_graph=given.static_graph,
        find_unused_parameters=given.find_unused_parameters,
        broadcast_buffers=given.broadcast_buffers,
        syncs_each=given.gradient_sync,
        zero=bool(plan.layout.zero),
        parameters_as_bucket_view=given.parameters_as_bucket_view,
    )
