"""What a rank holds event by event through one iteration: how many bytes, which is the line in a report, or which
tensors, whose names a page and a picture show.

The events are those that ``replay`` runs, in the same order. Blocks do not matter here: each tensor has a number of its
own, so that whatever is live has a name. Sizes are requested bytes, each tensor rounded up to 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Generic, NamedTuple, TypeVar

from ..tape.events import END_OF_GRADIENT, NOTHING, Bytes, Category, Drop, Event, Hold
from ..tape.program import SLOT, WHOLE, Action, Program, What, forward_passes
from ..values import dataclass
from .caching import AllocatorSettings
from .construction import workspaces_of
from .named import NamedRun, NamingRank, Tensor, phase_between, phase_of, static_tensor
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


# -- which tensors they are ------------------------------------------------------------------------------


class Live(NamedTuple):
    """A tensor that is held."""

    bytes: int
    category: int
    tensor: Tensor
    microbatch: int | None


class Point(NamedTuple):
    """A moment of an iteration."""

    event: int
    """The iteration's event with which it begins, counted from 1."""
    by: Bytes
    """Requested bytes then, by category."""
    live: Live
    """What begins with that event,"""
    begins: bool
    """or ends."""
    phase: str
    """``forward``, ``backward`` or ``step``."""


@dataclass(frozen=True, slots=True)
class Timeline(Followed[Point]):
    """One iteration of a stage's most loaded rank in steady state, and what its peak consists of."""

    contents: tuple[Live, ...]
    """What is live at the peak of allocated bytes; sums to the stage's breakdown, category by category, but for
    block rounding. Empty where nobody asked."""


def timeline(program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold], peak: Bytes | None) -> Timeline:
    """``program`` is one with its kernels' workspaces, as ``replay`` runs it; ``peak`` the bytes by category that it
    found, ``None`` where nobody asks what they are."""
    rank = _Recorder(settings, None if peak is None else (*peak[: Category.BLOCK_ROUNDING], 0))
    one = follow(_Recording(program, rank, workspaces_of(program, workspaces)), rank.points)
    return Timeline(one.stage, one.points, one.events, one.shown, one.microbatches, rank.found)


class _Summary:
    """What a pass comes to, where nobody asks for each of its events."""

    def __init__(self, events: Pass, names: Sequence[Tensor]) -> None:
        self.events, self.names = events, names
        self.by: dict[int, Bytes] = {}
        """What ``Pass.until`` has said of the places that it was asked for."""

    @cached_property
    def begun(self) -> dict[int, int]:
        """By the place of each operation that ends what another module began in the pass, where that was."""
        under_way: dict[int, int] = {}
        found: dict[int, int] = {}
        for at, slot, one in self.events.operations.lasting():
            if one.units > 0:
                under_way[slot] = at
            elif slot in under_way:
                found[at] = under_way.pop(slot)
        return found

    @cached_property
    def changes(self) -> tuple[tuple[int, ...], tuple[Begun, ...], tuple[int, ...]]:
        """Of the tensors that it begins and leaves their slots, and what they are; and the slots of those that began
        before it and that it ends."""
        begun: dict[int, Begun] = {}
        ended: list[int] = []
        left = {one.slot: one for one in self.events.left}
        for at, slot, one in self.events.operations.lasting():
            if one.units > 0:
                _, _, size, category, _ = left.get(slot, one)
                begun[slot] = size, category, at
            elif begun.pop(slot, None) is None:
                ended.append(slot)
        return tuple(begun), tuple(begun.values()), tuple(ended)


Begun = tuple[int, int, int]
"""A tensor's bytes, category and place among names."""


class _Together(NamedTuple):
    """Tensors that one pass begins, with numbers in a row."""

    first: int
    """Number."""
    begun: Sequence[Begun]
    names: Sequence[Tensor]
    microbatch: int | None

    def live(self, number: int) -> Live:
        """The one of that number."""
        size, category, place = self.begun[number - self.first]
        return Live(size, category, self.names[place], self.microbatch)


class _Kept(NamedTuple):
    """Tensors that begin before an iteration, with numbers in a row."""

    first: int
    """Number."""
    holds: Sequence[Hold]

    def live(self, number: int) -> Live:
        """The one of that number."""
        hold = self.holds[number - self.first]
        return Live(hold.bytes, hold.category, static_tensor(hold, ""), None)


