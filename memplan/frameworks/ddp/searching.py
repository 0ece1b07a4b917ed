"""``ddp`` in a search: every rank holds the whole model, so that what does not fit is for a framework that shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...plan.plan import ResolvedPlan
from ...search.framework import FrameworkSearch, Proposal
from .. import framework


class DdpSearch(FrameworkSearch):
    def elsewhere(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        """In the same mixed precision, as Accelerate starts the same script, with the loss of its trainer."""
        if plan.layout.dp == 1:
            return
        sharded = {"framework": "fsdp", "fsdp.parameters": plan.precision.stored, "layout.zero": 0}
        yield from _under(plan, "framework fsdp", sharded)
        for zero in (2, 3):
            stage = {"framework": "deepspeed", "layout.zero": zero, "optimizer.implementation": None}
            yield from _under(plan, f"framework deepspeed, ZeRO-{zero}", stage)


def _under(plan: ResolvedPlan, what: str, fields: Mapping[str, object]) -> Iterator[Proposal]:
    """A loss of its own, with its reference model, stays; nothing where it is not modelled. transformers' evaluation is
    not modelled there: one of more sequences than training has is left to other ways."""
    trainer: dict[str, object] = {}
    if plan.loop.own_loss:
        if plan.trainer.loop not in framework(str(fields["framework"])).supports.loops:
            return
    elif (plan.trainer.evaluation_mbs or 0) > plan.batch.mbs:
        return
    else:
        evaluated = 0 if plan.trainer.evaluation_mbs == 0 else None
        trainer = {"trainer.loop": "none", "trainer.evaluation_mbs": evaluated, "trainer.evaluation_batches": None}
    yield Proposal(what, {**fields, **trainer, "precision.autocast": False, "precision.parameters": None})
