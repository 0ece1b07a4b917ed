"""Plain PyTorch as it runs here, and its programs of architectures without a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers.module import Options
from ...plan.plan import ResolvedPlan
from ...tape.events import Hold
from ...tape.program import Program, Span
from ...trace.fit import Fit
from ...trace.framework import FrameworkRunning, OtherRunning
from ...trace.learned import assumptions, learnt_programs
from . import trainer
from .learned import program_of


class PlainRunning(FrameworkRunning):
    learns = True

    def check_learnt(self, plan: ResolvedPlan) -> None:
        if plan.compile:
            raise plan.wrong("compile", "must be false of an architecture without a recipe: not modelled")
        trainer.check_learnt(plan)
        if plan.layout.zero:
            raise plan.wrong("layout.zero", "must be 0: not modelled for an architecture without a recipe")

    def learnt_zero(self, plan: ResolvedPlan, zero: tuple[int, ...]) -> tuple[int, ...]:
        return (0,)

    def learnt_work(self, plan: ResolvedPlan) -> bool:
        from .timing import has_work

        return has_work(plan)

    def learnt_program(self, plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
        return program_of(plan, fit, options, self.learnt_front, self.learnt_buckets)

    def learnt_programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        return learnt_programs(plan, options)

    def learnt_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        return assumptions(plan)

    def learnt_front(self, plan: ResolvedPlan, buffers: Sequence[Hold]) -> tuple[Span, ...]:
        """What runs in front of every forward pass of the model with ``buffers``."""
        return ()

    def learnt_buckets(self, plan: ResolvedPlan, ready: tuple[int, ...]) -> tuple[Hold, ...]:
        """What is kept of gradients besides: ``ready`` are their bytes in the order in which they are ready, not
        rounded."""
        return ()


class DeviceMapRunning(OtherRunning):
    nothing_traced = (
        "layers on several CUDA devices are not traced, since autograd over fake tensors of such devices ends a "
        "process whose PyTorch has no CUDA"
    )
    nothing_like_it = "one process on several GPUs is not"
