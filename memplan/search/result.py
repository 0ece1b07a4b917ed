"""The answer of a search: immutable values that reports print and JSON carries. Sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from ..estimate import Reading
from ..frameworks import framework
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..result import Estimate, Judged, Verdict
from ..tape.events import Category
from ..values import dataclass, replace
from .cuts import StageLayers
from .point import Point
from .time import StepTime, is_timed, lacks_network

UNTIMED = 0.0
"""Seconds of a layout whose work is not known."""


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
    """The furthest reading of an iteration of the fullest stage that is known; ``None`` where the allocator was not
    replayed."""
    worst: tuple[str, int] = ("steady", 0)
    """The moment that needs most of those stages, and the bytes that it adds to that reading."""
    estimate: Estimate | None = None
    """Of every stage: the recommended layout's."""
    fullest_judged: Judged | None = None
    """The verdict on the fullest stage, where it alone was replayed."""
    step: StepTime | None = None

    @property
    def timed(self) -> bool:
        """Whether ``seconds`` are those of the plan's own model and GPU, and so worth telling."""
        known = self.seconds != UNTIMED and is_timed(self.plan.hardware.gpu)
        known = known and not lacks_network(self.plan, self.point.gpus)
        return known and framework(self.plan.framework).search.searched(self.plan)

    def replayed(self, found: Reading) -> Suggestion:
        """With what stages of it take, where not all of them were replayed."""
        return replace(self, device=found.device, worst=found.worst, fullest_judged=found.judged)

    @property
    def reading(self) -> int:
        """The furthest reading of an iteration that is known."""
        if self.estimate is not None:
            return self.estimate.peak
        return self.requested if self.device is None else self.device

    @property
    def worst_moment(self) -> tuple[str, int]:
        """The moment that needs most, and the bytes that it adds to ``reading``."""
        return self.worst if self.estimate is None else self.estimate.worst

    @property
    def needs(self) -> int:
        """What the device shows in the moment that needs most, as far as is known."""
        return self.reading + self.worst_moment[1]

    @property
    def judged(self) -> Judged:
        """The verdict; unknown where the allocator was not replayed."""
        if self.estimate is not None:
            return self.estimate.judged
        return Judged() if self.fullest_judged is None else self.fullest_judged

    @property
    def fits(self) -> bool:
        """As far as is known."""
        return self.judged.verdict.fits is not False

    @property
    def is_safe(self) -> bool:
        """As far as is known, whatever of its range lies outside PyTorch: what may be recommended."""
        return self.fits and self.judged.verdict is not Verdict.TIGHT


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
    """Excluded by a rule of the framework, by the rule."""
    too_large: int
    """Whose bound from below, in an iteration or while a checkpoint is saved, is more than there is, where the search
    chooses cuts in every cut."""
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
    given_refused: PlanError | None = None
    """Why it cannot run as it was given."""
    given_keeps_too_little: bool = False
    """It fits, and would be faster than what is recommended, but leaves less than the default reserve."""
    ends_retries: Suggestion | None = None
    """The fastest of ``best`` that fits with retries alone, with expandable segments, where those end the retries."""
    keeps_free: str = ""
    """The headroom, where nobody gave one: the default reserve."""
    error: float = 0.0
    """Median error of predicted times, as a part."""
    within: float = 0.0
    """Layouts are equally fast that take longer than the fastest by no more than this part."""
    gain: int = 0
    """Bytes of room for which a slower one of these is worth the change: a reserve, as it is by default."""
    chosen_beside_layout: frozenset[str] = frozenset()
    """Fields that layouts have other values of, beside those of layout, batch, recompute and cut, by their paths."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a search in one of several frameworks found."""

    framework: str
    objective: str
    best: Suggestion | None = None
    closest: Suggestion | None = None
    """Where nothing fits: the layout that needs least."""
    refused: PlanError | None = None
    """Why it has no layout."""

    @property
    def keeps_fp32(self) -> bool:
        """The best layout, or the closest, has parameters in fp32 somewhere: the optimizer's copy, or themselves."""
        one = self.best or self.closest
        if one is None or one.estimate is None:
            return False
        stage = one.estimate.stages[one.fullest]
        held = stage.breakdown
        whole = held[Category.MAIN_PARAMETERS] > 0 or held[Category.PARAMETERS] >= 4 * stage.parameters
        return whole or any(extra.moves_states for extra in one.point.extras)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Of several the smallest is the best: one that fits, keeps parameters in fp32, and is what was asked for."""
        one = self.best
        if one is None:
            return True, not self.keeps_fp32, self.closest.needs if self.closest is not None else inf
        measure = {"time": one.seconds, "memory": one.needs, "gpus": one.point.gpus}[self.objective]
        return False, not self.keeps_fp32, measure
