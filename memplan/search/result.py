"""The answer of a search: immutable values that reports print and JSON carries. Sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan.plan import Plan
from ..result import Estimate
from ..values import dataclass
from .cuts import StageLayers
from .point import Point
from .time import StepTime


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout, what it needs and how long its step takes."""

    point: Point
    cut: StageLayers
    plan: Plan
    """Before defaults are filled in: what ``--write`` writes."""
    requested: int
    """Of the fullest stage: the fold's bytes, the same as ``estimate`` gives."""
    fullest: int
    """Which stage that is."""
    seconds: float
    device: int | None = None
    """The furthest reading of the fullest stage that is known; ``None`` where the allocator was not replayed."""
    estimate: Estimate | None = None
    """Of every stage: the recommended layout's."""
    step: StepTime | None = None

    @property
    def needs(self) -> int:
        """The furthest reading that is known."""
        if self.estimate is not None:
            return self.estimate.peak
        return self.requested if self.device is None else self.device


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a plan that does not fit, and what it brings."""

    what: str
    fields: tuple[tuple[str, object], ...]
    suggestion: Suggestion
    gained: int
    """Bytes by which the fullest stage needs less."""
    lost: float
    """Seconds by which a step takes longer; negative where it is faster."""
    fits: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """How many layouts were considered, and what became of them."""

    considered: int
    refused: Mapping[str, int]
    """Left out by a rule of the framework, by the rule."""
    too_large: int
    """Whose bound from below is more than there is."""
    slower: int
    """Never built: others that fit are faster, or as small."""
    folded: int
    """Whose peak was computed to the byte."""
    replayed: int
    """Which went through the allocator as well."""

    @property
    def total(self) -> int:
        return self.considered + sum(self.refused.values())


@dataclass(frozen=True, slots=True)
class Found:
    """The whole answer."""

    base: Plan
    """What was asked, defaults filled in."""
    fixed: Mapping[str, object]
    objective: str
    capacity: int | None
    limit: int
    """Bytes that a GPU may need: capacity less headroom."""
    best: tuple[Suggestion, ...]
    """The recommended layout, then the alternatives."""
    front: tuple[Suggestion, ...]
    """Layouts that fit such that none needs less memory and less time; fastest first."""
    closest: Suggestion | None
    """Where nothing fits: the layout that needs least."""
    changes: tuple[Change, ...]
    """Where nothing fits, or the plan as given does not: the smallest changes that help."""
    given: Suggestion | None
    """The plan as it was given, where it can run."""
    counts: Counts
    seconds: float
    """That the search itself took."""
