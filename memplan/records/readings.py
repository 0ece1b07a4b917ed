"""What a run measured, as it is written to files, kept as a record and shown: all in bytes, nothing guessed.

``None`` is what could not be measured where it ran: a CPU has no allocator statistics, one GPU that plays a rank of
many no NCCL buffers.

The estimate within a record: what of its JSON is read back, and everything else as it was written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

World = Literal["real", "emulated", "fake"]
"""``real``: as many processes as ranks, and a process group of theirs. ``emulated``: one rank after the other, alone on
a real device with torch's fake process group. ``fake``: emulated, on fake tensors."""
Code = Literal["torch", "megatron", "deepspeed"]
"""Whose code ran: torch's own, or a framework's."""

LARGEST_NUMBER = 2**63 - 1
"""Whole numbers in a record are at most so far from 0: no size is larger, and what works with them may rely on it."""
Number = Annotated[int, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")  # a loss can be NaN


class Moment(_Data):
    """One part of a run; the peaks are of its own, not of what came before."""

    name: str
    """``initialisation``, ``forward``, ``backward`` (both of a pipeline: ``passes``), ``step`` (all of a measured
    iteration: ``iteration``), or ``evaluation``; ``between``: what a schedule does between passes."""
    requested: Count | None = None
    """Peak of requested bytes: of storages, each rounded up to 512, on any device; ``requested_bytes.all.peak`` of the
    allocator's statistics are not rounded, and so not this."""
    allocated: Count | None = None
    """``torch.cuda.max_memory_allocated``."""
    reserved: Count | None = None
    """``torch.cuda.max_memory_reserved``."""
    end: Count | None = None
    """Allocated bytes (of a CPU: requested) when it ended."""


class Place(_Data):
    """An entry of the layer list in one pass, where measured and estimated can be compared."""

    entry: str
    phase: str
    microbatch: Number
    net: Number
    peak: Number
    """The excursion: bytes that stay, and bytes above where it began."""
    estimated_net: Number | None
    estimated_peak: Number | None


class RankReading(_Data):
    """One rank of a run."""

    rank: Count
    stage: Count
    host: str
    device: str
    """``cpu``, or the name that the driver gives the GPU."""
    parameters: Count
    """Elements of its stage's model, before they are sharded."""
    requested: Number | None
    """Peak of an iteration in steady state, as ``Moment`` has them."""
    allocated: Number | None
    reserved: Number | None
    device_bytes: Number | None
    """Of the whole device, from NVML, while the run's own process is the only one on it."""
    static: Number | None
    """Between iterations."""
    context: Number | None = None
    """CUDA context: the device's bytes without those reserved, before any communicator exists; at the end, with the
    kernels that were loaded meanwhile, where none ever does."""
    nccl: Number | None = None
    """What the device's bytes grew by, without reserved ones, from then to the end of the run."""
    workspaces: Number | None = None
    """cuBLAS's, which ``allocated`` holds."""
    moments: tuple[Moment, ...] = ()
    breakdown: dict[str, Number] = {}
    """By category, at the peak of ``requested``."""
    seconds: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """Of each measured iteration."""
    losses: tuple[float, ...] = ()
    """Of every iteration from the first on, warm-up included; empty on ranks without the loss."""
    apart: Place | None = None
    """The first place where measured and estimated part ways."""


class Failure(_Data):
    """Why a rank ended early."""

    rank: Number | None
    kind: Literal["out-of-memory", "error", "died", "timeout", "interrupted"]
    message: str
    """One line."""
    when: str = ""
    """What it was doing: phase, micro-batch and module."""
    allocated: Number | None = None
    reserved: Number | None = None
    failing: Number | None = None
    """Bytes of the request that failed."""
    lines: tuple[str, ...] = ()
    """The last that it printed."""


class Versions(_Data):
    """What a measurement depends on."""

    memplan: str
    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    others: dict[str, str] = {}
    """transformers, bitsandbytes, megatron-core, deepspeed, where they took part."""


class Run(_Data):
    """All of a run's measurements."""

    world: World
    code: Code
    device: Literal["cuda", "cpu", "fake"]
    gpu: str | None
    """The name in memplan's table of GPUs, where the device is one of it."""
    versions: Versions
    ranks: tuple[RankReading, ...]
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    """What is to be known of the readings: what they lack, or have besides."""


class _Part(BaseModel):
    """Fields that are read here are checked; others are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Model(_Part):
    name: str


class Hardware(_Part):
    gpu: str | None = None
    gpus: Positive | None = None
    gpus_per_node: Positive = 8


class Batch(_Part):
    mbs: Positive = 1
    gbs: Number | None = None
    seq: Number | None = None


class Precision(_Part):
    dtype: str = "bf16"


class Optimizer(_Part):
    name: str = "adamw"


class Plan(_Part):
    """A plan of whatever memplan wrote it: today's may know other fields and refuse it."""

    model: Model
    framework: str
    hardware: Hardware = Hardware()
    layout: dict[str, Number | bool | None] = {}
    batch: Batch = Batch()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    environment: dict[str, str] = {}


class Stage(_Part):
    """One of ``stages``; sizes in bytes."""

    stage: Count
    requested_bytes: Count
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    device_bytes: Count | None = None
    breakdown: dict[str, Number] = {}
    beyond_allocated: dict[str, Number | None] = {}


class Estimated(_Part):
    """What ``memplan estimate --json`` prints of the code that ran."""

    schema_: Literal[1] = Field(alias="schema")
    memplan: str
    plan: Plan
    stages: tuple[Stage, ...] = Field(min_length=1)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def of(self, stage: int) -> Stage | None:
        return next((one for one in self.stages if one.stage == stage), None)
