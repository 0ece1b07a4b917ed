"""What a rank holds event by event through one iteration, and which tensors those are at its peak.

The events are those that ``replay`` runs, in the same order. Blocks do not matter here: each tensor has a number of its
own, so that whatever is live has a name. Sizes are requested bytes, each tensor rounded up to 512.

A program's replay, written down: every request with what it is for, where its block lies, and when it ends.

``replay`` runs passes in stretches and knows only what they come to; here each request is served by itself, and whoever
records is told. The blocks are the same, since the same pools serve the same requests in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from itertools import accumulate, islice, starmap
from typing import NamedTuple, Protocol, overload

from ..tape.events import NOTHING, Bytes, Category, Drop, Event, Hold
from ..tape.program import WHOLE, Action, Chunk, Program, Role, What, forward_passes
from ..values import dataclass
from .blocks import ADDRESS, LARGEST_SMALL, SHIFT, UNIT_BITS, SegmentPool
from .caching import AllocatorSettings
from .operations import Operation
from .passes import Pass, Passes
from .replay import NO_BLOCK, Rank, Run, construction, states, workspaces_of

MOST_POINTS = 600
"""Of a timeline. Of more events each point is the one among its neighbours at which most is held."""


class Tensor(NamedTuple):
    """What a tensor is called."""

    name: str
    module: str = ""
    """Empty of what no module makes: what is kept, or handed from stage to stage."""
    phase: str = ""
    """``forward``, ``backward`` or ``step``; empty of what was there before."""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Names(Sequence[Tensor]):
    """What each operation of a pass, or of its piece from ``start`` to ``end``, begins or ends."""

    def __init__(
        self, events: Sequence[tuple[str, Sequence[Hold | Drop]]], phase: str, start: int = 0, end: int | None = None
    ) -> None:
        """``events`` with the names of their modules."""
        self.events, self.phase = events, phase
        self.starts = list(accumulate((len(own) for _, own in events), initial=0))
        self.within = range(self.starts[-1])[start:end]

    def __len__(self) -> int:
        return len(self.within)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Names: ...
    def __getitem__(self, at: int | slice) -> Tensor | Names:
        if isinstance(at, slice):
            twin = copy(self)
            twin.within = self.within[at]
            return twin
        place = self.within[at]
        piece = bisect_right(self.starts, place) - 1
        module, events = self.events[piece]
        return self._name(module, events[place - self.starts[piece]])

    def __iter__(self) -> Iterator[Tensor]:
        every = ((module, event) for module, events in self.events for event in events)
        return starmap(self._name, islice(every, self.within.start, self.within.stop))

    def _name(self, module: str, event: Hold | Drop) -> Tensor:
        return Tensor(event.name, module, self.phase, event.shape, event.dtype) if isinstance(event, Hold) else ENDS


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
class Timeline:
    """One iteration of a stage's most loaded rank in steady state."""

    stage: int
    points: tuple[Point, ...]
    events: int
    """Of the iteration."""
    contents: tuple[Live, ...]
    """What is live at the peak of allocated bytes; sums to the stage's breakdown, category by category, but for
    block rounding. Empty where nobody asked."""
    shown: int
    """Micro-batches that were run;"""
    microbatches: int
    """and of the whole iteration: those left out do what others have done."""


def timeline(program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold], peak: Bytes | None) -> Timeline:
    """``program`` is one with its kernels' workspaces, as ``replay`` runs it; ``peak`` the bytes by category that it
    found, ``None`` where nobody asks what they are."""
    rank = _Recorder(settings, None if peak is None else (*peak[: Category.BLOCK_ROUNDING], 0))
    run = _Recording(program, rank, workspaces_of(program, workspaces))
    actions = list(program.order.shortened)
    run.begin()
    if run.second_differs:
        run.iterate(actions)
        run.first_step()
        run.begin()
        rank.found = ()
    rank.record(run.events_of(actions))
    run.iterate(actions)
    rank.flush()
    run.step()
    rank.flush()
    shown = sum(not chunk for chunk, _ in forward_passes(actions))
    return Timeline(program.stage, tuple(rank.points), rank.event, rank.found, shown, program.microbatches)


