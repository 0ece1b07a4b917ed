"""``fully_shard`` as it runs here: on transformers' models, and on torchtitan's Llama in every stage of a pipeline."""

from __future__ import annotations

from ...layers.module import Options
from ...plan.errors import PlanError
from ...plan.plan import Plan, ResolvedPlan
from ...plan.tuning_checks import first_frozen, is_tuned
from ...tape.program import Program
from ...trace.fit import Fit
from ...trace.framework import FrameworkRunning, in_compute
from ...trace.job import MOST_MICROBATCHES, Job, Sharded, Stages, Torchtitan, check_optimizer, check_stage
from ...trace.learned import assumptions, checked_fit, fit_of, learnt_programs
from ...values import replace
from ..plain import trainer
from . import flat
from .learned import assumptions_of, flat_program_of, lacks, program_of
from .notices import FSDP
from .programs import check_settings, recompute_of
from .stages import check_no_pipeline, partition
from .titan import newest, titan_of

LOSSES = ("plain", "vocab-parallel")
NO_OFFLOAD = "must be false: torchtitan's code runs without offload here"


class FsdpRunning(FrameworkRunning):
    learns = True
    casts = True

    def check(self, plan: ResolvedPlan) -> None:
        plan.refuse(
            ("fsdp.version", plan.fsdp.version == "1", "must be 2: only memplan estimate models FSDP1"),
            (
                "fsdp.ends_apart",
                plan.fsdp.ends_apart and plan.fsdp.code == "transformers",
                "must be false here, where the model's own unit has embedding and head (--no-ends-apart)",
            ),
        )
        for name in ("tp", "pp", "cp"):
            if getattr(plan.layout, name) != 1:
                raise plan.wrong(f"layout.{name}", "must be 1: only data parallelism is traced")

    def check_learnt(self, plan: ResolvedPlan) -> None:
        given, problem = plan.fsdp, "not modelled for an architecture without a recipe"
        if given.version == "1":
            flat.check(plan, given)
            if plan.precision.autocast:
                raise plan.wrong("precision.autocast", f"must be false with fsdp.version 1: mixed is {problem}")
        plan.refuse(
            ("fsdp.code", given.code != "transformers", "must be transformers: this architecture has no recipe"),
            (
                "fsdp.gradient_sync",
                not given.gradient_sync and plan.microbatches > 1,
                f"must be true: gradients reduced once are {problem}",
            ),
        )
        trainer.check_learnt(plan)
        if is_tuned(plan) and plan.lora.rank is None:
            raise plan.wrong(first_frozen(plan), f"must be left out: frozen parts are {problem} under fsdp")
        if given.version == "2":
            check_settings(plan, given)
        check_no_pipeline(plan, given)

    def learnt_casts(self, plan: ResolvedPlan) -> bool:
        """FSDP1 casts with mixed precision alone (``_pre_forward``, ``_cast_forward_inputs``)."""
        return plan.fsdp.version != "1"

    def learnt_alone(self, plan: ResolvedPlan) -> ResolvedPlan:
        """Adapters are in the dtype of compute once FSDP2 has gathered them (``MixedPrecisionPolicy.param_dtype``)."""
        return plan if plan.fsdp.version == "1" else in_compute(plan)

    def learnt_work(self, plan: ResolvedPlan) -> bool:
        from ..plain.timing import has_work

        return has_work(plan)

    def lacks(self, plan: ResolvedPlan, fit: Fit) -> str:
        return lacks(plan, fit)

    def check_served(self, plan: ResolvedPlan) -> None:
        checked_fit(plan)

    def learnt_program(self, plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
        made = flat_program_of if plan.fsdp.version == "1" else program_of
        return made(plan, fit, options)

    def learnt_programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        return learnt_programs(plan, options)

    def learnt_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return (*FSDP, *assumptions(plan), *assumptions_of(plan, fit_of(plan)))

    def runs_transformers(self, plan: Plan) -> bool:
        return plan.fsdp.code == "transformers"

    def sharded(self, plan: ResolvedPlan) -> Sharded | None:
        return _sharded(plan)

    def job(self, plan: ResolvedPlan, stage: int = 0, config: dict[str, object] | None = None) -> Job:
        return super().job(plan, stage, config) if self.runs_transformers(plan) else _torchtitan_job(plan, stage)


def _sharded(plan: ResolvedPlan) -> Sharded:
    given = plan.fsdp
    assert plan.layout.dp is not None
    return Sharded(
        shards=plan.layout.dp // given.replicas,
        replicas=given.replicas,
        reshard=given.reshard_to or given.reshard_after_forward,
        reshard_root=given.reshard_root,
        parameters=given.parameters,
        reduce=given.reduce,
        syncs_each=given.gradient_sync,
        offload=given.offload,
    )


def _torchtitan_job(plan: ResolvedPlan, stage: int) -> Job:
    """The step of torchtitan's Llama on the first of the ranks that run ``stage``, a rank of the pipeline.
    ``PlanError`` where a trace cannot follow it."""
    _check_torchtitan(plan)
    check_stage(stage, plan.layout.pp)
    spec, optimizer, layout, batch = plan.model, plan.optimizer, plan.layout, plan.batch
    recompute = recompute_of(plan, plan.fsdp)
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
    count = plan.microbatches
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
        fsdp=replace(_sharded(plan), reshard=plan.fsdp.reshard_after_forward, reshard_root=False),
        torchtitan=torchtitan,
    )


def _stages(plan: ResolvedPlan, stage: int) -> Stages | None:
    layout = plan.layout
    if layout.pp == 1:
        return None
    return Stages(
        rank=stage,
        ranks=layout.pp,
        chunks=layout.vpp,
        edges=tuple(partition(plan)),
        schedule=plan.pipeline.schedule,
        microbatches=plan.microbatches,
        return_outputs=plan.fsdp.return_outputs,
    )


def _check_torchtitan(plan: ResolvedPlan) -> None:
    if newest(plan):
        raise PlanError(
            "fsdp.newest",
            True,
            "must be false (--no-fsdp-newest): memplan's module of torchtitan's Llama that runs here is older",
        )
    plan.refuse(
        (
            "model.family",
            not titan_of(plan.model).complete,
            "must be llama: memplan has no module of torchtitan's other models that runs here",
        ),
        (
            "loss.kind",
            plan.loss.kind not in LOSSES or plan.loss.logits_to_keep is not None,
            "must be plain or vocab-parallel, without logits_to_keep: no other loss of torchtitan's runs here",
        ),
        (
            "model.tied_embeddings",
            plan.model.tied_embeddings,
            "must be false: the module of torchtitan's Llama that runs here has a head of its own",
        ),
        ("fsdp.offload", plan.fsdp.offload, NO_OFFLOAD),
        ("fsdp.reshard_root", plan.fsdp.reshard_root, "must be false: torchtitan's code runs with its default here"),
    )
    for field in ("compile", "compile_loss"):
        if getattr(plan.fsdp, field):
            raise plan.wrong(f"fsdp.{field}", "must be false: a whole step runs here without torch.compile")
    if is_tuned(plan):
        raise plan.wrong(first_frozen(plan), "must be left out: torchtitan trains all parameters of its Llama")
    plan.refuse(
        ("precision.fp8", plan.precision.fp8, "must be left out: no torchao runs here"),
        ("fsdp.cuda_graphs", plan.fsdp.cuda_graphs, "must be false: torchtitan's code runs without CUDA graphs here"),
        ("trainer.loop", plan.trainer.loop != "none", "must be none: torchtitan has its own training loop"),
    )
    check_optimizer(plan)
