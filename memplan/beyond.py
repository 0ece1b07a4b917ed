"""What driver and libraries take of a device: as this user's runs measured it, or as somebody has published it.

What nobody has measured is ``None``, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import facts
from .measured import WORKSPACES, Measured, Measurement
from .plan.plan import Plan
from .replay import Replayed
from .result import BeyondAllocated, Notice, StageEstimate
from .tape import Category, Hold, rounded
from .workspaces import cublas_workspaces, torch_version


def beyond(plan: Plan, replayed: Replayed, stage: int, known: Measured) -> BeyondAllocated:
    """Of a rank of ``stage`` of a resolved plan."""
    return BeyondAllocated(
        allocator_cache=replayed.reserved - replayed.allocated,
        cuda_context=context_bytes(plan, known),
        nccl=_nccl(plan, stage, known),
        other=0,
    )


def context_bytes(plan: Plan, known: Measured) -> int | None:
    """Of a resolved plan: measured, else published."""
    found = known.context(plan) or _published_context(plan)
    return None if found is None else found.bytes


def least_context(plan: Plan, known: Measured) -> int:
    """A bound from below of ``context_bytes``, whatever the plan's layout."""
    found = (*known.contexts(plan), _published_context(plan))
    return min((one.bytes for one in found if one is not None), default=0)


def _published_context(plan: Plan) -> facts.Fact | None:
    if plan.hardware.gpu is None:
        return None
    return facts.cuda_context(plan.hardware.gpu, plan.environment, torch_version(plan))


def _nccl(plan: Plan, stage: int, known: Measured) -> int | None:
    if _alone(plan):
        return 0
    measured = known.nccl(plan, stage)
    return None if measured is None else measured.bytes


def _alone(plan: Plan) -> bool:
    return plan.framework in ("single", "device-map") or plan.hardware.gpus == 1


def held_workspaces(plan: Plan, known: Measured) -> tuple[Hold, ...]:
    """``cublas_workspaces``, or as many bytes as were measured: in published blocks if these make it up."""
    published, measured = cublas_workspaces(plan), known.workspaces(plan)
    if measured is None:
        return published
    size = published[0].bytes if published else 0
    if size and measured.bytes % size == 0:
        return published[:1] * (measured.bytes // size)
    return (Hold(0, rounded(measured.bytes), Category.WORKSPACES, WORKSPACES),) if measured.bytes else ()


def reading_warnings(plan: Plan, known: Measured, stages: Sequence[StageEstimate]) -> tuple[Notice, ...]:
    """What the device reading leaves out."""
    gpu = plan.hardware.gpu
    if gpu is None:
        return (Notice("no-gpu", "no GPU is named (--gpu): there is nothing to fit into, and no device reading"),)
    notices = []
    if context_bytes(plan, known) is None:
        notices.append(
            Notice(
                "context-unknown", f"nobody has published the CUDA context of {gpu}: the device reading is not known"
            )
        )
    if any(stage.beyond.nccl is None for stage in stages):
        notices.append(
            Notice(
                "nccl-not-counted",
                "the device reading is a lower bound: NCCL's buffers are not in it; they depend on the topology "
                "(12 MiB a channel for each ring, several communicators); leave headroom for them",
            )
        )
    return tuple(notices)


def reading_assumptions(plan: Plan, known: Measured, stages: Sequence[StageEstimate]) -> tuple[str, ...]:
    """What was taken from the user's own runs, each with the published figure that it stands in for."""
    return tuple(_taken(plan, known, stages))


def _taken(plan: Plan, known: Measured, stages: Sequence[StageEstimate]) -> Iterator[str]:
    context = known.context(plan)
    if context is not None:
        published = _published_context(plan)
        beside = (
            "none is published" if published is None else f"published: {_size(published.bytes)}, {published.source}"
        )
        yield f"CUDA context of {_size(context.bytes)} {context.source}; {beside}"
    buffers = [one for stage in stages if (one := known.nccl(plan, stage.stage)) is not None]
    if buffers and not _alone(plan):
        yield f"NCCL's buffers of {_range(buffers)} {buffers[0].source}, of this layout on as many GPUs and nodes"
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
