"""``ddp``: PyTorch's DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import PYTORCH_SECTIONS, Framework, Parts, Supports

if TYPE_CHECKING:
    from ...plan.plan import ResolvedPlan
    from ..base import Communicator


class Ddp(Framework):
    name = "ddp"
    parts = Parts(".searching:DdpSearch", ".timing:DdpTime", ".running:DdpRunning")
    supports = Supports(
        sizes=frozenset({"dp"}),
        zero=(0, 1),
        sections=(*PYTORCH_SECTIONS, "ddp"),
        compiled="",
        compiled_as="buckets",
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


FRAMEWORK = Ddp()
