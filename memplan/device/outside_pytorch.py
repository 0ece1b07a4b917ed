"""What driver and libraries take of a device: as this user's runs measured it, or as sources and published readings
say.

Of what nobody knows anything there is no cause, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..allocator.replay import Replayed
from ..frameworks import framework
from ..frameworks.communicators import Communicator
from ..plan.errors import PlanError
from ..plan.resolved import ResolvedPlan
from ..result import BeyondAllocated, Notice, StageEstimate
from ..tape.events import Category, Hold, rounded
from .contexts import context_causes
from .facts import Cause
from .gpus import GPUS
from .measured import WORKSPACES, Measured, Measurement
from .nccl import SOURCE, Nccl, fabric, version_of
from .workspaces import cublas_workspaces, torch_version


def causes(plan: ResolvedPlan, stage: int, known: Measured) -> tuple[Cause, ...]:
    """What a rank of ``stage`` of a resolved plan takes outside PyTorch's allocator: as it was measured here, else from
    published readings and sources. A part without a cause is not known."""
    return (*_context(plan, known), *_nccl(plan, stage, known), *framework(plan.framework).buffers_outside(plan))


def beyond(replayed: Replayed, outside: Sequence[Cause]) -> BeyondAllocated:
    """The middle of each part of ``outside``, and what the allocator keeps."""
    parts = {part: [one for one in outside if one.part == part] for part in ("cuda_context", "nccl")}
    sizes = {part: sum(one.least + one.most for one in found) // 2 if found else None for part, found in parts.items()}
    other = sum(one.most for one in outside if one.part == "other")
    return BeyondAllocated(replayed.reserved - replayed.allocated, sizes["cuda_context"], sizes["nccl"], other)


def outside_range(outside: Sequence[Cause]) -> tuple[int, int]:
    """The least and the most bytes of a device that lie outside PyTorch's allocator, without what is not known."""
    return sum(one.least for one in outside), sum(one.most for one in outside)


def all_known(outside: Sequence[Cause]) -> bool:
    """Whether ``outside`` says something of each part."""
    return {one.part for one in outside} >= {"cuda_context", "nccl"}


def least_context(plan: ResolvedPlan, known: Measured) -> int:
    """A bound from below of the context, whatever the plan's layout."""
    measured = [one.bytes for one in known.contexts(plan) if one is not None]
    published = sum(one.least for one in _published_context(plan))
    return min([*measured, published] if published else measured, default=0)


def _context(plan: ResolvedPlan, known: Measured) -> tuple[Cause, ...]:
    found = known.context(plan)
    if found is not None:
        return (Cause("cuda_context", "CUDA context", found.bytes, found.bytes, found.source),)
    return _published_context(plan)


def _published_context(plan: ResolvedPlan) -> tuple[Cause, ...]:
    gpu = plan.hardware.gpu
    return () if gpu is None else context_causes(gpu, plan.environment, torch_version(plan))


def _nccl(plan: ResolvedPlan, stage: int, known: Measured) -> tuple[Cause, ...]:
    """Of each communicator of a rank; nothing but 0 where there is none."""
    communicators = framework(plan.framework).communicators(plan, stage)
    if not communicators:
        return (Cause("nccl", "no communicator", 0, 0, ""),)
    measured = known.nccl(plan, stage)
    if measured is not None:
        return (Cause("nccl", "communicators", measured.bytes, measured.bytes, measured.source),)
    nccl = _release(plan)
    if nccl is None:
        return ()
    try:
        sizes = [(one, nccl.holds((one,))) for one in communicators]
    except ValueError as error:
        raise PlanError("environment", dict(plan.environment), str(error)) from None
    return tuple(Cause("nccl", _said(one), *size, SOURCE) for one, size in sizes)


def _release(plan: ResolvedPlan) -> Nccl | None:
    """The NCCL of a resolved plan; ``None`` without a GPU that runs it."""
    capability = None if plan.hardware.gpu is None else GPUS[plan.hardware.gpu].compute_capability
    if capability is None:
        return None
    per_node = min(plan.hardware.gpus_per_node, plan.hardware.gpus)
    links = fabric(capability, plan.hardware.gpus_per_node)
    return Nccl(version_of(torch_version(plan)), links, per_node, plan.environment)


def _said(one: Communicator) -> str:
    several = f"{one.times} x " if one.times > 1 else ""
    return f"{several}{one.name} ({one.ranks} ranks)" + ("" if one.certain else ", if it is used")


