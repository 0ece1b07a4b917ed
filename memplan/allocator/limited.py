"""A program's events on a device whose memory ends: does every request get its block, and what does that take?

Passes run as in a replay without a limit, on the supposition that memory suffices. What a pass reserves only grows, and
by as much in whatever order its pools are served; so where it is more than there is in the end, some request found no
memory. Then the pass is taken back and run in parts, and the part that finds too little again, one request after the
other, in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NoReturn

from ..result import Failure
from ..tape.events import Category, Event, Hold
from ..tape.program import WHOLE, Action, Program, What, forward_passes
from ..values import dataclass
from .blocks import LARGEST_SMALL, SHIFT, SMALL_SEGMENT, SegmentPool
from .caching import AllocatorSettings
from .construction import workspaces_of
from .memory import DeviceMemory, Memory, OutOfMemoryError
from .passes import Pass, parts_of
from .rank import Rank
from .replay import Run


@dataclass(frozen=True, slots=True)
class Within:
    """How a rank does with the memory that there is."""

    failure: Failure | None
    retries: int = 0
    """How often it gives cached memory back and tries again, from the beginning through an iteration after the first
    step;"""
    retries_in_iteration: int = 0
    """and, at most, in one of the iterations that come again and again after that."""
    partial: bool = False
    """An iteration has more micro-batches than were replayed, so that there may be more retries."""
    reserved: int = 0
    """Bytes, behind the last step that was replayed; 0 where a request failed."""


PART = 512
"""Operations of a pass that are run on the supposition that memory suffices."""


class LimitedRank(Rank):
    """A rank that shares a device's memory among its pools. ``OutOfMemoryError`` where a request fails."""

    __slots__ = ("failed_at", "memory", "short")

    def __init__(self, settings: AllocatorSettings, device: DeviceMemory) -> None:
        super().__init__(settings)
        self.memory = Memory(settings, device, self.small, self.large)
        self.failed_at = 0
        """Which of a pass's operations failed."""
        self.short: set[int] = set()
        """Passes that found too little memory before: they are run part by part from the start."""

    def new_pool(self, small: bool) -> SegmentPool:
        return self.settings.pool(small, self.memory.total)

    def take(self, pool: SegmentPool, units: int) -> int:
        block = self.memory.take(pool, units)
        if not block:
            raise self.memory.error(pool, units, self.allocated)
        return block

    def fill(self, segments: int, size: int, category: int) -> None:
        self.memory.full += segments * SMALL_SEGMENT
        if self.memory.over():
            self.memory.release()
            self.memory.retries += 1
        if self.memory.over():
            self.memory.full -= segments * SMALL_SEGMENT
            raise self.memory.error(self.pool(0, small=True), self.settings.units(size), self.allocated)
        super().fill(segments, size, category)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        self.failed_at = start
        if id(events) not in self.short and self.memory.collect_above is None and self._suffices(events, frame):
            return
        self.short.add(id(events))
        for part in parts_of(events, PART):
            if self.memory.collect_above is not None or not self._suffices(part, frame):
                self._run_one_by_one(part, frame)
            self.failed_at += len(part.operations)

    def layout(self) -> object:
        """How memory is cut up. Two that are equal stay equal with the same requests."""
        pools = [(small, *one) for small, own in ((True, self.small), (False, self.large)) for one in own.items()]
        return tuple((small, stream, pool.layout()) for small, stream, pool in sorted(pools, key=itemgetter(0, 1)))

    def _suffices(self, part: Pass, frame: list[int]) -> bool:
        """Whether memory suffices for ``part``, which then has been run."""
        small, large = (
            {stream: pools[stream].copy() for stream, _ in runs if stream in pools}
            for pools, runs in ((self.small, part.small), (self.large, part.large))
        )
        before = frame[:], self.allocated, self.by[:], self.peak, self.peak_at
        super().run(part, frame)
        if not self.memory.over():
            return True
        for pools, kept, runs in ((self.small, small, part.small), (self.large, large, part.large)):
            for stream, _ in runs:
                pools.pop(stream, None)
            pools.update(kept)
        frame[:], self.allocated, self.by, self.peak, self.peak_at = before
        return False

    def _run_one_by_one(self, part: Pass, frame: list[int]) -> None:
        began, first = tuple(self.by), self.failed_at
        for at, (slot, units, size, category, stream) in enumerate(part.operations):
            if units > 0:
                self.failed_at = first + at
                small = units <= LARGEST_SMALL
                pool = (self.small if small else self.large).get(stream) or self.pool(stream, small=small)
                frame[slot] = block = self.take(pool, units)
                self.by[category] += size
                self.allocated += block >> SHIFT
                if self.allocated > self.peak:
                    self.peak, self.peak_at = self.allocated, (began, part, at)
            else:
                self.drop(frame[slot], size, category, stream)
        self.failed_at = first


