"""What this user's own runs measured of a GPU, where others have published something else, or nothing.

A measurement holds for the settings that it was taken under and for no others. What those are is said here, once, for
the run that was recorded and for the plan that is estimated.

What driver and libraries take of a device: as this user's runs measured it, or as sources and published readings
say.

Of what nobody knows anything there is no cause, and the report says so.

Which PyTorch a plan runs on, and what its cuBLAS takes from the caching allocator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from ..allocator.replay import Replayed
from ..frameworks import ROOMS, framework
from ..frameworks.base import Communicator
from ..plan.plan import ResolvedPlan
from ..result import BeyondAllocated, Notice, StageEstimate
from ..tape.events import Category, Hold, rounded
from ..values import NamedTuple, dataclass
from . import facts
from .contexts import context_causes, stream_causes, visiting_causes
from .facts import Cause, Version
from .gpus import GPUS
from .nccl import SOURCE, Nccl, fabric, version_of

THREADS = 2
"""Threads with a cuBLAS handle, and so a workspace, of their own: the main one, and autograd's for the device
(``CUDABlasHandlePool.cpp``, ``getCurrentCUDABlasHandle``: handles are reserved thread by thread)."""


def torch_version(plan: ResolvedPlan) -> facts.Version:
    """Major and minor of the PyTorch that a resolved plan runs on."""
    major, minor, *_ = plan.torch.split(".") if plan.torch is not None else ("2", "13")
    return int(major), int(minor)


OLDEST_FIRST: Version = (2, 13)
"""PyTorch whose allocator takes, of free blocks of one size, the one in the oldest segment."""


def takes_oldest(plan: ResolvedPlan) -> bool:
    """Whether the allocator of a resolved plan's PyTorch goes by the age of segments, not by addresses."""
    return torch_version(plan) >= OLDEST_FIRST


def cublas_workspaces(plan: ResolvedPlan) -> tuple[Hold, ...]:
    """Workspaces of a training job whose products go through PyTorch, in forward and in backward."""
    if plan.hardware.gpu is None:
        return ()
    capability = GPUS[plan.hardware.gpu].compute_capability
    if capability is None:
        return ()
    try:
        found = facts.cublas_workspaces(capability, plan.environment, torch_version(plan))
    except ValueError as error:
        raise plan.wrong("environment", str(error)) from None
    times = THREADS, _threads_with_biases(plan)
    return tuple(
        Hold(0, rounded(fact.bytes), Category.WORKSPACES, fact.name)
        for fact, threads in zip(found, times, strict=False)
        for _ in range(threads)
        if fact.held and fact.bytes
    )


def _threads_with_biases(plan: ResolvedPlan) -> int:
    """Threads in which ``addmm`` fuses a bias, for which it calls cuBLASLt (``Blas.cpp``, ``addmm_out_cuda_impl``): the
    main one, and autograd's where it runs forward passes again."""
    model = plan.model
    biases = model.attention_bias, model.attention_output_bias, model.mlp_bias, model.head_bias
    if not any(biases) or not framework(plan.framework).fuses_biases(plan):
        return 0
    return THREADS if plan.recompute.mode == "full" else 1


CONTEXT, NCCL, WORKSPACES = "cuda_context", "nccl", "cublas_workspaces"
"""What is learned; nothing else has a name of its own in what a run measures."""
LARGEST = 1 << 40
"""Bytes: more than any device has."""


def code_of(name: str) -> str:
    """Whose code must have run for its measurements to hold for the framework ``name``, which a record of another
    release may have; nothing runs BigScience's of 2021."""
    return framework(name).measured_code if name in ROOMS else "torch"


def holds_workspaces(name: str) -> bool:
    """Whether recipes of the framework do; a record of another release may name one that this one has not."""
    return name in ROOMS and framework(name).holds_workspaces


def _own_streams(name: str) -> bool:
    return name in ROOMS and framework(name).own_streams


