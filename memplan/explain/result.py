"""What an explanation says: immutable values that reports print and JSON carries. All sizes in bytes."""

from __future__ import annotations

from ..plan.resolved import ResolvedPlan
from ..result import Estimate, Notice
from ..tape.events import Bytes
from ..values import dataclass
from .clues import Clues, Guess
from .log import Reported


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request of the plan that may be the one that failed; equal ones of several layers and stages are one."""

    stages: tuple[int, ...]
    phase: str
    """``forward``, ``backward``, ``step``, ``evaluation``; ``initialisation`` for what is built before the first
    iteration, ``loading`` for the model moved to the GPU as it is."""
    modules: tuple[str, ...]
    tensor: str
    category: str
    size: int
    tried: int
    """The segment for which the allocator asks: the size in the message."""
    shape: tuple[int, ...]
    dtype: str
    allocated: tuple[int, int]
    """The least and the most that the plan's tensors take before it, in blocks."""
    held: Bytes
    """Of these the most, by category, as requested."""
    score: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ran out of memory, why, and what ends it."""

    reported: Reported
    """The first message."""
    ranks: tuple[int, ...]
    """All ranks that reported one, where the log says which they are."""
    messages: int
    clues: Clues
    causes: tuple[Notice, ...]
    plan: ResolvedPlan | None = None
    candidates: tuple[Candidate, ...] = ()
    """The likeliest first; empty where no request of the plan has the size, or there is no plan."""
    nearest: tuple[Candidate, ...] = ()
    """Where none has the size: those nearest to it."""
    guesses: tuple[Guess, ...] = ()
    """What has this size in known models, where there is no candidate."""
    estimate: Estimate | None = None
    """The plan's, with its ways out where it does not fit."""
    wanted: tuple[str, ...] = ()
    """What would tell more."""