class NamingRank(Rank):
    """A rank that is told what its requests are for."""

    __slots__ = ("label", "microbatch", "names", "phase")

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.label, self.phase = Tensor(""), ""
        self.microbatch: int | None = None
        """Of the events to come;"""
        self.names: Sequence[Tensor] = ()
        """and of those of a pass, one by one."""

    @property
    def steps(self) -> bool:
        """What begins or ends outside of passes belongs to an optimizer step."""
        return False

    def names_of(self, events: Pass, start: int) -> Sequence[Tensor]:
        """Of the operations of a pass, or of its part from ``start`` on."""
        count = len(events.operations)
        return self.names if len(self.names) == count else self.names[start : start + count]


class NamedRun(Run):
    """A run whose tensors have names."""

    rank: NamingRank

    def take(self, tape: Iterable[Event]) -> None:
        for event in tape:
            if isinstance(event, Hold):
                self.rank.label = Tensor(event.name, "", self.rank.phase)
            super().keep((event,))

    def keep(self, tape: Iterable[Event]) -> None:
        super().keep(self._labelled(tape))

    def _labelled(self, tape: Iterable[Event]) -> Iterator[Event]:
        """``tape``, the rank being told of each event before it."""
        rank = self.rank
        rank.phase, rank.microbatch = "step" if rank.steps else "", None
        for event in tape:
            if isinstance(event, Hold):
                name = event.name or Category(event.category).key.replace("_", " ")
                rank.label = Tensor(name, "optimizer" if rank.steps else "", rank.phase, event.shape, event.dtype)
            yield event

    def run(self, what: What, number: int, microbatch: int) -> None:
        rank = self.rank
        chunk, role = self.chunks[number], self.program.order.role(microbatch)
        rank.phase, rank.microbatch = "backward" if what in BACKWARD else "forward", microbatch
        if what in WHOLE:
            start, end = chunk.next_piece(WHOLE[what], microbatch, role)
            rank.names = _names(chunk.chunk, chunk.passes, WHOLE[what], role, rank.phase, start, end)
        else:
            rank.names = _names(chunk.chunk, chunk.passes, what, role, rank.phase)
        super().run(what, number, microbatch)

    def receive(self, tensor: str, chunk: int, number: int, known: tuple[int, int, int]) -> int:
        self._between(tensor, number)
        return super().receive(tensor, chunk, number, known)

    def _between(self, tensor: str, microbatch: int | None) -> None:
        rank = self.rank
        rank.phase, rank.microbatch = "backward" if "grad" in tensor else "forward", microbatch
        rank.label = _between_stages(tensor, rank.phase)


class _Summary(NamedTuple):
    """What a pass comes to, where nobody asks for each of its events."""

    names: Sequence[Tensor]
    lasting: list[tuple[int, Operation]]
    """What is not an own tensor that both begins and ends in one of its modules, with its place."""
    held: list[int]
    """Bytes that are held behind each of its operations more than before it;"""
    begun: dict[int, int]
    """of each in ``lasting`` that ends what began in the pass, where that was;"""
    by: dict[int, Bytes]
    """and what ``Pass.until`` has said of those that it was asked for."""


def _summary(events: Pass, names: Sequence[Tensor]) -> _Summary:
    held: list[int] = []
    under_way: dict[int, int] = {}
    begun: dict[int, int] = {}
    lasting: list[tuple[int, Operation]] = []
    left = {one.slot: one for one in events.left}
    changed = events.operations.changed
    for start, before, (own, offset, outer) in events.operations.modules():
        held += [before + one for one in own.held]
        for place, one in own.lasting:
            at, id = start + place, one.slot
            slot = offset + id if id > 0 else outer[id]
            if one.units > 0:
                under_way[slot] = at
            elif slot in under_way:
                begun[at] = under_way.pop(slot)
            made = changed.get(at) or one._replace(slot=slot)
            lasting.append((at, left.get(slot, made) if one.units > 0 else made))
    return _Summary(names, lasting, held, begun, {})