@dataclass(frozen=True, slots=True)
class Measurement:
    """One size, and when and by which run it was measured."""

    name: str
    gpu: str
    """As ``memplan gpus`` names it."""
    setting: str
    """What must be the same for it to hold (``setting``)."""
    stage: int | None
    bytes: int
    time: str
    """UTC, as 2026-11-21T20:15:03Z."""
    run: str
    versions: str
    """``torch 2.13.0+cu130, driver 590.48.01``."""
    imported: bool = False
    """By somebody else, or on another machine: what was measured here comes first."""

    @property
    def source(self) -> str:
        where = "imported run" if self.imported else "run"
        return f"as measured on {self.time[:10]} by {where} {self.run} ({self.versions})"


@dataclass(frozen=True)
class Measured:
    """All that holds for some plan or other: the newest of each kind, what ran here before what was imported."""

    measurements: tuple[Measurement, ...] = ()
    _by_key: Mapping[tuple[str, str, str, int | None], Measurement] = field(init=False, repr=False, compare=False)
    _kinds: frozenset[tuple[str, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_age = sorted(self.measurements, key=lambda one: (not one.imported, one.time, one.run))
        by_key = {(one.name, one.gpu, one.setting, one.stage): one for one in by_age}
        object.__setattr__(self, "_by_key", by_key)
        object.__setattr__(self, "_kinds", frozenset((one.name, one.gpu) for one in by_age))

    def context(self, plan: ResolvedPlan) -> Measurement | None:
        """Of a resolved plan: the CUDA context, and the kernels that were loaded by the time it was measured.

        Where communicators exist that is before they do, and kernels that are loaded later count as NCCL's: the two
        belong together. Elsewhere it is the whole run.
        """
        whole, early = self.contexts(plan)
        return early if self.nccl(plan, 0) is not None else whole or early

    def contexts(self, plan: ResolvedPlan) -> tuple[Measurement | None, Measurement | None]:
        """Of runs without communicators, and of runs before theirs."""
        return self._find(CONTEXT, plan), self._find(CONTEXT, plan, communicators=True)

    def nccl(self, plan: ResolvedPlan, stage: int) -> Measurement | None:
        """What communicators take on a rank of ``stage``, of the same layout on as many GPUs and nodes."""
        return self._find(NCCL, plan, stage)

    def workspaces(self, plan: ResolvedPlan) -> Measurement | None:
        """cuBLAS's on a rank, all together."""
        return self._find(WORKSPACES, plan)

    def _find(
        self, name: str, plan: ResolvedPlan, stage: int | None = None, *, communicators: bool = False
    ) -> Measurement | None:
        gpu = plan.hardware.gpu
        if gpu is None or (name, gpu) not in self._kinds:
            return None
        gpus = plan.hardware.gpus or 1
        nodes = -(-gpus // plan.hardware.gpus_per_node)
        ran = Ran(code_of(plan.framework), torch_version(plan), gpus, nodes, communicators)
        return self._by_key.get((name, gpu, setting(name, plan.model_dump(mode="json", include=_READ), ran), stage))


NOTHING = Measured()

_READ: Any = {
    "framework": True,
    "layout": True,
    "precision": True,
    "quantisation": True,
    "environment": True,
    "fsdp": {"replicas"},
    "model": {"family"},
}


class Ran(NamedTuple):
    """What a measurement depends on besides the plan."""

    code: str
    torch: Version
    gpus: int
    nodes: int
    communicators: bool
    """Were any made in the run?"""


def setting(name: str, plan: Mapping[str, Any], ran: Ran) -> str:
    """What the measurement ``name`` depends on besides the GPU, as text. ``plan``: a resolved one as JSON.

    The context: PyTorch's release, whose code, whether all kernels are loaded at the start, whether communicators
    were made in the run, and whether it had streams of its own. NCCL: the framework, the sizes of all groups, the
    machine, and NCCL's variables. cuBLAS: which products there are, and its variables.
    """
    environment = plan.get("environment") or {}
    own: dict[str, Any] = {
        "eager": environment.get("CUDA_MODULE_LOADING") == "EAGER",
        "communicators": ran.communicators,
        "streams": _own_streams(str(plan.get("framework"))),
    }
    if name == NCCL:
        own = {
            "framework": plan.get("framework"),
            "layout": plan.get("layout"),
            "replicas": (plan.get("fsdp") or {}).get("replicas"),
            "gpus": ran.gpus,
            "nodes": ran.nodes,
            "environment": _variables(environment, ("NCCL_", "TORCH_NCCL_")),
        }
    elif name == WORKSPACES:
        own = {
            "framework": plan.get("framework"),
            "family": (plan.get("model") or {}).get("family"),
            "precision": plan.get("precision"),
            "quantisation": plan.get("quantisation"),
            "environment": _variables(environment, ("CUBLAS", "TORCH_CUBLAS")),
        }
    return json.dumps({"code": ran.code, "torch": ran.torch, **own}, sort_keys=True)


def _variables(environment: Mapping[str, str], prefixes: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(tuple(prefixes))}


def causes(plan: ResolvedPlan, stage: int, known: Measured) -> tuple[Cause, ...]:
    """What a rank of ``stage`` of a resolved plan takes outside PyTorch's allocator: as it was measured here, else from
    published readings and sources. A part without a cause is not known."""
    return (
        *_context(plan, known),
        *_visiting(plan),
        *_nccl(plan, stage, known),
        *framework(plan.framework).buffers_outside(plan),
    )


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
    if gpu is None:
        return ()
    found = context_causes(gpu, plan.environment, torch_version(plan))
    return (*found, *_stream(plan, CONTEXT)) if framework(plan.framework).own_streams else found


def _stream(plan: ResolvedPlan, part: str) -> tuple[Cause, ...]:
    """The first stream besides the current one."""
    gpu = plan.hardware.gpu
    return () if gpu is None else stream_causes(gpu, part, plan.environment, torch_version(plan))


def _visiting(plan: ResolvedPlan) -> tuple[Cause, ...]:
    """Contexts of other ranks' processes."""
    gpu, processes = plan.hardware.gpu, framework(plan.framework).visiting_processes(plan)
    return () if gpu is None else visiting_causes(gpu, processes, plan.environment, torch_version(plan))


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
        raise plan.wrong("environment", str(error)) from None
    found = tuple(Cause(NCCL, _said(one), *size, SOURCE) for one, size in sizes)
    return found if framework(plan.framework).own_streams else (*found, *_stream(plan, NCCL))


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
    """``cublas_workspaces``, or as many bytes as were measured: in published blocks, and what is left (cuBLASLt's)."""
    published, measured = cublas_workspaces(plan), known.workspaces(plan)
    if measured is None:
        return published
    size = published[0].bytes if published else 0
    count, rest = divmod(measured.bytes, size) if size else (0, measured.bytes)
    left = (Hold(0, rounded(rest), Category.WORKSPACES, WORKSPACES),) if rest else ()
    return (*published[:1] * count, *left)


def reading_warnings(plan: ResolvedPlan, stages: Sequence[StageEstimate]) -> tuple[Notice, ...]:
    """What the device reading leaves out."""
    gpu = plan.hardware.gpu
    if gpu is None:
        return (
            Notice(
                "no-gpu",
                "no GPU is named, so memplan cannot say whether the plan fits or what the device shows; add --gpu",
            ),
        )
    notices = []
    if any(stage.beyond.cuda_context is None for stage in stages):
        notices.append(
            Notice(
                "context-unknown",
                f"the size of the context on {gpu} is not known, so the device reading is not known either",
            )
        )
    if any(stage.beyond.nccl is None for stage in stages):
        notices.append(
            Notice("nccl-not-counted", f"the memory of communicators on {gpu} is not known, and not counted")
        )
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
