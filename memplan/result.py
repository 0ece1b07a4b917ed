"""What an estimate says: immutable values that reports print and JSON carries. All sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import Enum

from .device.facts import Cause
from .plan.plan import ResolvedPlan
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
    """The middle of what each takes at least and at most (``StageEstimate.outside``)."""


class Verdict(Enum):
    """Whether a device's memory is enough, in every moment that a plan includes."""

    FITS = "fits"
    """At the high end of what lies outside PyTorch, without a retry."""
    RETRIES = "fits-with-retries"
    """There, too, but the allocator gives cached memory back and tries again."""
    TIGHT = "tight"
    """Only where less lies outside PyTorch."""
    UNKNOWN = "unknown"
    """No GPU is named, or what lies outside PyTorch is not known."""
    DOES_NOT_FIT = "does-not-fit"
    """A request fails."""

    @property
    def fits(self) -> bool | None:
        return None if self is Verdict.UNKNOWN else self is not Verdict.DOES_NOT_FIT

    @property
    def is_short(self) -> bool:
        """Something that needs less would run better, or at all."""
        return self in (Verdict.RETRIES, Verdict.TIGHT, Verdict.DOES_NOT_FIT)


@dataclass(frozen=True, slots=True)
class Failure:
    """The request with which a rank runs out of memory. Sizes in bytes."""

    moment: str
    """``initialisation``, ``evaluation``, ``checkpoint``, or ``steady`` for an iteration."""
    phase: str
    """``forward``, ``backward`` or ``step``; empty in ``initialisation``."""
    module: str
    tensor: str
    """Both empty where only the sum of a moment is known;"""
    microbatch: int | None
    request: int
    """and this and ``tried`` 0. What the tensor needs, rounded to 512 B."""
    tried: int
    """The segment for which the allocator asked the device."""
    allocated: int
    reserved: int
    iteration: int = 0
    """Counted from 1; 0 where it is none."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one stage's most loaded rank, or on several."""

    verdict: Verdict = Verdict.UNKNOWN
    retries: int = 0
    """``num_alloc_retries`` through the first iteration with optimizer states;"""
    retries_in_iteration: int = 0
    """and, at most, of an iteration that comes again and again after that."""
    at_least: bool = False
    """An iteration has more micro-batches than were replayed, and may have more retries."""
    failures: tuple[Failure, ...] = ()
    """The first request that fails in each moment that does not fit."""
    reserved: int = 0
    """Bytes that the allocator keeps behind a step once it has given cached memory back: what a device shows from then
    on. 0 where it never does, or does in every iteration."""


def worst(judged: Iterable[Judged]) -> Judged:
    """The verdict on all together: the last one in the order of ``Verdict``, with most retries."""
    order = list(Verdict)
    return max(judged, key=lambda one: (order.index(one.verdict), one.retries_in_iteration, one.retries))


MOMENTS = ("initialisation", "evaluation", "checkpoint")
"""Beside iterations."""


def worst_moment(moments: Mapping[str, int | None], replayed: int) -> tuple[str, int]:
    """The moment that needs most, and the bytes by which that is more than ``replayed``, an iteration's; 0 where an
    iteration needs most. Of other moments the sum of what is alive is known, without the allocator's cache; what lies
    outside PyTorch is there in all."""
    moment = max(MOMENTS, key=lambda name: moments.get(name) or 0)
    more = (moments.get(moment) or 0) - replayed
    return (moment, more) if more > 0 else ("steady", 0)


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
    device_range: tuple[int, int] | None = None
    """The least and the most that the device shows: ``device`` is the middle."""
    outside: tuple[Cause, ...] = ()
    """What makes that range."""
    reading_range: tuple[int, int] | None = None
    """Where 95 % of readings should lie, of the mean of the devices of all its ranks: wider than ``device_range`` by
    what the allocator's replay misses, lower where other ranks take less, and of what is kept where the allocator gives
    cached memory back."""
    judged: Judged = Judged()

    @property
    def headline(self) -> int:
        """The furthest reading that could be derived: device, else reserved, allocated, requested."""
        for reading in (self.device, self.reserved, self.allocated):
            if reading is not None:
                return reading
        return self.requested

    def worst(self, *, evaluated: bool) -> tuple[str, int]:
        """The moment that needs most, and the bytes that it adds to an iteration's headline: 0 where that is it.
        Without ``evaluated`` the plan includes no evaluation."""
        replayed = next((one for one in (self.reserved, self.allocated) if one is not None), self.requested)
        moments = self.moments if evaluated else self.moments | {"evaluation": None}
        return worst_moment(moments, replayed)

    def of(self, category: Category) -> int:
        return self.breakdown[category]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know: a stable ``code`` for scripts and a ``message`` that teaches."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class WayOut:
    """Changes of a plan that does not fit, and what they bring. Sizes in bytes."""

    what: str
    fields: tuple[tuple[str, object], ...]
    """Values by paths of fields (``layout.tp``);"""
    flags: str
    """and the same as flags beside those of the plan."""
    judged: Judged
    """The verdict on the changed plan, as far as that was followed."""
    gained: int
    """What the fullest stage needs less in its worst moment;"""
    needs: int
    """and what it then needs."""
    slower: float | None
    """By which part of its time a step takes longer; ``None`` where times are not known."""
    costs: str
    """What it costs beside time."""

    @property
    def fits(self) -> bool | None:
        """As ``Estimate.fits`` of the changed plan."""
        return self.judged.verdict.fits

    @property
    def helps(self) -> bool:
        """It may be enough, as far as is known."""
        return self.judged.verdict not in (Verdict.TIGHT, Verdict.DOES_NOT_FIT)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer to ``memplan estimate``."""

    plan: ResolvedPlan
    """After every default was filled in."""
    capacity: int | None
    headroom: int
    stages: tuple[StageEstimate, ...]
    warnings: tuple[Notice, ...]
    assumptions: tuple[str, ...]
    ways_out: tuple[WayOut, ...] = ()
    """Where it does not fit, is tight or needs retries: the cheapest changes that end that, or come closest."""

    @property
    def judged(self) -> Judged:
        """The verdict on the stage that fares worst."""
        return worst(stage.judged for stage in self.stages)

    @property
    def fits(self) -> bool | None:
        """``None`` where that is not known: nothing to fit into was named, or what lies outside PyTorch."""
        return self.judged.verdict.fits

    @property
    def failures(self) -> tuple[tuple[StageEstimate, Failure], ...]:
        """Requests that fail, with their stages."""
        return tuple((stage, failure) for stage in self.stages for failure in stage.judged.failures)

    @property
    def peak_stage(self) -> int:
        return max(range(len(self.stages)), key=lambda i: (self.stages[i].headline, -i))

    @property
    def peak(self) -> int:
        return self.stages[self.peak_stage].headline

    @property
    def worst(self) -> tuple[str, int]:
        """The moment of all stages that needs most, and the bytes that it adds to ``peak``: 0 where that is it."""
        found = [(stage.headline, *stage.worst(evaluated=self.plan.trainer.evaluated)) for stage in self.stages]
        headline, moment, more = max(found, key=lambda one: one[0] + one[2])
        return moment, headline + more - self.peak


@dataclass(frozen=True, slots=True)
class ModuleTape:
    """One module's events in one phase of one micro-batch, for ``--detail``."""

    module: str
    phase: str
    events: tuple[Event, ...] = field(repr=False)
