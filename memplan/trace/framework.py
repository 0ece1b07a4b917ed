"""What a trace and a validation ask of a framework: what runs for its plans here, with torch's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..frameworks import framework, frameworks
from ..plan.checks import listed
from ..plan.plan import Plan, ResolvedPlan
from ..plan.traced_spec import TracedSpec
from .job import Job, Replicated, Sharded, check_stage, transformers_job

if TYPE_CHECKING:
    from ..layers.module import Options
    from ..tape.program import Program
    from ..validate.native import OwnCode
    from .fit import Fit


class FrameworkRunning:
    """A framework that is torch's own code: plain PyTorch in one process. Plans are resolved."""

    runs = True
    """Its plans run, and are traced, as they are."""
    nothing_like_it = ""
    """Of one whose plans do not run: why torch's code has nothing of the kind either."""
    learns = False
    """Architectures without a recipe are estimated under it, from traces."""
    casts = False
    """Its layers cast what they are handed to the dtype of compute."""

    @property
    def own_code(self) -> OwnCode | None:
        """Its code that ``memplan validate --with`` runs, where that is other code than torch's."""
        return None

    def check(self, plan: ResolvedPlan) -> None:
        """``PlanError`` of what a trace cannot follow of this framework."""

    def runs_transformers(self, plan: Plan) -> bool:
        """Whether the modules are transformers', and not code of the framework's own."""
        return True

    def sharded(self, plan: ResolvedPlan) -> Sharded | None:
        """``fully_shard`` around the model."""
        return None

    def replicated(self, plan: ResolvedPlan, *, has_recipe: bool) -> Replicated | None:
        """``DistributedDataParallel`` around the model."""
        return None

    def job(self, plan: ResolvedPlan, stage: int = 0, config: dict[str, object] | None = None) -> Job:
        """The step of the first rank of ``stage``; ``config`` is in place of the model's, which has no recipe then."""
        check_stage(stage, 1)
        self.check(plan)
        replicated = self.replicated(plan, has_recipe=config is None)
        return transformers_job(plan, config, fsdp=self.sharded(plan), ddp=replicated)

    def distinct(self, plan: ResolvedPlan, ranks: int) -> tuple[int, ...]:
        """One of ``ranks`` ranks of each stage, the one that needs most."""
        return tuple(range(0, ranks, ranks // plan.layout.pp))

    # -- an architecture without a recipe -----------------------------------------------------------

    def check_learnt(self, plan: ResolvedPlan) -> None:
        """Refuses what is not modelled of such an architecture, whatever was learnt of it."""
        named = listed([one.name for one in frameworks() if one.running.learns])
        problem = f"must be {named}: under others this architecture has no recipe"
        if isinstance(plan.model, TracedSpec):
            problem += f" ({plan.model.reason.partition('; known are')[0]})"
        raise plan.wrong("framework", problem)

    def learnt_zero(self, plan: ResolvedPlan, zero: tuple[int, ...]) -> tuple[int, ...]:
        """Of the ZeRO stages that it has, those that it has of the plan's architecture."""
        return zero

    def learnt_casts(self, plan: ResolvedPlan) -> bool:
        """``casts``, of a plan of such an architecture."""
        return self.casts

    def learnt_gathers(self, plan: ResolvedPlan) -> bool:
        """Hooks of modules gather parameters: a plan of such an architecture needs to know where they run."""
        return False

    def learnt_alone(self, plan: ResolvedPlan) -> ResolvedPlan:
        """``plan`` with dtypes as its passes meet them, which are what one device is traced with."""
        return plan

    def learnt_work(self, plan: ResolvedPlan) -> bool:
        """Whether what was learnt says what operators do, so that a step has a time."""
        return False

    def lacks(self, plan: ResolvedPlan, fit: Fit) -> str:
        """Why what was learnt does not serve this framework, whatever else the plan says; nothing where it does."""
        return ""

    def check_served(self, plan: ResolvedPlan) -> None:
        """Refuses what ``check_learnt`` does, and this framework where what was learnt does not serve it."""
        self.check_learnt(plan)

    def learnt_program(self, plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
        """What ``fit`` comes to under ``plan``."""
        raise NotImplementedError

    def learnt_programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        """The one program of a plan of a ``TracedSpec`` (``learned.learnt_programs`` where it ``learns``)."""
        self.check_learnt(plan)
        return ()

    def learnt_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        """What is taken for granted of the plan's traces."""
        return ()


class OtherRunning(FrameworkRunning):
    """A framework of other code, for which torch's own has a shape that is like it."""

    runs = False

    def check(self, plan: ResolvedPlan) -> None:
        named = ", ".join(one.name for one in frameworks() if one.running.runs)
        raise plan.wrong("framework", f"must be one of {named}: {self.nothing_traced}")

    nothing_traced = "others are not traced yet"
    """Why a trace does not follow it."""


def in_compute(plan: ResolvedPlan) -> ResolvedPlan:
    """``plan`` with adapters in the dtype of compute."""
    if plan.lora.dtype is None:
        return plan
    return plan.model_copy(update={"lora": plan.lora.model_copy(update={"dtype": plan.precision.dtype})})


def job_of_plan(plan: ResolvedPlan, config: dict[str, object] | None = None, stage: int = 0) -> Job:
    """The step of the first rank of ``stage`` of a resolved plan; ``config`` is in place of its model's. ``PlanError``
    where a trace cannot follow it yet."""
    return framework(plan.framework).running.job(plan, stage, config)
