"""A plan as DeepSpeed's engine runs it: ``deepspeed.initialize`` on a model of transformers, with ZeRO's settings.

What is checked here is what can be known without DeepSpeed; ``deepspeed_engine`` runs it.
"""

from __future__ import annotations

import os
from dataclasses import asdict, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, cast

from ...formats.deepspeed.exporter import configuration
from ...layers.module import Options
from ...optimizers import algorithms
from ...plan.errors import LackingError, PlanError, wrong_at
from ...plan.plan import Optimizer, Precision, ResolvedPlan
from ...plan.resolve import resolve
from ...plan.tuning_checks import first_frozen, is_tuned
from ...records.readings import World
from ...tape.program import Program
from ...trace.fit import Fit
from ...trace.framework import OtherRunning, in_compute, job_of_plan
from ...trace.job import Job
from ...trace.learned import assumptions, fit_of, learnt_programs
from ...validate.native import Native, OwnCode, Runner
from ...values import dataclass
from ..plain import trainer
from . import learned, notices
from .config import check_adapters, zero_of
from .engine import fullest_rank, program_of_rank

FRAMEWORK = "deepspeed"
OTHER = "deepspeed runs plans of framework deepspeed, and this one's is {}"
OTHERS = {
    "megatron-deepspeed": "deepspeed runs plans of framework deepspeed; megatron-deepspeed needs BigScience's own "
    "code, which is not run"
}
"""Why not, of a framework that could be taken for it."""
SETTLED = 3
"""Iterations after which ZeRO-3's coordinator has a complete trace (``partitioned_param_coordinator.py``)."""
LOSS_SCALE = 8
"""fp16: the power of two that the loss is scaled by at first, which overflows in no step; 16 would in some."""
SCALARS = "scalars that the engine makes, losses and norms, are measured and not estimated: 512 bytes each"
ONE_STREAM = (
    "DeepSpeed's accelerator for CPUs has one stream and no pinned memory: gathers and reductions end before the next "
    "operator, in the order of the main stream, which is what is estimated"
)
GLOO = "gloo's own copies of what it sends, which NCCL does not make, are not counted"
CPU_ATTENTION = "attention flash is PyTorch's kernel for CPUs, whose statistics and temporaries are not CUDA's"
ALONE = (
    "one rank ran alone: collectives gave it back its own share, so that losses mean nothing, and what NCCL takes was "
    "not measured"
)
FP16_ON_CPU = "its accelerator for CPUs refuses fp16 on most of them; bf16 takes the same bytes"
HOST_IS_DEVICE = "the host is the device there, and what is offloaded would count"


@dataclass(frozen=True, slots=True)
class EngineJob(Job):
    """One rank's training step under the engine."""

    ds_config: dict[str, Any] = field(default_factory=dict)
    """``ds_config.json``."""
    rank: int = 0
    ranks: int = 1
    stage: int = 0
    groups: str = "one"
    """Groups of parameters: ``one``, or matrices and the rest (``decay``)."""

    @property
    def packages(self) -> tuple[str, ...]:
        return ("deepspeed",)


@dataclass(frozen=True, slots=True)
class WithDeepspeed(Native):
    """What the engine runs for a plan."""

    @property
    def by_pass(self) -> bool:
        """Hooks between two layers gather, reduce and free for either of them."""
        return True

    def check_device(self, device: str) -> None:
        plan = self.runs
        if device == "fake":
            raise wrong_at(
                "--device",
                "fake must be cuda or cpu with --with deepspeed: its engine reads values, which fake tensors lack",
            )
        check_compiles(plan.optimizer, device)
        if device != "cpu":
            return
        plan.refuse(
            (
                "precision.dtype",
                plan.precision.dtype == "fp16",
                f"must be bf16 or fp32 with --device cpu: {FP16_ON_CPU}",
            ),
            (
                "optimizer.name",
                plan.optimizer.name == "lion",
                "must be another with --device cpu: DeepSpeed's is CUDA's",
            ),
        )
        for name in ("offload_optimizer", "offload_param"):
            if getattr(plan.deepspeed, name) != "none":
                raise plan.wrong(f"deepspeed.{name}", f"must be none with --device cpu: {HOST_IS_DEVICE}")

    def notes(self, world: World, device: str) -> tuple[str, ...]:
        """In words, for the report."""
        plan = self.runs
        result = [SCALARS]
        if device == "cpu":
            result.append(ONE_STREAM)
            if world == "real":
                result.append(GLOO)
            if plan.attention == "flash":
                result.append(CPU_ATTENTION)
        if world == "emulated" and self.ranks > 1:
            result.append(ALONE)
        return tuple(result)

    @property
    def least_warmup(self) -> int:
        return SETTLED

    def distinct(self) -> tuple[int, ...]:
        """The rank that needs most; at stages 1 and 2 they keep gradients of different parameters."""
        return (fullest_rank(self.runs),)

    def program(self, rank: int) -> Program:
        return program_of_rank(self.runs, Options(), rank)

    def job(self, rank: int) -> EngineJob:
        """The engine's configuration, and the model as for torch's own code."""
        plan = self.runs
        alone = plan.model_copy(
            update={
                "framework": "single",
                "precision": Precision(dtype=plan.precision.dtype),
                "optimizer": Optimizer(),
            }
        )
        job = job_of_plan(alone)
        config = _explicit(configuration(plan), plan.optimizer)
        config["gradient_accumulation_steps"] = job.microbatches
        config["steps_per_print"] = 2**31 - 1
        if "fp16" in config:
            config["fp16"] |= {"initial_scale_power": LOSS_SCALE}
        return EngineJob(
            **asdict(job),
            ds_config=config,
            rank=rank,
            ranks=self.ranks,
            stage=plan.layout.zero,
            groups=plan.deepspeed.groups,
        )


