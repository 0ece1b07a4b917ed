"""``ddp`` in a search: every rank holds the whole model, so that what does not fit is for a framework that shards."""

from __future__ import annotations

from collections.abc import Iterator

from ...plan.resolved import ResolvedPlan
from ...search.framework import FrameworkSearch, Proposal


class DdpSearch(FrameworkSearch):
    def elsewhere(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        """In the same mixed precision, as Accelerate starts the same script. Evaluation is not modelled there: one of
        more sequences than training has is left to other ways."""
        if plan.layout.dp == 1 or (plan.trainer.evaluation_mbs or 0) > plan.batch.mbs:
            return
        whole = {
            "trainer.loop": "none",
            "trainer.evaluation_mbs": None,
            "trainer.evaluation_batches": None,
            "precision.autocast": False,
            "precision.parameters": None,
        }
        sharded = {"framework": "fsdp", "fsdp.parameters": plan.precision.stored, "layout.zero": 0}
        yield Proposal("framework fsdp", {**sharded, **whole})
        for zero in (2, 3):
            stage = {"framework": "deepspeed", "layout.zero": zero, "optimizer.implementation": None}
            yield Proposal(f"framework deepspeed, ZeRO-{zero}", {**stage, **whole})