class _Recorder(NamingRank):
    """A rank that has no allocator, and keeps what is live under numbers."""

    __slots__ = ("count", "found", "live", "most", "points", "summaries", "total", "wanted")

    def __init__(self, settings: AllocatorSettings, wanted: Bytes | None) -> None:
        super().__init__(settings)
        self.live: dict[int, _Together | _Kept] = {}
        """By number, in order."""
        self.count = self.total = 0
        self.wanted = list(wanted or ())
        """Bytes by category when the peak is reached,"""
        self.most = -1 if wanted is None else sum(wanted)
        """and their sum;"""
        self.found: tuple[Live, ...] = ()
        """and what they are, once it has been."""
        self.points = Points[Point]()
        self.summaries: dict[tuple[Pass, int], _Summary] = {}
        """Of passes with these names, by the ids of the latter."""

    @property
    def steps(self) -> bool:
        return self.points.width > 0

    def room(self, units: int) -> int:
        return 0

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        return self._begin(size, category) if size else NO_BLOCK

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        if block != NO_BLOCK:
            self._end(block, size, category)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        names = self.names_of(events, start)
        key = events, id(names)
        known = self.summaries.get(key)
        if known is None:
            known = self.summaries[key] = _Summary(events, names)
        if not self.found and events.operations.reach(self.most - self.total):
            self._find(known, events, frame)
        if self.points.width:
            self._follow_pass(known, events, frame)
        slots, begun, ended = known.changes
        for slot in ended:
            del self.live[frame[slot]]
        first = self.count + 1
        self.count += len(slots)
        self.live.update(zip(range(first, self.count + 1), repeat(_Together(first, begun, names, self.microbatch))))
        for number, slot in enumerate(slots, first):
            frame[slot] = number
        for at, change in events.net_by:
            self.by[at] += change
            self.total += change

    def _find(self, known: _Summary, events: Pass, frame: list[int]) -> None:
        """What is live at the peak, if it is reached in a pass that is about to run."""
        wanted, last = self.most - self.total, (-1, NOTHING)
        for place, (held, one) in enumerate(zip(events.operations.held, events.operations, strict=True)):
            if held != wanted or one.units < 0:
                continue
            last = place, events.until(place, last)
            if list(map(int.__add__, self.by, last[1])) != self.wanted:
                continue
            before = {number: together.live(number) for number, together in self.live.items()}
            begun: dict[int, Live] = {}
            for at, (slot, units, size, category, _) in enumerate(events.operations[: place + 1]):
                if units > 0:
                    begun[slot] = Live(size, category, known.names[at], self.microbatch)
                elif begun.pop(slot, None) is None:
                    del before[frame[slot]]
            self.found = (*before.values(), *begun.values())
            return

    def _follow_pass(self, known: _Summary, events: Pass, frame: list[int]) -> None:
        """The events of a pass that is about to run: of each point that ends in it, and behind the last, the fullest
        moment."""
        last = -1, NOTHING

        def moment(place: int, _: int) -> Point:
            nonlocal last
            until = known.by.get(place) or known.by.setdefault(place, events.until(place, last))
            last = place, until
            by = tuple(map(int.__add__, self.by, until))
            return Point(self.points.event + place + 1, by, *self._at(place, known, events, frame), self.phase)

        self.points.follow(self.total, events.operations.held, moment)

    def _at(self, place: int, known: _Summary, events: Pass, frame: list[int]) -> tuple[Live, bool]:
        """What the operation at ``place`` begins or ends, and whether it begins."""
        slot, units, size, category, _ = events.operations[place]
        began = place if units > 0 else known.begun.get(place, events.operations.began(place))
        if began < 0:
            return self.live[frame[slot]].live(frame[slot]), False
        return Live(size, category, known.names[began], self.microbatch), units > 0

    def _begin(self, size: int, category: int) -> int:
        """The number of a tensor that begins."""
        self.count += 1
        one = _Together(self.count, ((size, category, 0),), (self.label,), self.microbatch)
        self.live[self.count] = one
        self.by[category] += size
        self.total += size
        if self.total == self.most and not self.found and self.by == self.wanted:
            self.found = tuple([together.live(number) for number, together in self.live.items()])
        if self.points.width:
            self._follow(one.live(self.count), size)
        return self.count

    def _end(self, number: int, size: int, category: int) -> None:
        one = self.live.pop(number)
        self.by[category] -= size
        self.total -= size
        if self.points.width:
            self._follow(one.live(number), -size)

    def _follow(self, one: Live, size: int) -> None:
        """A tensor of so many bytes has begun, or has ended if they are fewer than none."""

        def moment(_: int, __: int) -> Point:
            return Point(self.points.event + 1, tuple(self.by), one, size > 0, self.phase)

        self.points.follow(self.total - size, (size,), moment)


class _Recording(FollowedRun, NamedRun):
    """A run of an iteration whose events are counted first."""

    rank: _Recorder

    def keep(self, tape: Iterable[Event]) -> None:
        rank, static = self.rank, self.static
        if rank.steps or rank.wanted:
            super().keep(tape)
            return
        live, by, holds = rank.live, rank.by, list[Hold]()
        kept = _Kept(rank.count + 1, holds)
        for event in tape:
            if isinstance(event, Hold):
                tensor, size, category, name, _, _, stream = event
                number = NO_BLOCK
                if size:
                    number = rank.count = rank.count + 1
                    live[number] = kept
                    holds.append(event)
                    by[category] += size
                    rank.total += size
                static[tensor] = number, stream or self.pool
                if name == SLOT:
                    self.chunks[0].slots.append(number)
            elif isinstance(event, Drop):
                tensor, size, category = event
                if tensor == END_OF_GRADIENT:
                    self.end_gradient(size)
                elif size:
                    del live[static.pop(tensor)[0]]
                    by[category] -= size
                    rank.total -= size

    def first_step(self) -> None:
        super().first_step()
        self.rank.found = ()  # a peak of the first iteration
