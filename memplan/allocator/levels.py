"""How many bytes a rank holds through one iteration, whatever they are: the line in a report.

The events are those that ``replay`` runs, in the same order. Sizes are requested bytes, each tensor rounded up to 512.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..tape.events import END_OF_GRADIENT, Drop, Event, Hold
from ..tape.program import SLOT, WHOLE, Action, Program, What, forward_passes
from ..values import dataclass
from .caching import AllocatorSettings
from .named import phase_between, phase_of
from .passes import Pass
from .rank import NO_BLOCK, Rank
from .replay import Run, workspaces_of

MOST_POINTS = 600
"""Of a line. Of more events each point is the one among its neighbours at which most is held."""
HELD = 1
"""In the place of a block: something is held, whatever it is."""


class Level(NamedTuple):
    """A moment of an iteration."""

    event: int
    """The iteration's event with which it begins, counted from 1."""
    bytes: int
    """Held then."""
    phase: str
    """``forward``, ``backward`` or ``step``."""


@dataclass(frozen=True, slots=True)
class Line:
    """One iteration of a stage's most loaded rank in steady state."""

    stage: int
    levels: tuple[Level, ...]
    events: int
    """Of the iteration."""
    shown: int
    """Micro-batches that were run;"""
    microbatches: int
    """and of the whole iteration: those left out do what others have done."""


def line(program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold]) -> Line:
    """``program`` is one with its kernels' workspaces, as ``replay`` runs it."""
    rank = _Levels(settings)
    run = _Counting(program, rank, workspaces_of(program, workspaces))
    actions = list(program.order.shortened)
    run.begin()
    if run.second_differs:
        run.iterate(actions)
        run.first_step()
        run.begin()
    rank.width = width_of(run, actions)
    run.iterate(actions)
    rank.flush()
    run.step()
    rank.flush()
    return Line(program.stage, tuple(rank.levels), rank.event, shown_of(actions), program.microbatches)


def width_of(run: Run, actions: Iterable[Action]) -> int:
    """How many events of an iteration are one point."""
    program = run.program
    passes = (
        len(run.chunks[one.chunk].passes.of(one.what, program.order.role(one.microbatch)).operations)
        if one.tensor is None and one.what not in WHOLE
        else 1
        for one in actions
    )
    return max(1, -(-(sum(passes) + len(program.step) + len(program.late_step)) // MOST_POINTS))


def shown_of(actions: Iterable[Action]) -> int:
    """Micro-batches that run through the first chunk."""
    return sum(not chunk for chunk, _ in forward_passes(actions))


class _Levels(Rank):
    """A rank that has no allocator, and counts bytes."""

    __slots__ = ("event", "highest", "largest", "levels", "phase", "total", "width")

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.event = self.total = 0
        self.phase = ""
        self.width = 0
        """Events of a point; 0 while none is recorded."""
        self.levels: list[Level] = []
        self.highest = -1
        """Bytes of the fullest moment since the last point,"""
        self.largest: Level | None = None
        """and that moment."""

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        self.change(size)
        return HELD if size else NO_BLOCK

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        if block != NO_BLOCK:
            self.change(-size)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        if self.width:
            self._follow(events.operations.held)
        for slot in events.operations.begun:
            frame[slot] = HELD
        self.total += sum([size for _, size in events.net_by])

    def change(self, size: int) -> None:
        """An event of so many bytes, fewer than none where a tensor ends."""
        if self.width and size:
            self._follow((size,))
        self.total += size

    def _follow(self, held: Sequence[int]) -> None:
        """Events that are about to come, with the bytes ``held`` behind each more than now: of each point that ends
        with one of them, and behind the last, the fullest moment."""
        before = self.event
        start, end = 0, self.width - before % self.width
        while start < len(held):
            highest = max(held[start:end])
            if self.total + highest > self.highest:
                self.highest = self.total + highest
                self.largest = Level(before + held.index(highest, start) + 1, self.highest, self.phase)
            if end <= len(held):
                self.flush()
            start, end = end, end + self.width
        self.event = before + len(held)

    def flush(self) -> None:
        """Ends a point."""
        if self.largest is not None:
            self.levels.append(self.largest)
        self.largest, self.highest = None, -1


class _Counting(Run):
    """A run that tells its rank in which phase it is."""

    rank: _Levels

    def construct(self) -> Iterable[Event]:
        kept = self.program.kept
        if kept is None:
            return super().construct()
        self.rank.total += kept.construction.excursion.net + kept.workspaces.excursion.net
        return ()

    def keep(self, tape: Iterable[Event]) -> None:
        self.rank.phase = "step" if self.rank.width else ""
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

    def begin_all(self, chunk: int, tensor: str, count: int) -> None:
        size, category, stream = self.begun.get((chunk, tensor)) or self._known(chunk, tensor)
        together = size * count, category, stream
        self.between[tensor, chunk, -1] = self.receive(tensor, chunk, -1, together), *together

    def end_all(self, chunk: int, tensor: str, count: int) -> None:
        found = self.between.pop((tensor, chunk, -1), None)
        if found is not None:
            self.rank.drop(*found)
