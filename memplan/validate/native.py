"""A plan as torch's own code runs it: the plan that a native run measures, and is estimated for.

``single``, ``ddp`` and ``fsdp`` run as they are. Plans of other frameworks run in the shape of theirs that torch has
(tensor and pipeline parallelism as torchtitan has them, shards of ``fully_shard`` for ZeRO), and what is measured is
compared with the estimate of that, never with the framework's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ..estimate import programs_of
from ..frameworks import framework, frameworks
from ..layers.coverage import applying
from ..layers.module import Options
from ..plan.errors import PlanError
from ..plan.framework_sections import Fsdp
from ..plan.plan import Layout, Loss, Optimizer, Pipeline, Plan, Precision, Recompute, ResolvedPlan
from ..plan.resolve import resolve
from ..plan.section import Section
from ..records.readings import Code, World
from ..trace.recording import Traced
from ..values import dataclass

if TYPE_CHECKING:
    from ..trace.surroundings import Surroundings

from ..tape.program import Program
from ..trace.framework import job_of_plan
from ..trace.job import Job
from ..trace.run import check_packages, needed

ONE_DEVICE = "its tensors are all on one device, where offloaded ones cannot be told from others"
ZERO = {0: ("ddp", 0), 1: ("ddp", 1), 2: ("fsdp", 0), 3: ("fsdp", 0)}
"""Frameworks, and ZeRO stages in them, that keep what a ZeRO stage keeps."""


@dataclass(frozen=True, slots=True)
class Native:
    """What is run for a plan."""

    given: ResolvedPlan
    """Resolved, as the user has it."""
    runs: ResolvedPlan
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
        return framework(self.runs.framework).running.distinct(self.runs, self.ranks)

    @property
    def by_pass(self) -> bool:
        """Passes are compared as a whole, not entry by entry."""
        return False

    def check_device(self, device: str) -> None:
        """``PlanError`` where ``device``, ``cuda``, ``cpu`` or ``fake``, cannot run it, ``LackingError`` where kernels
        are missing there."""
        if device != "cuda" and self.runs.fsdp.offload:
            raise PlanError("fsdp.offload", True, f"must be false with --device {device}: {ONE_DEVICE}")

    def check_packages(self) -> None:
        """``LackingError`` where a package is missing, or older than what runs."""
        check_packages(needed(self.job(0)), "memplan validate")

    @property
    def packages(self) -> tuple[str, ...]:
        """Those that take part, torch apart, whose versions a record names where they are installed."""
        return tuple(name for name in needed(self.job(0)) if name != "torch")

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
        return job_of_plan(self.runs, stage=self.stage_of(rank))


def native(plan: ResolvedPlan) -> Native:
    """What torch's code runs for ``plan``. ``PlanError`` where it has nothing of the kind."""
    given = resolve(plan)
    runs, differs = (given, "") if framework(given.framework).running.runs else _translated(given)
    _check(runs)
    found = Native(given, runs, differs)
    found.job(0)
    return found


def _check(plan: ResolvedPlan) -> None:
    if plan.trainer.loop != "none":
        raise plan.wrong(
            "trainer.loop", "must be none: a validation has a loop of its own; memplan trace follows the Trainer's step"
        )