def held_workspaces(plan: ResolvedPlan, known: Measured) -> tuple[Hold, ...]:
    """``cublas_workspaces``, or as many bytes as were measured: in published blocks if these make it up."""
    published, measured = cublas_workspaces(plan), known.workspaces(plan)
    if measured is None:
        return published
    size = published[0].bytes if published else 0
    if size and measured.bytes % size == 0:
        return published[:1] * (measured.bytes // size)
    return (Hold(0, rounded(measured.bytes), Category.WORKSPACES, WORKSPACES),) if measured.bytes else ()


def reading_warnings(plan: ResolvedPlan, stages: Sequence[StageEstimate]) -> tuple[Notice, ...]:
    """What the device reading leaves out."""
    gpu = plan.hardware.gpu
    if gpu is None:
        return (Notice("no-gpu", "no GPU is named (--gpu): no capacity to compare with, no device reading"),)
    notices = []
    if any(stage.beyond.cuda_context is None for stage in stages):
        notices.append(
            Notice("context-unknown", f"CUDA-context size unknown for {gpu}, so the device reading is unknown, too")
        )
    if any(stage.beyond.nccl is None for stage in stages):
        notices.append(Notice("nccl-not-counted", f"what communicators take on {gpu} is not known, and not counted"))
    return tuple(notices)


def taken_assumptions(plan: ResolvedPlan, known: Measured, stages: Sequence[StageEstimate]) -> tuple[str, ...]:
    """What was taken from the user's own runs, each with the published figure that it stands in for."""
    return tuple(_taken(plan, known, stages))


def outside_assumptions(plan: ResolvedPlan, stages: Sequence[StageEstimate]) -> tuple[str, ...]:
    """What the device reading rests on besides."""
    most = max(stages, key=lambda stage: stage.beyond.nccl or 0)
    lines = [f"{one.name} of {_span([one])}: {one.source}" for one in _published_context(plan) if one in most.outside]
    communicators = [one for one in most.outside if one.source == SOURCE]
    return (*lines, _of_nccl(plan, most.stage, communicators)) if communicators else tuple(lines)


def _taken(plan: ResolvedPlan, known: Measured, stages: Sequence[StageEstimate]) -> Iterator[str]:
    context = known.context(plan)
    if context is not None:
        published = _published_context(plan)
        beside = f"published: {_span(published)}" if published else "none is published"
        yield f"CUDA context of {_size(context.bytes)} {context.source}; {beside}"
    buffers = [one for stage in stages if (one := known.nccl(plan, stage.stage)) is not None]
    if buffers and any(stage.beyond.nccl for stage in stages):
        yield f"NCCL's buffers of {_range(buffers)} {buffers[0].source}, for this layout on as many GPUs and nodes"
    workspaces = known.workspaces(plan)
    if workspaces is not None:
        published_bytes = sum(hold.bytes for hold in cublas_workspaces(plan))
        beside = f"PyTorch's source: {_size(published_bytes)}"
        yield f"cuBLAS workspaces of {_size(workspaces.bytes)} {workspaces.source}; {beside}"


def _of_nccl(plan: ResolvedPlan, stage: int, found: Sequence[Cause]) -> str:
    """Communicators of a stage, with the release and the machine that their sizes are of."""
    release = _release(plan)
    assert release is not None
    each = ", ".join(f"{one.name} {_span([one])}" for one in found)
    links = "NVLink" if release.fabric.nvlink else "PCIe"
    version = ".".join(map(str, release.version))
    return (
        f"NCCL {version} of torch {plan.torch}, nodes of {plan.hardware.gpus_per_node} GPUs with {links}; "
        f"communicators of stage {stage}: {each}. At least: one algorithm, and network buffers in host memory; "
        f"at most: ring, tree and NVLink SHARP, and GPUDirect ({SOURCE})"
    )


def _span(found: Sequence[Cause]) -> str:
    least, most = outside_range(found)
    return f"{least / 2**20:,.0f} MiB" if least == most else f"{least / 2**20:,.0f} to {most / 2**20:,.0f} MiB"


def _range(buffers: Sequence[Measurement]) -> str:
    sizes = [one.bytes for one in buffers]
    least, most = min(sizes), max(sizes)
    return _size(most) if least == most else f"{_size(least)} to {_size(most)}, stage by stage,"


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
