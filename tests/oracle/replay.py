"""A program with one micro-batch in flight, replayed event by event: what ``memplan.allocator.replay`` must equal.

Tensors are known by micro-batch, place of the module and id; every request goes to ``CachingAllocator`` by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import Replayed
from memplan.layers.module import SHARED, Tapes
from memplan.schedules.one_chunk import PAIRS
from memplan.tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Hold, Tape
from memplan.tape.program import Program, Span
from tests.oracle.caching_allocator import CachingAllocator

Key = tuple[int, ...]
"""Micro-batch, place of the module (−1 for tensors that modules share), id. Static tensors count micro-batches down."""


class StreamedRank:
    """One rank's memory while its events run."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings)
        self.by = [0] * len(Category)
        self.peak = 0
        self.peak_by = self.by[:]
        self.live: dict[Key, tuple[int, Category]] = {}
        self.carried: dict[tuple[int, int], Key] = {}
        """Gradients that a micro-batch has left, by place and id."""
        self.statics = 0

    def hold(self, key: Key, hold: Hold) -> None:
        allocator, size, category = self.allocator, hold.bytes, hold.category
        allocator.allocate(key, size, hold.stream)
        self.live[key] = size, category
        self.by[category] += size
        if allocator.allocated > self.peak:
            self.peak, self.peak_by = allocator.allocated, self.by[:]

    def drop(self, key: Key) -> None:
        if key not in self.live:
            key = self.carried.pop((key[1], key[2]))
        size, category = self.live.pop(key)
        self.allocator.free(key)
        self.by[category] -= size

    def rename(self, key: Key, category: Category) -> None:
        """A sum takes the place of the gradient that has ended."""
        size, before = self.live[key]
        self.live[key] = size, category
        self.by[before] -= size
        self.by[category] += size

    def keep(self, hold: Hold) -> Key:
        """Something that no micro-batch holds. Returns its key."""
        self.statics += 1
        key = (-self.statics, 0, 0)
        self.hold(key, hold)
        return key

    def run(self, tape: Tape, microbatch: int, place: int, input: Key | None, gradient: Key | None) -> None:
        neighbours = {INPUT: input, GRAD_OUTPUT: gradient}
        hold, drop = self.hold, self.drop
        for event in tape:
            if isinstance(event, Hold):
                hold(_key(microbatch, place, event.tensor), event)
            elif isinstance(event, Drop):
                id = event.tensor
                key = (microbatch, place, id) if id > 0 else neighbours.get(id) or (microbatch, -1, id)
                kind = self.live[key][1] if key in self.live else event.category
                drop(key)
                if (kind, event.category) == (Category.GRADIENTS, Category.WORKSPACES):
                    self.rename(next(reversed(self.live)), kind)

    def microbatch(self, number: int, spans: Sequence[Span], first: bool) -> None:
        """Forward and backward; the gradients that stay are carried on."""
        modules = [span.module for span in spans for _ in span.names]
        inputs: list[Key | None] = []
        handed: Key | None = None
        for place, module in enumerate(modules):
            inputs.append(handed)
            self.run(module.steady.forward, number, place, handed, None)
            handed = _handed(module.steady.output, number, place) or handed
        gradient: Key | None = None
        for place in reversed(range(len(modules))):
            tapes: Tapes = modules[place].first if first else modules[place].steady
            self.run(tapes.backward, number, place, inputs[place], gradient)
            gradient = _handed(tapes.grad_input, number, place) or gradient
        for key, (_, category) in self.live.items():
            if key[0] == number and category is Category.GRADIENTS:
                self.carried[key[1], key[2]] = key

    def step(self, tape: Tape) -> None:
        """The optimizer's step, after which gradients end."""
        held: dict[int, Key] = {}
        for event in tape:
            if isinstance(event, Hold):
                held[event.tensor] = self.keep(event)
            elif isinstance(event, Drop):
                self.drop(held.pop(event.tensor))
        for key in self.carried.values():
            self.drop(key)
        self.carried.clear()

    def replayed(self, first_iteration: int) -> Replayed:
        """What has been taken by now."""
        breakdown = self.peak_by[:]
        breakdown[Category.BLOCK_ROUNDING] = self.peak - sum(breakdown)
        allocator = self.allocator
        return Replayed(self.peak, allocator.reserved, tuple(breakdown), allocator.allocated, first_iteration)


def _key(microbatch: int, place: int, id: int) -> Key:
    return (microbatch, place, id) if id > 0 else (microbatch, -1, id)


def _handed(id: int, microbatch: int, place: int) -> Key | None:
    """What a module hands to the next in line; ``None`` where that is what it was handed itself."""
    return _key(microbatch, place, id) if id > 0 or id <= SHARED else None


def replay_one_by_one(program: Program, settings: AllocatorSettings, workspaces: Iterable[Hold]) -> Replayed:
    """What ``program`` takes."""
    assert program.order.in_flight == 1, "one micro-batch is in flight at a time"
    rank = StreamedRank(settings)
    for hold in (*states_of(program, late=False), *program.extra, *workspaces):
        rank.keep(hold)
    _microbatches(rank, program)
    first_iteration = rank.allocator.reserved
    for hold in (*states_of(program, late=True), *program.late_extra):
        rank.keep(hold)
    rank.step(program.step)
    rank.peak = 0
    _microbatches(rank, program)
    rank.step(program.step)
    return rank.replayed(first_iteration)


def _microbatches(rank: StreamedRank, program: Program) -> None:
    count = min(PAIRS, program.microbatches)
    for number in range(count):
        spans = program.last if program.last and number == count - 1 else program.spans
        rank.microbatch(number, spans, first=number == 0)


def states_of(program: Program, *, late: bool) -> Iterator[Hold]:
    """States that are there from the beginning, kind by kind; or those of the first step, parameter by parameter."""
    early = [state for state in program.states if state.category is not Category.OPTIMIZER_STATES]
    made_late = [state for state in program.states if state.category is Category.OPTIMIZER_STATES]
    tensors = program.parameter_tensors()
    pairs = (
        ((state, tensor) for tensor in tensors for state in made_late)
        if late
        else ((state, tensor) for state in early for tensor in tensors)
    )
    for state, tensor in pairs:
        hold = state.hold(tensor, 0)
        if hold is not None:
            yield hold
