"""How many bytes a rank holds through one iteration, whatever they are: the line in a report.

The events are those that ``replay`` runs, in the same order. Sizes are requested bytes, each tensor rounded up to 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..tape.events import END_OF_GRADIENT, Drop, Event, Hold
from ..tape.program import SLOT, WHOLE, Action, Program, What, forward_passes
from ..values import dataclass
from .caching import AllocatorSettings
from .construction import workspaces_of
from .named import phase_between, phase_of
from .passes import Pass
from .rank import NO_BLOCK, Rank
from .replay import Run

MOST_POINTS = 600
"""Of a line. Of more events each point is the one among its neighbours at which most is held."""
HELD = 1
"""In the place of a block: something is held, whatever it is."""

P = TypeVar("P")


class Level(NamedTuple):
    """A moment of an iteration."""

    event: int
    """The iteration's event with which it begins, counted from 1."""
    bytes: int
    """Held then."""
    phase: str
    """``forward``, ``backward`` or ``step``."""


@dataclass(frozen=True, slots=True)
class Followed(Generic[P]):
    """One iteration of a stage's most loaded rank in steady state."""

    stage: int
    points: tuple[P, ...]
    events: int
    """Of the iteration."""
    shown: int
    """Micro-batches that were run;"""
    microbatches: int
    """and of the whole iteration: those left out do what others have done."""


Line = Followed[Level]


def line(program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold]) -> Line:
    """``program`` is one with its kernels' workspaces, as ``replay`` runs it."""
    rank = _Levels(settings)
    return follow(_Counting(program, rank, workspaces_of(program, workspaces)), rank.points)


class Points(Generic[P]):
    """The fullest moment of each group of ``width`` successive events of an iteration."""

    def __init__(self) -> None:
        self.width = 0
        """Events of a group; 0 while none is followed."""
        self.event = 0
        """Events so far."""
        self.found: list[P] = []
        self._highest = -1
        """Bytes of the fullest moment of the group that is under way,"""
        self._fullest: P | None = None
        """and that moment."""

    def follow(self, total: int, held: Sequence[int], moment: Callable[[int, int], P]) -> None:
        """Counts events: ``total`` bytes are held before the first, and ``held[i]`` more than that after event i.
        ``moment(i, bytes)`` makes the moment after event i."""
        before = self.event
        start, end = 0, self.width - before % self.width
        while start < len(held):
            highest = max(held[start:end])
            if total + highest > self._highest:
                self._highest = total + highest
                self._fullest = moment(held.index(highest, start), self._highest)
            if end <= len(held):
                self.flush()
            start, end = end, end + self.width
        self.event = before + len(held)

    def flush(self) -> None:
        """Ends a group."""
        if self._fullest is not None:
            self.found.append(self._fullest)
        self._fullest, self._highest = None, -1


def follow(run: Run, points: Points[P]) -> Followed[P]:
    """Runs the first iteration that is as those after it; ``run``'s rank tells ``points`` of its events."""
    program = run.program
    actions = list(program.order.shortened)
    run.begin()
    if run.second_differs:
        run.iterate(actions)
        run.first_step()
        run.begin()
    points.width = _width(run, actions)
    run.iterate(actions)
    points.flush()
    run.step()
    points.flush()
    shown = sum(not chunk for chunk, _ in forward_passes(actions))
    return Followed(program.stage, tuple(points.found), points.event, shown, program.microbatches)


def _width(run: Run, actions: Iterable[Action]) -> int:
    """How many events of an iteration are one point."""
    program = run.program
    passes = (
        len(run.chunks[one.chunk].passes.of(one.what, program.order.role(one.microbatch)).operations)
        if one.tensor is None and one.what not in WHOLE
        else 1
        for one in actions
    )
    return max(1, -(-(sum(passes) + len(program.step) + len(program.late_step)) // MOST_POINTS))


class FollowedRun(Run):
    """A run in which equal tensors that begin together are one."""

    def begin_all(self, chunk: int, tensor: str, count: int) -> None:
        size, category, stream = self.begun.get((chunk, tensor)) or self._known(chunk, tensor)
        together = size * count, category, stream
        block = self.receive(f"{tensor} of {count:,} micro-batches", chunk, -1, together)
        self.between[tensor, chunk, -1] = block, *together

    def end_all(self, chunk: int, tensor: str, count: int) -> None:
        found = self.between.pop((tensor, chunk, -1), None)
        if found is not None:
            self.rank.drop(*found)


class _Levels(Rank):
    """A rank that has no allocator, and counts bytes."""

    __slots__ = ("phase", "points", "total")

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.total = 0
        self.phase = ""
        self.points = Points[Level]()

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        self.change(size)
        return HELD if size else NO_BLOCK

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        if block != NO_BLOCK:
            self.change(-size)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        if self.points.width:
            self.points.follow(self.total, events.operations.held, self._level)
        for slot in events.operations.begun:
            frame[slot] = HELD
        self.total += sum([size for _, size in events.net_by])

    def change(self, size: int) -> None:
        """An event of so many bytes, fewer than none where a tensor ends."""
        if self.points.width and size:
            self.points.follow(self.total, (size,), self._level)
        self.total += size

    def _level(self, place: int, total: int) -> Level:
        return Level(self.points.event + place + 1, total, self.phase)


class _Counting(FollowedRun):
    """A run that tells its rank in which phase it is."""

    rank: _Levels

    def construct(self) -> Iterable[Event]:
        kept = self.program.kept
        if kept is None:
            return super().construct()
        self.rank.total += kept.construction.excursion.net + kept.workspaces.excursion.net
        return ()

    def keep(self, tape: Iterable[Event]) -> None:
        self.rank.phase = "step" if self.rank.points.width else ""
        self.take(tape)

    def take(self, tape: Iterable[Event]) -> None:
        change = self.rank.change
        for event in tape:
            if isinstance(event, Hold):
                change(event.bytes)
                if event.name == SLOT:
                    self.chunks[0].slots.append(HELD)
            elif isinstance(event, Drop):
                if event.tensor == END_OF_GRADIENT:
                    self.end_gradient(event.bytes)
                else:
                    change(-event.bytes)

    def run(self, what: What, number: int, microbatch: int) -> None:
        self.rank.phase = phase_of(what)
        super().run(what, number, microbatch)

    def receive(self, tensor: str, chunk: int, number: int, known: tuple[int, int, int]) -> int:
        self.rank.phase = phase_between(tensor)
        return super().receive(tensor, chunk, number, known)
