"""A program's events, unrolled and replayed through PyTorch's caching allocator.

The fold knows what is requested; the allocator decides what that costs in blocks (*allocated*) and
segments (*reserved*). Both depend on the order of events, so here they are run one by one: building
the optimizer, micro-batches as the schedule orders them, the step. Three backward passes are run
where the schedule has more, since from the second on they are alike; what then remains in flight is
dropped without its backward, which only frees memory.

Stages with equal modules differ in how many forward passes they run before the first backward, and
those passes are prefixes of one another: they are run once, and every stage branches off a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .allocator import AllocatorSettings, CachingAllocator
from .frameworks.states import State
from .layers.module import GRAD_OUTPUT, INPUT, SHARED, STALE, Parameter, Tapes
from .program import SLOT, Gradients, Program, Span
from .tape import Bytes, Category, Drop, Hold, Tape

PAIRS = 3
"""Backward passes that stand for all of an iteration's."""

MODULE = 1 << 13
MICROBATCH = 1 << 26
"""Strides of keys: tensors within a module, modules within a micro-batch."""

_CATEGORIES = len(Category)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one rank's steady iteration took, in bytes."""

    allocated: int
    reserved: int
    breakdown: Bytes
    """Live at the peak of ``allocated``, by category, summing to it."""
    static: int
    """Allocated between iterations."""
    first_iteration: int
    """Reserved at the end of the first iteration's micro-batches, before any optimizer step was applied."""


class Rank:
    """One rank's memory while its events run."""

    __slots__ = ("allocated", "allocator", "by", "gradients", "live", "next_static", "peak", "peak_by", "slots")

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings)
        self.allocated = 0
        self.by = [0] * _CATEGORIES
        self.peak = 0
        self.peak_by: list[int] = self.by[:]
        self.live: dict[int, tuple[int, int]] = {}
        """Bytes and category of each tensor of a micro-batch, by key."""
        self.gradients: dict[int, int] = {}
        self.slots: list[int] = []
        self.next_static = -1

    def copy(self) -> Rank:
        twin = Rank.__new__(Rank)
        twin.allocator = self.allocator.copy()
        twin.allocated, twin.by, twin.peak, twin.peak_by = self.allocated, self.by[:], self.peak, self.peak_by
        twin.live, twin.gradients, twin.slots = dict(self.live), dict(self.gradients), self.slots[:]
        twin.next_static = self.next_static
        return twin

    def hold(self, key: int, size: int, category: int) -> None:
        block = self.allocator.allocate(key, size)
        self.allocated += block
        self.by[category] += size
        if self.allocated > self.peak:
            self.peak, self.peak_by = self.allocated, self.by[:]

    def drop(self, key: int, size: int, category: int) -> None:
        self.allocator.free(key)
        self.allocated = self.allocator.allocated
        self.by[category] -= size

    def keep(self, size: int, category: int) -> int:
        """Holds something static. Returns its key."""
        key = self.next_static
        self.next_static -= 1
        self.hold(key, size, category)
        return key

    # -- modules ----------------------------------------------------------------------------------

    def run(self, tape: Tape, base: int, microbatch: int, input: int, gradient: int) -> None:
        """The events of one module of one micro-batch, with the keys of its input and its output's gradient."""
        shared = microbatch * MICROBATCH + MODULE // 2
        live = self.live
        for event in tape:
            if isinstance(event, Hold):
                id = event.tensor
                key = base + id if id > 0 else shared - id
                live[key] = (event.bytes, event.category)
                self.hold(key, event.bytes, event.category)
            elif isinstance(event, Drop):
                id = event.tensor
                if id > 0:
                    key = base + id
                elif id == INPUT:
                    key = input
                elif id == GRAD_OUTPUT:
                    key = gradient
                elif id == STALE:
                    key = self.slots.pop(0)
                else:
                    key = shared - id
                size, category = live.pop(key)
                self.drop(key, size, category)

    def forward(self, program: Program, microbatch: int) -> None:
        for base, tapes, input, slot in instances(program.spans, microbatch, False):
            self.run(tapes.forward, base, microbatch, input, 0)
            if slot:
                self.slots.append(base + slot)

    def backward(self, program: Program, microbatch: int, first: bool) -> None:
        gradient = 0
        before = set(self.live)
        for base, tapes, input, _ in reversed(instances(program.spans, microbatch, first)):
            self.run(tapes.backward, base, microbatch, input, gradient)
            if tapes.grad_input > 0:
                gradient = base + tapes.grad_input
            elif tapes.grad_input <= SHARED:
                gradient = microbatch * MICROBATCH + MODULE // 2 - tapes.grad_input
        for key in self.live.keys() - before:
            if self.live[key][1] == Category.GRADIENTS:
                self.gradients[key] = self.live.pop(key)[0]

    def end_gradients(self, keep: int = 0) -> None:
        """Drops gradients, but for those of the first parameters up to ``keep`` bytes (a share of the first rank)."""
        kept = {}
        for key in sorted(self.gradients):
            size = self.gradients[key]
            if keep > 0:
                kept[key] = size
                keep -= size
            else:
                self.drop(key, size, Category.GRADIENTS)
        self.gradients = kept

    def end_microbatches(self) -> None:
        """Drops what the micro-batches in flight still hold, but for the slots."""
        kept = set(self.slots)
        for key in [key for key in self.live if key not in kept]:
            size, category = self.live.pop(key)
            self.drop(key, size, category)

    def step(self, tape: Tape) -> None:
        keys: dict[int, int] = {}
        for event in tape:
            if isinstance(event, Hold):
                keys[event.tensor] = self.keep(event.bytes, event.category)
            elif isinstance(event, Drop):
                self.drop(keys.pop(event.tensor), event.bytes, event.category)