def _translated(plan: ResolvedPlan) -> tuple[ResolvedPlan, str]:
    """A plan of another framework in the nearest shape that torch has."""
    nothing = framework(plan.framework).running.nothing_like_it
    if nothing:
        named = ", ".join(one.name for one in frameworks() if one.running.runs)
        raise plan.wrong("framework", f"must be one of {named}, or one that these can stand for: {nothing}")
    if plan.lora.rank is not None:
        problem = f"is not run in place of {plan.framework}, whose modules adapters name: --framework ddp has its own"
        raise plan.wrong("lora.rank", problem)
    layout, changes = plan.layout, dict[str, Any]()
    parallel = layout.tp > 1 or layout.pp > 1
    if layout.cp > 1 or layout.ep > 1:
        name = "cp" if layout.cp > 1 else "ep"
        raise plan.wrong(f"layout.{name}", "must be 1: torch-native code has data, tensor and pipeline parallelism")
    if parallel:
        _check_llama(plan)
        name, zero = "fsdp", 0
        changes["fsdp"] = Fsdp(code="torchtitan", reshard_after_forward=layout.pp == 1)
        changes["pipeline"] = Pipeline(schedule=plan.pipeline.schedule)
        shape = f"torchtitan's Llama with tp {layout.tp} and pp {layout.pp} under fully_shard"
    else:
        name, zero = ZERO[layout.zero]
        changes["pipeline"] = Pipeline()
        if layout.zero > 1:
            changes["fsdp"] = Fsdp(reshard_after_forward=layout.zero == 3)
        shape = {("ddp", 0): "DistributedDataParallel", ("ddp", 1): "DDP and ZeroRedundancyOptimizer"}.get(
            (name, zero), "fully_shard"
        )
    whole = "full" if plan.recompute.mode == "full" else "none"
    sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "dp": layout.dp, "zero": zero}
    steps = plan.optimizer.name if plan.optimizer.name in ("sgd", "adam", "adamw") else "adamw"
    optimizer: dict[str, Any] = {"name": steps, "momentum": plan.optimizer.momentum if steps == "sgd" else 0.0}
    given = plan.model_copy(
        update={
            "framework": name,
            "layout": _new(Layout, sizes),
            "precision": Precision(dtype=plan.precision.dtype),
            "optimizer": _new(Optimizer, optimizer),
            "recompute": Recompute(mode=whole),
            "loss": Loss(),
            "attention": None if parallel else plan.attention,
            "code": "current",
            "torch": None,
            **{section: _default(section) for one in frameworks() for section in one.supports.sections},
            **changes,
        }
    )
    runs = resolve(given)
    shape = ", ".join((shape, *_other_choices(plan, runs)))
    return runs, (
        f"torch-native code runs in place of {plan.framework}: {shape}; what it measures says nothing of what "
        f"memplan estimates for {plan.framework}"
    )


def _other_choices(plan: ResolvedPlan, runs: ResolvedPlan) -> Iterator[str]:
    """What of ``plan`` torch's code has not, beside what a framework is."""
    yield from applying(
        (runs.optimizer.name != plan.optimizer.name, f"with {runs.optimizer.name} in place of {plan.optimizer.name}"),
        (runs.recompute.mode != plan.recompute.mode, "without selective recompute"),
        (runs.loss.kind != plan.loss.kind, f"with the {runs.loss.kind} loss in place of {plan.loss.kind}"),
        (runs.kernels != plan.kernels, "with transformers' own operators in place of kernels"),
        (plan.pipeline != Pipeline(schedule=plan.pipeline.schedule), "in stages as torchtitan cuts them"),
        ((plan.deepspeed.offload_optimizer, plan.deepspeed.offload_param) != ("none", "none"), "without offload"),
        (plan.optimizer.precision_aware, "with states of the parameters' dtype or fp32"),
        (runs.attention != plan.attention, f"with {runs.attention} attention in place of {plan.attention}"),
        (runs.precision.gradients != plan.precision.gradients, "with gradients accumulated as torch does"),
    )


def _default(section: str) -> object:
    return Plan.model_fields[section].get_default(call_default_factory=True)


def _new(kind: type[Section], values: dict[str, Any]) -> Section:
    return kind.model_validate(values)


def _check_llama(plan: ResolvedPlan) -> None:
    if plan.model.family != "llama":
        raise plan.wrong(
            "model.family",
            "must be llama for torch-native code with tensor or pipeline parallelism, which is torchtitan's; "
            "other families run with tp 1 and pp 1",
        )


class Runner(Protocol):
    """A framework's own code in a worker."""

    def training_of(self, plan: ResolvedPlan, rank: int, within: Surroundings) -> AbstractContextManager[Any]:
        """The plan's model on ``rank``, with its optimizer, before the first iteration."""
        ...

    def followed(self, plan: ResolvedPlan, rank: int, program: Program, within: Surroundings) -> Traced:
        """An iteration event by event, behind those that warm up."""
        ...


class OwnCode:
    """Code that ``--with`` names; this one is torch's own."""

    title = "PyTorch's code"

    def planned(self, plan: ResolvedPlan) -> Native:
        """What it runs for a plan. ``PlanError`` where it has nothing of the kind."""
        return native(plan)

    def layout(self, plan: ResolvedPlan) -> Native:
        """Which rank is of which stage, of a plan as it runs."""
        return Native(plan, plan)

    def runner(self) -> Runner | None:
        """What runs it in a worker; ``None``: torch's own code."""
        return None


def own_code(code: Code) -> OwnCode:
    """Other code than torch's is of the framework whose name it has."""
    found = None if code == "torch" else framework(code).running.own_code
    return found or OwnCode()


def planned(code: Code, plan: ResolvedPlan, device: str) -> Native:
    """What ``code`` runs for ``plan`` on ``device``. ``PlanError`` where it has nothing of the kind, ``LackingError``
    where it is not installed."""
    found = own_code(code).planned(plan)
    found.check_device(device)
    found.check_packages()
    return found
