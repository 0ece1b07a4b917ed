"""A plan of torchtitan's Llama under ``fully_shard`` as the job of one of its ranks."""

from __future__ import annotations

from ..frameworks.fsdp_programs import recompute_of
from ..frameworks.fsdp_stages import microbatches, partition
from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.plan import Plan
from ..plan.tuning_checks import first_frozen, is_tuned
from .job import MOST_MICROBATCHES, Job, Sharded, check_optimizer
from .torchtitan_settings import Stages, Torchtitan

LOSSES = ("plain", "vocab-parallel")
STAGE = "--stage"


def is_torchtitan(plan: Plan) -> bool:
    return plan.framework == "fsdp" and plan.fsdp.code == "torchtitan"


def job_of_torchtitan(plan: Plan, stage: int = 0) -> Job:
    """The step of the first of the ranks that run ``stage``, a rank of the pipeline. ``PlanError`` where a trace
    cannot follow it; the plan's own checks (``frameworks.fsdp_programs``) come before."""
    _check(plan)
    check_stage(stage, plan.layout.pp)
    spec, optimizer, layout, batch = plan.model, plan.optimizer, plan.layout, plan.batch
    recompute = recompute_of(plan, plan.fsdp)
    assert batch.seq is not None
    assert layout.dp is not None
    torchtitan = Torchtitan(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=spec.vocab,
        layers=spec.layers,
        recompute=recompute.mode,
        every=recompute.every,
        tensor=layout.tp,
        parallel_loss=plan.loss.kind == "vocab-parallel",
        ends_apart=plan.fsdp.ends_apart,
        stages=_stages(plan, stage),
    )
    count = microbatches(plan)
    return Job(
        config={"model_type": "llama"},
        b=batch.mbs,
        s=batch.seq,
        dtype=plan.precision.dtype,
        attention="flash",
        recompute=recompute.mode != "none",
        optimizer=optimizer.name,
        implementation=optimizer.implementation or "foreach",
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay or 0.0,
        microbatches=count if layout.pp > 1 else min(count, MOST_MICROBATCHES),
        fsdp=Sharded(
            shards=layout.dp // plan.fsdp.replicas,
            replicas=plan.fsdp.replicas,
            reshard=plan.fsdp.reshard_after_forward,
            reshard_root=False,
            parameters=plan.fsdp.parameters,
            reduce=plan.fsdp.reduce,
            syncs_each=plan.fsdp.gradient_sync,
        ),
        torchtitan=torchtitan,
    )


def check_stage(stage: int, stages: int) -> None:
    """Refuses a stage that no rank of the pipeline has."""
    if not 0 <= stage < stages:
        ranks = f"from 0 to {stages - 1}" if stages > 1 else "0: there is no pipeline (pp 1)"
        raise PlanError("", ABSENT, f"must be {ranks}, not {stage}", origin=Origin(STAGE))


def _stages(plan: Plan, stage: int) -> Stages | None:
    layout = plan.layout
    if layout.pp == 1:
        return None
    return Stages(
        rank=stage,
        ranks=layout.pp,
        chunks=layout.vpp,
        edges=tuple(partition(plan)),
        schedule=plan.pipeline.schedule,
        microbatches=microbatches(plan),
        return_outputs=plan.fsdp.return_outputs,
    )


def _check(plan: Plan) -> None:
    if plan.loss.kind not in LOSSES or plan.loss.logits_to_keep is not None:
        raise PlanError("loss.kind", plan.loss.kind, "must be plain or vocab-parallel, of all tokens: torchtitan's own")
    if plan.fsdp.offload:
        raise PlanError("fsdp.offload", True, "must be false: fake tensors are of one device, and offload moves none")
    if is_tuned(plan):
        field, value = first_frozen(plan)
        raise PlanError(field, value, "must be left out: torchtitan's Llama is trained whole")
    if plan.trainer.loop != "none":
        raise PlanError("trainer.loop", plan.trainer.loop, "must be none: torchtitan has a loop of its own")
    check_optimizer(plan)