class _LimitedRun(Run):
    """A run that knows where it is."""

    rank: LimitedRank

    def __init__(self, program: Program, rank: LimitedRank, workspaces: Sequence[Hold]) -> None:
        self.moment, self.iteration = "initialisation", 0
        super().__init__(program, rank, workspaces)
        self.moment = "steady"

    def iterate_once(self, actions: Sequence[Action], step: Callable[[], None]) -> None:
        """The next iteration, and a step."""
        self.iteration += 1
        self.begin()
        self.iterate(actions)
        step()

    def keep(self, tape: Iterable[Event]) -> None:
        for event in tape:
            self._keep(event)

    def _keep(self, event: Event) -> None:
        try:
            super().keep((event,))
        except OutOfMemoryError as error:
            assert isinstance(event, Hold)
            name = event.name or Category(event.category).key
            phase = "step" if self.moment == "steady" else ""
            self._fails(error, phase, "optimizer" if phase else "", name, None)

    def run(self, what: What, number: int, microbatch: int) -> None:
        chunk, role = self.chunks[number], self.program.order.role(microbatch)
        whole = WHOLE.get(what, what)
        start = chunk.next_piece(WHOLE[what], microbatch, role)[0] if what in WHOLE else 0
        try:
            super().run(what, number, microbatch)
        except OutOfMemoryError as error:
            place, tensor = chunk.passes.name(whole, role, start + self.rank.failed_at)
            spans = chunk.chunk.unrolled or (*chunk.chunk.spans, *chunk.chunk.losses)
            module = [name for span in spans for name in span.names][place]
            self._fails(error, "forward" if whole in ("forward", "loss") else "backward", module, tensor, microbatch)

    def receive(self, tensor: str, chunk: int, number: int, known: tuple[int, int, int]) -> int:
        try:
            return super().receive(tensor, chunk, number, known)
        except OutOfMemoryError as error:
            backward = tensor in ("loss_gradient", "input_gradient", "output_gradient")
            self._fails(error, "backward" if backward else "forward", "", tensor, number)

    def fill(self, tensor: str, segments: int, known: tuple[int, int, int]) -> None:
        try:
            super().fill(tensor, segments, known)
        except OutOfMemoryError as error:
            self._fails(error, "forward", "", tensor, None)

    def _fails(self, error: OutOfMemoryError, phase: str, module: str, tensor: str, microbatch: int | None) -> NoReturn:
        held = error.allocated, error.reserved
        what = phase, module, tensor, microbatch, error.size, error.tried
        raise _FailedError(Failure(self.moment, *what, *held, self.iteration)) from error


class _FailedError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


MOST_ITERATIONS = 32
"""Iterations in which memory is short that are run until one leaves the allocator as an earlier one left it."""


def replay_within(
    program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold], device: DeviceMemory
) -> Within:
    """``program`` on ``device``: its first iterations as ``replay`` runs them, and if memory was short further ones, as
    free memory may fall into smaller pieces from each to the next before a request fails."""
    rank = LimitedRank(settings, device)
    memory = rank.memory
    actions = list(program.order.shortened)
    partial = len(forward_passes(actions)) < program.order.microbatches * len(program.order.chunks)
    retries: list[int] = []
    try:
        run = _LimitedRun(program, rank, workspaces_of(program, workspaces))
        run.iterate_once(actions, run.first_step if run.second_differs else run.step)
        if run.second_differs:
            run.iterate_once(actions, run.step)
        first = memory.retries
        left: dict[object, int] = {rank.layout(): 0} if first else {}
        while left and len(retries) < MOST_ITERATIONS:
            before = memory.retries
            run.end_carried()
            run.iterate_once(actions, run.step)
            retries.append(memory.retries - before)
            again = left.setdefault(rank.layout(), len(retries))
            if again < len(retries):
                return Within(None, first, max(retries[again:]), partial, rank.most_reserved)
    except _FailedError as failed:
        return Within(failed.failure, memory.retries)
    return Within(None, first, retries[-1] if retries else 0, partial, rank.most_reserved)