def instances(spans: Sequence[Span], microbatch: int, first: bool) -> list[tuple[int, Tapes, int, int]]:
    """The modules in forward order: key base, tapes, key of the input, slot."""
    result = []
    base = microbatch * MICROBATCH
    handed = 0
    for span in spans:
        module = span.module
        tapes = module.first if first else module.steady
        for _ in span.names:
            base += MODULE
            result.append((base, tapes, handed, module.slot))
            if tapes.output > 0:
                handed = base + tapes.output
    return result


def _build(program: Program, settings: AllocatorSettings, workspaces: Iterable[Hold]) -> Rank:
    """Parameters, optimizer and buffers, in the order in which they are made."""
    rank = Rank(settings)
    early = [state for state in program.states if not _is_late(program, state.category)]
    tensors = program.parameter_tensors()
    grouped = sorted(tensors, key=lambda parameter: len(parameter.shape) <= 1)  # Megatron's groups: matrices first
    originals = [(rank.keep(hold.bytes, hold.category), hold) for hold in program.originals]
    for key, hold in originals:
        rank.drop(key, hold.bytes, hold.category)
    for state in early:
        if state.category is Category.PARAMETERS:
            _keep_all(rank, state, tensors)
        elif state.category is not Category.OPTIMIZER_STATES:
            _keep_all(rank, state, grouped)
    keys = [(rank.keep(hold.bytes, hold.category), hold) for hold in program.building]
    for parameter in grouped:
        for state in early:
            if state.category is Category.OPTIMIZER_STATES:
                _keep_all(rank, state, [parameter])
    for key, hold in keys:
        rank.drop(key, hold.bytes, hold.category)
    for hold in program.extra:
        if hold.name == SLOT:
            key = rank.keep(hold.bytes, hold.category)
            rank.live[key] = (hold.bytes, hold.category)
            rank.slots.append(key)
        else:
            rank.keep(hold.bytes, hold.category)
    for hold in workspaces:
        rank.keep(hold.bytes, hold.category)
    return rank


def _keep_all(rank: Rank, state: State, parameters: Iterable[Parameter]) -> None:
    for parameter in parameters:
        size = state.size(parameter)
        if size:
            rank.keep(size, state.category)


def _is_late(program: Program, category: Category) -> bool:
    return program.late_states and category is Category.OPTIMIZER_STATES


def replay(
    programs: Sequence[Program], settings: AllocatorSettings, workspaces: Sequence[Hold]
) -> tuple[Replayed, ...]:
    """One result per program."""
    if programs[0].order is not None:
        from .replay_ordered import replay_ordered

        return replay_ordered(programs, settings)
    results: dict[int, Replayed] = {}
    for group in _alike(programs):
        base = _build(group[0], settings, workspaces)
        done = 0
        for program in sorted(group, key=lambda program: program.flight):
            while done < program.flight - 1:
                base.forward(program, done)
                done += 1
            results[program.stage] = _iteration(base.copy() if len(group) > 1 else base, program)
    return tuple(results[program.stage] for program in programs)


def _alike(programs: Sequence[Program]) -> list[list[Program]]:
    """Programs that differ in nothing but how many micro-batches are in flight."""
    groups: dict[tuple[object, ...], list[Program]] = {}
    for program in programs:
        modules = tuple((id(span.module), len(span.names)) for span in program.spans)
        key = (modules, program.extra, program.step, program.late_step)
        groups.setdefault(key, []).append(program)
    return list(groups.values())


def _iteration(rank: Rank, program: Program) -> Replayed:
    """From the last warm-up forward to the end of the step; twice where states appear in the first step."""
    _microbatches(rank, program, program.flight - 1)
    first_iteration = rank.allocator.peak_reserved
    if program.late_states:
        for parameter in program.parameter_tensors():
            for state in program.states:
                if state.category is Category.OPTIMIZER_STATES:
                    _keep_all(rank, state, [parameter])
        _end_of_step(rank, program)
        rank.peak = 0
        _microbatches(rank, program, program.flight - 1)
    _end_of_step(rank, program)
    breakdown = rank.peak_by[:]
    breakdown[Category.BLOCK_ROUNDING] = rank.peak - sum(breakdown)
    return Replayed(rank.peak, rank.allocator.peak_reserved, tuple(breakdown), rank.allocated, first_iteration)


def _microbatches(rank: Rank, program: Program, in_flight: int) -> None:
    """The first backward passes of an iteration, each with the forward that the schedule puts before it;
    what else is in flight is dropped."""
    for backward in range(min(PAIRS, program.microbatches)):
        if in_flight + backward < program.microbatches:
            rank.forward(program, in_flight + backward)
        rank.backward(program, backward, backward == 0 or program.gradients is Gradients.PER_MICROBATCH)
        if program.gradients is Gradients.PER_MICROBATCH:
            rank.end_gradients()
    rank.end_microbatches()


def _end_of_step(rank: Rank, program: Program) -> None:
    rank.step(program.step)
    rank.end_gradients(program.gradients_kept)
    rank.step(program.late_step)
    rank.end_gradients()
