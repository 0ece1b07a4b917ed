"""What a user says about ``fully_shard``, checked, and the program that every rank runs."""

from __future__ import annotations

from dataclasses import replace

from ..layers.coverage import TRANSFORMERS, check_covered
from ..layers.module import Options
from ..plan.errors import PlanError
from ..plan.framework_sections import Fsdp
from ..plan.optimizer_checks import check_sharded
from ..plan.plan import Plan
from ..program import Program
from .fsdp import Model, host_bytes, program, transformers_model, unsynced_program
from .fsdp_stages import check_no_pipeline, stage_programs
from .fsdp_torchtitan import ActivationCheckpointing, torchtitan_model
from .fsdp_units import Sharding, shard

FAMILIES = tuple(family for family in TRANSFORMERS if family != "bert")
"""Those whose order of parameters is known (``registration``), as it decides how a unit's buffers lie."""


def check(plan: Plan, given: Fsdp) -> None:
    """Refuses what contradicts itself or is not covered."""
    check_covered(plan.model, TRANSFORMERS, plan.framework)
    if plan.model.family not in FAMILIES:
        problem = f"has no recipe in framework fsdp yet; these have: {', '.join(FAMILIES)}"
        raise PlanError("model.family", plan.model.family, problem)
    dp, layout = plan.layout.dp, plan.layout
    assert dp is not None
    if layout.tp > 1 and not given.gradient_sync:
        problem = "must be true with tensor parallelism: torchtitan reduces gradients with every micro-batch"
        raise PlanError("fsdp.gradient_sync", False, problem)
    for name in ("cp", "ep"):
        value = getattr(layout, name)
        if value != 1:
            problem = "must be 1: fsdp is modelled with data, tensor and pipeline parallelism only"
            raise PlanError(f"layout.{name}", value, problem)
    if dp % given.replicas:
        raise PlanError("fsdp.replicas", given.replicas, f"must divide dp, which is {dp}")
    shards, to = dp // given.replicas, given.reshard_to
    if to is not None and not given.reshard_after_forward:
        raise PlanError("fsdp.reshard_to", to, "must be left out where fsdp.reshard_after_forward is false")
    if to is not None and shards % to:
        raise PlanError("fsdp.reshard_to", to, f"must be a divisor of the {shards} shards")
    check_sharded(plan.optimizer.name, "fsdp")
    if given.code == "torchtitan" and to is not None:
        raise PlanError("fsdp.reshard_to", to, "must be left out: torchtitan has no other than true and false")
    if given.code == "torchtitan" and given.offload and plan.optimizer.implementation == "fused":
        raise PlanError("optimizer.implementation", "fused", "must be foreach or for-loop with CPU offload")
    if given.code == "torchtitan":
        _check_recompute(plan, given)
    if given.code != "torchtitan" and (given.per_operator or given.recompute_every != 1 or given.ends_apart):
        problem = "must be torchtitan for recompute per operator or every n-th layer, and for ends apart"
        raise PlanError("fsdp.code", given.code, problem)


def _check_recompute(plan: Plan, given: Fsdp) -> None:
    """torchtitan's modes: none, full, and selective, which is per operator or every n-th layer."""
    mode, every = plan.recompute.mode, given.recompute_every
    if given.per_operator and mode == "full":
        problem = "must be selective with fsdp.per_operator, which keeps attention and every second product"
        raise PlanError("recompute.mode", mode, problem)
    if given.per_operator and every != 1:
        raise PlanError("fsdp.recompute_every", every, "must be 1 with fsdp.per_operator: one of the two")
    if mode == "selective" and not given.per_operator and every == 1:
        problem = "needs fsdp.per_operator, or fsdp.recompute_every of 2 or more (torchtitan's two selective modes)"
        raise PlanError("recompute.mode", mode, problem)
    if mode == "none" and every != 1:
        raise PlanError("fsdp.recompute_every", every, "must be 1 where recompute.mode is none")


def sharding_of(plan: Plan, given: Fsdp) -> Sharding:
    assert plan.layout.dp is not None
    shards, compute = plan.layout.dp // given.replicas, plan.precision.dtype
    return Sharding(
        shards,
        given.replicas,
        given.parameters,
        compute,
        given.reduce,
        given.offload,
        plan.layout.tp,
        divides=given.code == "torchtitan" and shards == 1,  # with more shards NCCL divides, if anything
    )


def model_of(plan: Plan, options: Options, given: Fsdp) -> Model:
    if given.code == "transformers":
        reshard = given.reshard_to or given.reshard_after_forward
        return transformers_model(plan, options, reshard=reshard, reshard_root=given.reshard_root)
    reshard = given.reshard_after_forward
    return torchtitan_model(plan, options, recompute_of(plan, given), reshard=reshard, ends_apart=given.ends_apart)


def recompute_of(plan: Plan, given: Fsdp) -> ActivationCheckpointing:
    """torchtitan's activation checkpointing."""
    if given.per_operator:
        return ActivationCheckpointing("op")
    if plan.recompute.mode != "none":
        return ActivationCheckpointing("full", given.recompute_every)
    return ActivationCheckpointing("none")


def programs(plan: Plan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run, ``last`` the last micro-batch's modules where they differ; or one for each
    pipeline stage."""
    given = plan.fsdp
    check(plan, given)
    if plan.layout.pp > 1:
        return stage_programs(plan, options, recompute_of(plan, given), sharding_of(plan, given))
    check_no_pipeline(plan, given)
    model, sharding = model_of(plan, options, given), sharding_of(plan, given)
    made = program(plan, model, sharding)
    if not given.gradient_sync and made.microbatches > 1:
        made, last = unsynced_program(plan, model, sharding)
        made = replace(made, last=last)
    tensors = made.parameter_tensors()
    elements = sum(shard(one, sharding.shards).elements for one in tensors)
    return (replace(made, streams=True, elements=elements, host=host_bytes(tensors, plan.optimizer, sharding)),)
