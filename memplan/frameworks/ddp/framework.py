"""``ddp``: PyTorch's DistributedDataParallel."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ..base import PYTORCH_SECTIONS, Framework, Supports

if TYPE_CHECKING:
    from ...layers.module import Options
    from ...plan.resolved import ResolvedPlan
    from ...search.framework import FrameworkSearch
    from ...search.time.framework import FrameworkTime
    from ...tape.program import Program
    from ...trace.framework import FrameworkRunning
    from ..base import Communicator


class Ddp(Framework):
    name = "ddp"
    supports = Supports(
        sizes=frozenset({"dp"}),
        zero=(0, 1),
        sections=(*PYTORCH_SECTIONS, "ddp"),
        compiled="",
        compiled_parts=True,
        losses=("plain", "liger", "cut", "liger-cross-entropy", "unsloth"),
        losses_refused={"chunked": "chunks run backward within forward, where DDP's hooks fire too early"},
    )

    def check(self, plan: ResolvedPlan) -> None:
        if plan.quantisation.kind == "awq" and plan.ddp.broadcast_buffers:
            raise plan.wrong(
                "ddp.broadcast_buffers",
                "must be false with quantisation.kind awq: its weights are buffers, and their broadcast is not "
                "modelled",
            )

    def communicators(self, plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
        """One process group for all: buckets are all-reduced, parameters broadcast when the model is wrapped."""
        from ..base import world

        return (world(plan.hardware.gpus)._replace(gathers=True, few_bytes=False),) if plan.hardware.gpus > 1 else ()

    def layout_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        from .notices import assumptions

        return assumptions(plan)

    def programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        from . import programs

        return programs.programs(plan, options)

    @cached_property
    def search(self) -> FrameworkSearch:
        from .searching import DdpSearch

        return DdpSearch()

    @cached_property
    def running(self) -> FrameworkRunning:
        from .running import DdpRunning

        return DdpRunning()

    @cached_property
    def time(self) -> FrameworkTime:
        from .timing import DdpTime

        return DdpTime()


FRAMEWORK = Ddp()