def with_deepspeed(plan: ResolvedPlan) -> WithDeepspeed:
    """``PlanError`` of a plan of another framework, or of one that the engine is not run with here."""
    if plan.framework != FRAMEWORK:
        raise wrong_at("--with", OTHERS.get(plan.framework, OTHER.format(plan.framework)))
    runs = resolve(plan)
    if is_tuned(runs):
        raise runs.wrong(
            first_frozen(runs), "must be left out with --with deepspeed: its engine is run without adapters here"
        )
    _check_optimizer(runs)
    found = WithDeepspeed(runs, runs)
    found.program(0)
    found.job(0)
    return found


def _check_optimizer(plan: ResolvedPlan) -> None:
    optimizer = plan.optimizer
    if optimizer.algorithm.deepspeed is None:
        named = ", ".join(one.name for one in algorithms() if one.deepspeed)
        raise plan.wrong(
            "optimizer.name", f"must be one of {named} with --with deepspeed: others are made by the training script"
        )
    if optimizer.implementation in ("transformers", "apex"):
        raise plan.wrong(
            "optimizer.implementation",
            "must be one that DeepSpeed makes, with --with deepspeed; others are made by the training script",
        )
    for name in ("offload_optimizer", "offload_param"):
        if getattr(plan.deepspeed, name) == "nvme":
            raise plan.wrong(
                f"deepspeed.{name}", "must be none or cpu with --with deepspeed: a run writes nothing to disks"
            )


def check_compiles(optimizer: Optimizer, device: str) -> None:
    """``LackingError`` where DeepSpeed's own kernels are neither installed nor can be compiled, as they are at their
    first use (``ops/op_builder/builder.py``, ``jit_load``)."""
    made = optimizer.algorithm.deepspeed
    kernel = made.kernel if made is not None and optimizer.implementation is None else None
    found = find_spec("deepspeed")
    if kernel is None or found is None or found.origin is None:
        return
    built = Path(found.origin).parent / "git_version_info_installed.py"
    if built.exists() and f"'{kernel}': True" in built.read_text():
        return
    missing = [tool for tool in ("ninja", "c++") if which(tool) is None]
    if device == "cuda" and which("nvcc") is None and "CUDA_HOME" not in os.environ:
        missing.append("nvcc")
    if missing:
        others = "with --optimizer-implementation foreach PyTorch's runs, and is estimated as what it is"
        raise LackingError(
            f"DeepSpeed compiles its optimizer for {optimizer.name} at its first use, which needs "
            f"{' and '.join(missing)} on the path (pip install ninja); {others}"
        )


def _explicit(config: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """PyTorch's optimizers take several tensors at once by default on CUDA alone, and here on any device."""
    section, made = config.get("optimizer"), optimizer.algorithm.deepspeed
    own = made is not None and made.kernel is not None and optimizer.implementation is None
    if section is None or own or optimizer.implementation == "fused":
        return config
    several = (optimizer.implementation or optimizer.algorithm.torch_default) == "foreach"
    return {**config, "optimizer": {**section, "params": {**section.get("params", {}), "foreach": several}}}


class DeepspeedCode(OwnCode):
    """DeepSpeed's engine."""

    title = "DeepSpeed's code"

    def planned(self, plan: ResolvedPlan) -> Native:
        return with_deepspeed(plan)

    def layout(self, plan: ResolvedPlan) -> Native:
        return WithDeepspeed(plan, plan)

    def runner(self) -> Runner:
        return cast("Runner", import_module(".engine_training", __package__))


class DeepspeedRunning(OtherRunning):
    learns = True

    def check_learnt(self, plan: ResolvedPlan) -> None:
        problem = "not modelled for an architecture without a recipe"
        trainer.check_learnt(plan)
        if is_tuned(plan) and plan.lora.rank is None:
            raise plan.wrong(first_frozen(plan), f"must be left out: frozen parts are {problem} under deepspeed")
        check_adapters(plan, zero_of(plan))

    def learnt_alone(self, plan: ResolvedPlan) -> ResolvedPlan:
        """The engine casts adapters to the dtype of training (``engine.cast_tuning``)."""
        return in_compute(plan)

    def learnt_zero(self, plan: ResolvedPlan, zero: tuple[int, ...]) -> tuple[int, ...]:
        """Stage 3 where traces say when its hooks run, which few have."""
        there = plan.model_copy(update={"layout": plan.layout.model_copy(update={"zero": 3})})
        try:
            found = not learned.lacks(there, fit_of(there))
        except PlanError:
            found = False
        return tuple(stage for stage in zero if stage < 3 or found)

    def learnt_gathers(self, plan: ResolvedPlan) -> bool:
        return plan.layout.zero == 3

    def learnt_work(self, plan: ResolvedPlan) -> bool:
        from ..plain.timing import has_work

        return has_work(plan)

    def lacks(self, plan: ResolvedPlan, fit: Fit) -> str:
        return learned.lacks(plan, fit)

    def learnt_program(self, plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
        return learned.learnt_program(plan, fit, options)

    def learnt_programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        return learnt_programs(plan, options)

    def learnt_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return (*notices.assumptions(plan), *assumptions(plan))

    @property
    def own_code(self) -> OwnCode:
        return DeepspeedCode()