class _Recorder(NamingRank):
    """A rank that has no allocator, and keeps what is live under numbers."""

    __slots__ = (
        "count", "event", "found", "highest", "largest", "live", "most", "points", "summaries", "total", "wanted",
        "width",
    )  # fmt: skip

    def __init__(self, settings: AllocatorSettings, wanted: Bytes | None) -> None:
        super().__init__(settings)
        self.live: dict[int, tuple[int, int, Sequence[Tensor], int, int | None]] = {}
        """As of ``Live``, its tensor as one of several."""
        self.count = self.event = self.total = 0
        self.wanted = list(wanted or ())
        """Bytes by category when the peak is reached,"""
        self.most = -1 if wanted is None else sum(wanted)
        """and their sum;"""
        self.found: tuple[Live, ...] = ()
        """and what they are, once it has been."""
        self.width = 0
        """Events of a point; 0 while none is recorded."""
        self.points: list[Point] = []
        self.highest = -1
        """Bytes of the fullest moment since the last point,"""
        self.largest: Point | None = None
        """and that moment."""
        self.summaries: dict[tuple[Pass, int], _Summary] = {}
        """Of passes with these names, by the ids of the latter."""

    def record(self, events: int) -> None:
        """Records an iteration of about so many ``events`` from here on."""
        self.width, self.event = max(1, -(-events // MOST_POINTS)), 0

    @property
    def steps(self) -> bool:
        return self.width > 0

    def room(self, units: int) -> int:
        return 0

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        return self._begin(size, category, (self.label,), 0) if size else NO_BLOCK

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        if block != NO_BLOCK:
            self._end(block, size, category)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        names = self.names_of(events, start)
        key = events, id(names)
        known = self.summaries.get(key)
        if known is None:
            known = self.summaries[key] = _summary(events, names)
        if not self.found and events.operations.reach(self.most - self.total):
            self._find(known, events, frame)
        if self.width:
            self._follow_pass(known, events, frame)
        for place, (slot, units, size, category, _) in known.lasting:
            if units > 0:
                self.count += 1
                frame[slot] = self.count
                self.live[self.count] = size, category, known.names, place, self.microbatch
            else:
                del self.live[frame[slot]]
        for at, change in events.net_by:
            self.by[at] += change
            self.total += change

    def _find(self, known: _Summary, events: Pass, frame: list[int]) -> None:
        """What is live at the peak, if it is reached in a pass that is about to run."""
        wanted, last = self.most - self.total, (-1, NOTHING)
        for place, (held, one) in enumerate(zip(known.held, events.operations, strict=True)):
            if held != wanted or one.units < 0:
                continue
            last = place, events.until(place, last)
            if list(map(int.__add__, self.by, last[1])) != self.wanted:
                continue
            live: dict[int, tuple[int, int, Sequence[Tensor], int, int | None]] = self.live.copy()
            numbers: dict[int, int] = {}
            for at, (slot, units, size, category, _) in enumerate(events.operations[: place + 1]):
                if units > 0:
                    numbers[slot] = -1 - at
                    live[-1 - at] = size, category, known.names, at, self.microbatch
                else:
                    del live[numbers.pop(slot, 0) or frame[slot]]
            self.found = tuple(starmap(_named, live.values()))
            return

    def _follow_pass(self, known: _Summary, events: Pass, frame: list[int]) -> None:
        """The events of a pass that is about to run: of each point that ends in it, and behind the last, the fullest
        moment."""
        held, before = known.held, self.event
        start, end = 0, self.width - before % self.width
        last = -1, NOTHING
        while start < len(held):
            part = held[start:end]
            highest = max(part)
            if self.total + highest > self.highest:
                place = start + part.index(highest)
                self.highest = self.total + highest
                until = known.by.get(place) or known.by.setdefault(place, events.until(place, last))
                last = place, until
                by = tuple(map(int.__add__, self.by, until))
                one, begins = self._at(place, known, events, frame)
                self.largest = Point(before + place + 1, by, one, begins, self.phase)
            if end <= len(held):
                self.flush()
            start, end = end, end + self.width
        self.event = before + len(held)

    def _at(self, place: int, known: _Summary, events: Pass, frame: list[int]) -> tuple[Live, bool]:
        """What the operation at ``place`` begins or ends, and whether it begins."""
        slot, units, size, category, _ = events.operations[place]
        began = place if units > 0 else known.begun.get(place, events.operations.began(place))
        if began < 0:
            return _named(*self.live[frame[slot]]), False
        return Live(size, category, known.names[began], self.microbatch), units > 0

    def _begin(self, size: int, category: int, names: Sequence[Tensor], at: int) -> int:
        """The number of a tensor that begins."""
        self.count += 1
        self.live[self.count] = one = size, category, names, at, self.microbatch
        self.by[category] += size
        self.total += size
        if self.total == self.most and not self.found and self.by == self.wanted:
            self.found = tuple(starmap(_named, self.live.values()))
        if self.width:
            self._follow(one, begins=True)
        return self.count

    def _end(self, number: int, size: int, category: int) -> None:
        one = self.live.pop(number)
        self.by[category] -= size
        self.total -= size
        if self.width:
            self._follow(one, begins=False)

    def _follow(self, one: tuple[int, int, Sequence[Tensor], int, int | None], *, begins: bool) -> None:
        """An event of the iteration that is recorded."""
        self.event += 1
        if self.total > self.highest:
            self.highest = self.total
            self.largest = Point(self.event, tuple(self.by), _named(*one), begins, self.phase)
        if not self.event % self.width:
            self.flush()

    def flush(self) -> None:
        """Ends a point."""
        if self.largest is not None:
            self.points.append(self.largest)
        self.largest, self.highest = None, -1


def _named(size: int, category: int, names: Sequence[Tensor], at: int, microbatch: int | None) -> Live:
    return Live(size, category, names[at], microbatch)


class _Recording(NamedRun):
    """A run of an iteration whose events are counted first."""

    rank: _Recorder

    def events_of(self, actions: Iterable[Action]) -> int:
        """About how many there are in an iteration."""
        role, step = self.program.order.role, (*self.program.step, *self.program.late_step)
        passes = (
            len(self.chunks[one.chunk].passes.of(one.what, role(one.microbatch)).operations)
            if one.tensor is None and one.what not in WHOLE
            else 1
            for one in actions
        )
        return sum(passes) + len(step)

    def begin_all(self, chunk: int, tensor: str, count: int) -> None:
        size, category, stream = self.begun.get((chunk, tensor)) or self._known(chunk, tensor)
        self._between(f"{tensor} of {count:,} micro-batches", None)
        block = self.rank.hold(size * count, category)
        self.between[tensor, chunk, -1] = block, size * count, category, stream

    def end_all(self, chunk: int, tensor: str, count: int) -> None:
        found = self.between.pop((tensor, chunk, -1), None)
        if found is not None:
            self.rank.drop(*found)


BACKWARD = ("backward", "reduce", "backward_piece")


@lru_cache(maxsize=64)
def _between_stages(tensor: str, phase: str) -> Tensor:
    return Tensor(tensor, "pipeline", phase)


@lru_cache(maxsize=256)
def _names(
    chunk: Chunk, passes: Passes, what: What, role: Role, phase: str, start: int = 0, end: int | None = None
) -> Names:
    spans = chunk.unrolled or (*chunk.spans, *chunk.losses)
    modules = [name for span in spans for name in span.names]
    return Names([(modules[place], events) for place, events in passes.events(what, role)], phase, start, end)


ENDS = Tensor("")
"""An operation that ends a tensor, which has a name already."""


POOL_BITS = 47
"""Bytes of addresses of one pool: each has its own numbering."""


class Request(NamedTuple):
    """A tensor that begins. Sizes in bytes."""

    tensor: Tensor
    category: int
    microbatch: int | None
    iteration: int
    """Counted from 1; 0 before the first one."""
    size: int
    """As the tape has it: rounded to 512."""
    address: int
    block: int
    """What the allocator hands out for it."""
    tried: int
    """The segment that it would ask the device for if no free block served: what PyTorch's message names."""
    allocated: int
    """Of the process, before it."""
    stream: int


class Witness(Protocol):
    """Who is told."""

    def begins(self, request: Request) -> None:
        """A tensor has its block."""

    def ends(self, address: int, size: int, stream: int) -> None:
        """The tensor at ``address`` is given back."""

    def reserves(self, address: int, size: int, stream: int) -> None:
        """The allocator takes a segment, or pages of an expandable one."""


class _RecordingRank(NamingRank):
    """A rank that tells each of its requests."""

    __slots__ = ("bases", "iteration", "stepping", "witness")

    def __init__(self, settings: AllocatorSettings, witness: Witness) -> None:
        super().__init__(settings)
        self.witness = witness
        self.iteration = 0
        self.stepping = False
        self.bases: dict[tuple[int, bool], int] = {}
        """Of each pool, by its stream and whether it is of small blocks."""

    @property
    def steps(self) -> bool:
        return self.stepping

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        self.by[category] += size
        return self._begin(self.label, size, self.settings.units(size), category, stream)

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        super().drop(block, size, category, stream)
        if block != NO_BLOCK:
            self.witness.ends(self._address(block, stream), size, stream)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        names = self.names_of(events, start)
        for (slot, units, size, category, stream), name in zip(events.operations, names, strict=True):
            if units > 0:
                self.by[category] += size
                frame[slot] = self._begin(name, size, units, category, stream)
            else:
                self.drop(frame[slot], size, category, stream)

    def _begin(self, name: Tensor, size: int, units: int, category: int, stream: int) -> int:
        if not units:
            return NO_BLOCK
        pool = self.pool(stream, small=units <= LARGEST_SMALL)
        before, reserved, top = self.allocated << UNIT_BITS, pool.reserved, pool.top
        block = self.take(pool, units)
        if pool.reserved > reserved:
            start = self._address(top if pool.top > top else block & ADDRESS, stream, pool)
            self.witness.reserves(start, pool.reserved - reserved << UNIT_BITS, stream)
        self.allocated += block >> SHIFT
        tried = pool.segment_size(units) << UNIT_BITS
        at, length = self._address(block, stream, pool), block >> SHIFT << UNIT_BITS
        self.witness.begins(
            Request(name, category, self.microbatch, self.iteration, size, at, length, tried, before, stream)
        )
        return block

    def _address(self, code: int, stream: int, pool: SegmentPool | None = None) -> int:
        small = (code >> SHIFT) <= LARGEST_SMALL if pool is None else pool is self.small.get(stream)
        base = self.bases.setdefault((stream, small), 1 + len(self.bases))
        return (base << POOL_BITS) + ((code & ADDRESS) << UNIT_BITS)


class _RecordingRun(NamedRun):
    """A run whose states are called after their parameters."""

    rank: _RecordingRank

    def construct(self) -> Iterable[Event]:
        return construction(self.program, named=True)

    def first_states(self) -> Iterable[Hold]:
        return states(self.program, named=True)

    def iteration(self) -> None:
        self.rank.iteration += 1
        self.rank.stepping = False
        self.begin()
        self.iterate(list(self.program.order.shortened))
        self.rank.stepping = True


def record(program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold], witness: Witness) -> Rank:
    """Tells ``witness`` of ``program``'s construction, of its first iteration with the first step, and of the one after
    it where that differs; as ``replay`` runs them, on a device without end. The rank as it is then."""
    rank = _RecordingRank(settings, witness)
    run = _RecordingRun(program, rank, workspaces_of(program, workspaces))
    run.iteration()
    if run.second_differs:
        run.first_step()
        run.iteration()
    run.step()
    return rank
