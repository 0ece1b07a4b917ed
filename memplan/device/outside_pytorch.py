"""What driver and libraries take of a device: as this user's runs measured it, or as somebody has published it.

What nobody has measured is ``None``, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..allocator.replay import Replayed
from ..frameworks import framework
from ..plan.resolved import ResolvedPlan
from ..result import BeyondAllocated, Notice, StageEstimate
from ..tape.events import Category, Hold, rounded
from . import facts
from .measured import WORKSPACES, Measured, Measurement
from .workspaces import cublas_workspaces, torch_version


def beyond(plan: ResolvedPlan, replayed: Replayed, stage: int, known: Measured) -> BeyondAllocated:
    """Of a rank of ``stage`` of a resolved plan."""
    return BeyondAllocated(
        allocator_cache=replayed.reserved - replayed.allocated,
        cuda_context=context_bytes(plan, known),
        nccl=_nccl(plan, stage, known),
        other=0,
    )


def outside_range(apart: BeyondAllocated) -> tuple[int, int]:
    """The least and the most bytes of a device that lie outside PyTorch's allocator, without what nobody has measured.

    Today's figures are no ranges, so both are their sum.
    """
    known = sum(size for size in (apart.cuda_context, apart.nccl, apart.other) if size is not None)
    return known, known


def context_bytes(plan: ResolvedPlan, known: Measured) -> int | None:
    """Of a resolved plan: measured, else published."""
    found = known.context(plan) or _published_context(plan)
    return None if found is None else found.bytes


def least_context(plan: ResolvedPlan, known: Measured) -> int:
    """A bound from below of ``context_bytes``, whatever the plan's layout."""
    found = (*known.contexts(plan), _published_context(plan))
    return min((one.bytes for one in found if one is not None), default=0)


def _published_context(plan: ResolvedPlan) -> facts.Fact | None:
    if plan.hardware.gpu is None:
        return None
    return facts.cuda_context(plan.hardware.gpu, plan.environment, torch_version(plan))


def _nccl(plan: ResolvedPlan, stage: int, known: Measured) -> int | None:
    if _alone(plan):
        return 0
    measured = known.nccl(plan, stage)
    return None if measured is None else measured.bytes


def _alone(plan: ResolvedPlan) -> bool:
    return not framework(plan.framework).communicates(plan)


def held_workspaces(plan: ResolvedPlan, known: Measured) -> tuple[Hold, ...]:
    """``cublas_workspaces``, or as many bytes as were measured: in published blocks if these make it up."""
    published, measured = cublas_workspaces(plan), known.workspaces(plan)
    if measured is None:
        return published
    size = published[0].bytes if published else 0
    if size and measured.bytes % size == 0:
        return published[:1] * (measured.bytes // size)
    return (Hold(0, rounded(measured.bytes), Category.WORKSPACES, WORKSPACES),) if measured.bytes else ()


def reading_warnings(plan: ResolvedPlan, known: Measured, stages: Sequence[StageEstimate]) -> tuple[Notice, ...]:
    """What the device reading leaves out."""
    gpu = plan.hardware.gpu
    if gpu is None:
        return (Notice("no-gpu", "no GPU is named (--gpu): no capacity to compare with, no device reading"),)
    notices = []
    if context_bytes(plan, known) is None:
        notices.append(
            Notice("context-unknown", f"CUDA-context size unknown for {gpu}, so the device reading is unknown, too")
        )
    if any(stage.beyond.nccl is None for stage in stages):
        notices.append(
            Notice(
                "nccl-not-counted",
                "the device reading is a lower bound without NCCL's buffers, which depend on the topology "
                "(12 MiB per channel of each ring, several communicators); leave headroom for these buffers",
            )
        )
    return tuple(notices)


def reading_assumptions(plan: ResolvedPlan, known: Measured, stages: Sequence[StageEstimate]) -> tuple[str, ...]:
    """What was taken from the user's own runs, each with the published figure that it stands in for."""
    return tuple(_taken(plan, known, stages))


def _taken(plan: ResolvedPlan, known: Measured, stages: Sequence[StageEstimate]) -> Iterator[str]:
    context = known.context(plan)
    if context is not None:
        published = _published_context(plan)
        beside = (
            "none is published" if published is None else f"published: {_size(published.bytes)}, {published.source}"
        )
        yield f"CUDA context of {_size(context.bytes)} {context.source}; {beside}"
    buffers = [one for stage in stages if (one := known.nccl(plan, stage.stage)) is not None]
    if buffers and not _alone(plan):
        yield f"NCCL's buffers of {_range(buffers)} {buffers[0].source}, for this layout on as many GPUs and nodes"
    workspaces = known.workspaces(plan)
    if workspaces is not None:
        published_bytes = sum(hold.bytes for hold in cublas_workspaces(plan))
        beside = f"PyTorch's source: {_size(published_bytes)}"
        yield f"cuBLAS workspaces of {_size(workspaces.bytes)} {workspaces.source}; {beside}"


def _range(buffers: Sequence[Measurement]) -> str:
    sizes = [one.bytes for one in buffers]
    least, most = min(sizes), max(sizes)
    return _size(most) if least == most else f"{_size(least)} to {_size(most)}, stage by stage,"


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
