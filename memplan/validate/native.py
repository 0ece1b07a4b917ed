"""A plan as torch's own code runs it: the plan that a native run measures, and is estimated for.

``single``, ``ddp`` and ``fsdp`` run as they are. Plans of other frameworks run in the shape of theirs that torch has
(tensor and pipeline parallelism as torchtitan has them, shards of ``fully_shard`` for ZeRO), and what is measured is
compared with the estimate of that, never with the framework's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..estimate import programs_of
from ..frameworks.ddp_programs import fullest_rank
from ..layers.module import Options
from ..plan.errors import PlanError
from ..plan.framework_sections import Ddp, Deepspeed, Fsdp, Megatron
from ..plan.plan import Layout, Loss, Optimizer, Pipeline, Plan, Precision, Recompute
from ..plan.resolve import resolve
from ..plan.section import Section
from ..plan.tuning_checks import first_frozen, is_tuned
from ..program import Program
from ..trace.job import Job, job_of_plan
from ..trace.torchtitan_job import is_torchtitan, job_of_torchtitan
from .readings import Code, World

NATIVE = ("single", "ddp", "fsdp")
ZERO = {0: ("ddp", 0), 1: ("ddp", 1), 2: ("fsdp", 0), 3: ("fsdp", 0)}
"""Frameworks, and ZeRO stages in them, that keep what a ZeRO stage keeps."""


@dataclass(frozen=True, slots=True)
class Native:
    """What is run for a plan."""

    given: Plan
    """Resolved, as the user has it."""
    runs: Plan
    """Resolved, as torch's code runs it."""
    differs: str = ""
    """In one sentence, where ``runs`` is of another framework than ``given``."""

    @property
    def ranks(self) -> int:
        layout = self.runs.layout
        return layout.tp * layout.pp * (layout.dp or 1)

    @property
    def stages(self) -> int:
        return self.runs.layout.pp

    def stage_of(self, rank: int) -> int:
        return rank // (self.ranks // self.stages)

    def distinct(self) -> tuple[int, ...]:
        """One rank of each stage, the one that needs most."""
        if self.runs.framework == "ddp" and self.runs.layout.zero:
            return (fullest_rank(self.runs),)
        return tuple(range(0, self.ranks, self.ranks // self.stages))

    @property
    def code(self) -> Code:
        """Whose code runs it."""
        return "torch"

    @property
    def by_pass(self) -> bool:
        """Passes are compared as a whole, not entry by entry."""
        return False

    def check_device(self, device: str) -> None:
        """``PlanError`` where ``device``, ``cuda``, ``cpu`` or ``fake``, cannot run it."""

    def notes(self, world: World, device: str) -> tuple[str, ...]:
        """What the readings of such a run lack, or have besides."""
        return ()

    @property
    def least_warmup(self) -> int:
        """Iterations before one that is like those behind it."""
        return 1

    def program(self, rank: int) -> Program:
        """What the estimate has ``rank`` run."""
        return programs_of(self.runs, Options())[self.stage_of(rank)]

    def job(self, rank: int) -> Job:
        """What ``rank`` runs."""
        if is_torchtitan(self.runs):
            return job_of_torchtitan(self.runs, self.stage_of(rank))
        return job_of_plan(self.runs)


def native(plan: Plan) -> Native:
    """What torch's code runs for ``plan``. ``PlanError`` where it has nothing of the kind."""
    given = resolve(plan)
    runs, differs = (given, "") if given.framework in NATIVE else _translated(given)
    _check(runs)
    found = Native(given, runs, differs)
    found.job(0)
    return found


def _check(plan: Plan) -> None:
    if is_tuned(plan):
        field, value = first_frozen(plan)
        problem = "must be left out: a validation trains whole models; memplan trace follows adapters and frozen parts"
        raise PlanError(field, value, problem)
    if plan.trainer.loop != "none":
        problem = "must be none: a validation has a loop of its own; memplan trace follows the Trainer's step"
        raise PlanError("trainer.loop", plan.trainer.loop, problem)


def _translated(plan: Plan) -> tuple[Plan, str]:
    """A plan of another framework in the nearest shape that torch has."""
    if plan.framework == "device-map":
        problem = (
            f"must be one of {', '.join(NATIVE)}, or one that these can stand for: one process on several GPUs is not"
        )
        raise PlanError("framework", plan.framework, problem)
    layout, changes = plan.layout, dict[str, Any]()
    parallel = layout.tp > 1 or layout.pp > 1
    if layout.cp > 1 or layout.ep > 1:
        name = "cp" if layout.cp > 1 else "ep"
        problem = "must be 1: torch-native code has data, tensor and pipeline parallelism"
        raise PlanError(f"layout.{name}", getattr(layout, name), problem)
    if parallel:
        _check_llama(plan)
        framework, zero = "fsdp", 0
        changes["fsdp"] = Fsdp(code="torchtitan", reshard_after_forward=layout.pp == 1)
        changes["pipeline"] = Pipeline(schedule=plan.pipeline.schedule)
        shape = f"torchtitan's Llama with tp {layout.tp} and pp {layout.pp} under fully_shard"
    else:
        framework, zero = ZERO[layout.zero]
        changes["pipeline"] = Pipeline()
        if framework == "fsdp":
            changes["fsdp"] = Fsdp(reshard_after_forward=layout.zero == 3)
        shape = {("ddp", 0): "DistributedDataParallel", ("ddp", 1): "DDP and ZeroRedundancyOptimizer"}.get(
            (framework, zero), "fully_shard"
        )
    whole = "full" if plan.recompute.mode == "full" else "none"
    sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "dp": layout.dp, "zero": zero}
    name = plan.optimizer.name if plan.optimizer.name in ("sgd", "adam", "adamw") else "adamw"
    optimizer: dict[str, Any] = {"name": name, "momentum": plan.optimizer.momentum if name == "sgd" else 0.0}
    given = plan.model_copy(
        update={
            "framework": framework,
            "layout": _new(Layout, sizes),
            "precision": Precision(dtype=plan.precision.dtype),
            "optimizer": _new(Optimizer, optimizer),
            "recompute": Recompute(mode=whole),
            "loss": Loss(),
            "attention": None if parallel else plan.attention,
            "code": "current",
            "megatron": Megatron(),
            "deepspeed": Deepspeed(),
            "ddp": Ddp(),
            "fsdp": Fsdp(),
            "torch": None,
            **changes,
        }
    )
    runs = resolve(given)
    shape = ", ".join((shape, *_other_choices(plan, runs)))
    return runs, (
        f"torch-native code runs in place of {plan.framework}: {shape}; what it measures says nothing of what "
        f"memplan estimates for {plan.framework}"
    )


def _other_choices(plan: Plan, runs: Plan) -> Iterator[str]:
    """What of ``plan`` torch's code has not, beside what a framework is."""
    if runs.optimizer.name != plan.optimizer.name:
        yield f"with {runs.optimizer.name} in place of {plan.optimizer.name}"
    if runs.recompute.mode != plan.recompute.mode:
        yield "without selective recompute"
    if runs.loss.kind != plan.loss.kind:
        yield f"with the {runs.loss.kind} loss in place of {plan.loss.kind}"
    if plan.pipeline != Pipeline(schedule=plan.pipeline.schedule):
        yield "in stages as torchtitan cuts them"
    if plan.deepspeed.offload_optimizer != "none":
        yield "without offload"


def _new(kind: type[Section], values: dict[str, Any]) -> Section:
    return kind.model_validate(values)


def _check_llama(plan: Plan) -> None:
    if plan.model.family != "llama":
        problem = (
            "must be llama for torch-native code with tensor or pipeline parallelism, which is torchtitan's; "
            "other families run with tp 1 and pp 1"
        )
        raise PlanError("model.family", plan.model.family, problem)
