"""What an estimate says: immutable values that reports print and JSON carries. All sizes in bytes."""

from __future__ import annotations

from dataclasses import field

from .plan.resolved import ResolvedPlan
from .tape.events import Bytes, Category, Event
from .values import dataclass


@dataclass(frozen=True, slots=True)
class Peak:
    """When and where a stage needs most."""

    moment: str
    """``steady`` (every headline is), ``initialisation``, ``evaluation`` or ``checkpoint``."""
    phase: str
    """``forward``, ``backward`` or ``step``."""
    module: str
    """Entry of the layer list, such as ``layer.1`` or ``head``; ``optimizer`` in a step."""
    tensor: str
    """The tensor whose arrival makes the peak, such as ``logits_fp32``."""
    microbatch: int | None
    upper_bound: bool = False


@dataclass(frozen=True, slots=True)
class BeyondAllocated:
    """What the device holds and PyTorch's ``memory_allocated`` does not show; ``None`` where not known."""

    allocator_cache: int | None
    cuda_context: int | None
    nccl: int | None
    other: int | None


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One pipeline stage (or device of a device map): its most loaded rank in steady state."""

    stage: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: int
    """Elements on one rank."""
    requested: int
    allocated: int | None
    reserved: int | None
    device: int | None
    static: int
    peak: Peak
    breakdown: Bytes
    """By category (``tape.events.Category``), summing to ``allocated`` (to ``requested`` where that is ``None``)."""
    beyond: BeyondAllocated
    moments: dict[str, int | None]
    """Peak of each moment: initialisation, steady, evaluation, checkpoint."""
    in_flight: int = 1
    """Micro-batches whose activations are alive at once."""
    host: int = 0
    """Bytes of host memory that the stage's ranks on one node take together."""
    nvme: int = 0
    """Bytes on NVMe, likewise."""

    @property
    def headline(self) -> int:
        """The furthest reading that could be derived: device, else reserved, allocated, requested."""
        for reading in (self.device, self.reserved, self.allocated):
            if reading is not None:
                return reading
        return self.requested

    def of(self, category: Category) -> int:
        return self.breakdown[category]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know: a stable ``code`` for scripts and a ``message`` that teaches."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer to ``memplan estimate``."""

    plan: ResolvedPlan
    """After every default was filled in."""
    fits: bool | None
    """``None`` where no GPU was named, so there is nothing to fit into."""
    capacity: int | None
    headroom: int
    stages: tuple[StageEstimate, ...]
    warnings: tuple[Notice, ...]
    assumptions: tuple[str, ...]

    @property
    def peak_stage(self) -> int:
        return max(range(len(self.stages)), key=lambda i: (self.stages[i].headline, -i))

    @property
    def peak(self) -> int:
        return self.stages[self.peak_stage].headline


@dataclass(frozen=True, slots=True)
class ModuleTape:
    """One module's events in one phase of one micro-batch, for ``--detail``."""

    module: str
    phase: str
    events: tuple[Event, ...] = field(repr=False)
