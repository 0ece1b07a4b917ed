"""A launch file as a plan with flags over it: what follows from both is filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .read import Flags, ReadPlan, build_plan

if TYPE_CHECKING:
    from .launch import Launch


def launched_plan(launch: Launch, flags: Flags) -> ReadPlan:
    """The plan of ``launch`` with ``flags`` over it."""
    return completed(launch, build_plan(launch.source, flags))


def completed(launch: Launch, read: ReadPlan) -> ReadPlan:
    """``read``, with what there is to say about the arguments that it was made from.

    A global batch size that the file leaves to Megatron (or DeepSpeed) follows the sizes that flags have changed.
    """
    if launch.config is not None:
        from .launch.ds_config import with_batch

        read = with_batch(read, launch.config)
    if launch.finish is not None:
        read = launch.finish(read)
    plan, origin = read.plan, launch.one_microbatch
    if origin is not None and read.origins.get("batch.gbs") is origin and plan.hardware.gpus is not None:
        layout, mbs = plan.layout, plan.batch.mbs
        dp = layout.dp or max(plan.hardware.gpus // (layout.tp * layout.pp * layout.cp), 1)
        plan = plan.model_copy(update={"batch": plan.batch.model_copy(update={"gbs": mbs * dp})})
    return ReadPlan(plan, read.origins, (*launch.notes, *read.warnings), launch.assumptions)
