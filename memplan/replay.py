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

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from ._blocks import LARGEST_SMALL, SHIFT, UNIT_BITS
from .allocator import AllocatorSettings
from .frameworks.states import State
from .layers.module import Parameter
from .passes import Operation, Pass, passes
from .program import SLOT, Gradients, Program
from .tape import Bytes, Category, Drop, Hold, Tape

PAIRS = 3
"""Backward passes that stand for all of an iteration's."""

NO_BLOCK = 0
"""An empty tensor's, which never reaches the allocator."""

Peak = tuple[tuple[int, ...], Pass | None, int]
"""Bytes by category when a pass began, the pass, and the event in it with which the peak was reached."""


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
    """One rank's memory while its events run. A tensor is known by its pool's code of its block."""

    __slots__ = ("allocated", "by", "large", "peak", "peak_at", "settings", "small")

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.small, self.large = settings.pool(small=True), settings.pool(small=False)
        self.allocated = 0
        """Units, as ``peak``."""
        self.by = [0] * len(Category)
        """Requested bytes, by category."""
        self.peak = 0
        self.peak_at: Peak = (tuple(self.by), None, 0)

    def copy(self) -> Rank:
        twin = Rank.__new__(Rank)
        twin.settings = self.settings
        twin.small, twin.large = self.small.copy(), self.large.copy()
        twin.allocated, twin.by, twin.peak, twin.peak_at = self.allocated, self.by[:], self.peak, self.peak_at
        return twin

    @property
    def reserved(self) -> int:
        """Bytes; the most there ever were, since nothing is given back."""
        return self.small.reserved + self.large.reserved << UNIT_BITS

    def hold(self, size: int, category: int) -> int:
        """The block of a tensor."""
        self.by[category] += size
        units = self.settings.units(size)
        if not units:
            return NO_BLOCK
        block = (self.small if units <= LARGEST_SMALL else self.large).take(units)
        self.allocated += block >> SHIFT
        if self.allocated > self.peak:
            self.peak, self.peak_at = self.allocated, (tuple(self.by), None, 0)
        return block

    def drop(self, block: int, size: int, category: int) -> None:
        self.by[category] -= size
        if block == NO_BLOCK:
            return
        units = self.settings.units(size)
        (self.small if units <= LARGEST_SMALL else self.large).give(block)
        self.allocated -= block >> SHIFT

    def run(self, events: Pass, frame: list[int]) -> None:
        """The events of one pass of one micro-batch, whose blocks ``frame`` holds by slot."""
        limit = self.peak - self.allocated
        if events.small:
            self.small.run_all(events.small, frame, limit)
        beyond, limit, highest = self.large.run_all(events.large, frame, limit)
        if highest >= 0:
            self.peak, self.peak_at = self.allocated + limit, (tuple(self.by), events, highest)
        self.allocated += events.net + beyond
        for category, size in events.net_by:
            self.by[category] += size

    def breakdown(self) -> Bytes:
        """Live at the peak, by category, summing to it."""
        by, events, place = self.peak_at
        found = list(map(int.__add__, by, events.until(place))) if events is not None else list(by)
        found[Category.BLOCK_ROUNDING] = (self.peak << UNIT_BITS) - sum(found)
        return tuple(found)


class _Job:
    """One rank through its micro-batches and its step."""

    def __init__(self, rank: Rank, program: Program) -> None:
        self.rank = rank
        self.passes = passes(program.unrolled or program.spans, rank.settings)
        self.frames: dict[int, list[int]] = {}
        """Of the micro-batches in flight."""
        self.rest: list[tuple[int, Operation]] = []
        """Blocks that micro-batches have left until all have ended."""
        self.gradients: list[tuple[int, int]] = []
        """Blocks and bytes, in the order of the parameters."""
        self.slots: deque[int] = deque()
        """Blocks of tensors that a later micro-batch displaces."""

    def copy(self) -> _Job:
        twin = copy(self)
        twin.rank = self.rank.copy()
        twin.frames = {microbatch: frame[:] for microbatch, frame in self.frames.items()}
        twin.rest, twin.gradients, twin.slots = self.rest[:], self.gradients[:], self.slots.copy()
        return twin

    def forward(self, microbatch: int) -> None:
        passes = self.passes
        frame = self.frames[microbatch] = [NO_BLOCK] * passes.slots
        for slot in passes.stale:
            frame[slot] = self.slots.popleft()
        self.rank.run(passes.forward, frame)
        self.slots.extend(frame[slot] for slot in passes.staying)

    def backward(self, microbatch: int, first: bool) -> None:
        events = self.passes.first if first else self.passes.steady
        frame = self.frames.pop(microbatch)
        self.rank.run(events, frame)
        for operation in events.left:
            block = frame[operation.slot]
            if operation.category is Category.GRADIENTS:
                self.gradients.append((block, operation.bytes))
            elif operation.slot not in self.passes.staying:
                self.rest.append((block, operation))

    def end_gradients(self, keep: int = 0) -> None:
        """Drops gradients, but for those of the first parameters up to ``keep`` bytes (a share of the first rank)."""
        kept = []
        for block, size in self.gradients:
            if keep > 0:
                kept.append((block, size))
                keep -= size
            else:
                self.rank.drop(block, size, Category.GRADIENTS)
        self.gradients = kept

    def end_microbatches(self) -> None:
        """Drops what the micro-batches in flight still hold, but for what stays in slots."""
        for frame in self.frames.values():
            left = self.passes.forward.left
            self.rest += [(frame[one.slot], one) for one in left if one.slot not in self.passes.staying]
        self.frames.clear()
        for block, operation in self.rest:
            self.rank.drop(block, operation.bytes, operation.category)
        self.rest.clear()

    def step(self, tape: Tape) -> None:
        blocks: dict[int, int] = {}
        for event in tape:
            if isinstance(event, Hold):
                blocks[event.tensor] = self.rank.hold(event.bytes, event.category)
            elif isinstance(event, Drop):
                self.rank.drop(blocks.pop(event.tensor), event.bytes, event.category)


def _build(program: Program, settings: AllocatorSettings, workspaces: Iterable[Hold]) -> _Job:
    """Parameters, optimizer and buffers, in the order in which they are made."""
    rank = Rank(settings)
    job = _Job(rank, program)
    early = [state for state in program.states if not _is_late(program, state.category)]
    tensors = program.parameter_tensors()
    grouped = sorted(tensors, key=lambda parameter: len(parameter.shape) <= 1)  # Megatron's groups: matrices first
    originals = [(rank.hold(hold.bytes, hold.category), hold) for hold in program.originals]
    for block, hold in originals:
        rank.drop(block, hold.bytes, hold.category)
    for state in early:
        if state.category is Category.PARAMETERS:
            _keep_all(rank, state, tensors)
        elif state.category is not Category.OPTIMIZER_STATES:
            _keep_all(rank, state, grouped)
    building = [(rank.hold(hold.bytes, hold.category), hold) for hold in program.building]
    for parameter in grouped:
        for state in early:
            if state.category is Category.OPTIMIZER_STATES:
                _keep_all(rank, state, [parameter])
    for block, hold in building:
        rank.drop(block, hold.bytes, hold.category)
    for hold in program.extra:
        block = rank.hold(hold.bytes, hold.category)
        if hold.name == SLOT:
            job.slots.append(block)
    for hold in workspaces:
        rank.hold(hold.bytes, hold.category)
    return job


def _keep_all(rank: Rank, state: State, parameters: Iterable[Parameter]) -> None:
    for parameter in parameters:
        size = state.size(parameter)
        if size:
            rank.hold(size, state.category)


def _is_late(program: Program, category: Category) -> bool:
    return program.late_states and category is Category.OPTIMIZER_STATES


def replay(
    programs: Sequence[Program], settings: AllocatorSettings, workspaces: Sequence[Hold]
) -> tuple[Replayed, ...]:
    """One result per program."""
    if programs[0].order is not None:
        from .replay_ordered import replay_ordered

        return replay_ordered(programs, settings)
    if programs[0].timeline is not None:
        from .replay_timeline import replay_timeline

        return tuple(replay_timeline(program, settings, workspaces) for program in programs)
    if programs[0].streams:
        from .replay_streams import replay_streams

        return tuple(replay_streams(program, settings, workspaces) for program in programs)
    results: dict[int, Replayed] = {}
    for group in _alike(programs):
        base = _build(group[0], settings, workspaces)
        done = 0
        for program in sorted(group, key=lambda program: program.flight):
            while done < program.flight - 1:
                base.forward(done)
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


def _iteration(job: _Job, program: Program) -> Replayed:
    """From the last warm-up forward to the end of the step; twice where states appear in the first step."""
    rank = job.rank
    _microbatches(job, program, program.flight - 1)
    first_iteration = rank.reserved
    if program.late_states:
        for parameter in program.parameter_tensors():
            for state in program.states:
                if state.category is Category.OPTIMIZER_STATES:
                    _keep_all(rank, state, [parameter])
        for hold in program.late_extra:
            rank.hold(hold.bytes, hold.category)
        _end_of_step(job, program)
        rank.peak = 0
        _microbatches(job, program, program.flight - 1)
    _end_of_step(job, program)
    return replayed(rank, first_iteration)


def replayed(rank: Rank, first_iteration: int) -> Replayed:
    """What a rank has taken by now."""
    static, peak = rank.allocated << UNIT_BITS, rank.peak << UNIT_BITS
    return Replayed(peak, rank.reserved, rank.breakdown(), static, first_iteration)


def _microbatches(job: _Job, program: Program, in_flight: int) -> None:
    """The first backward passes of an iteration, each with the forward that the schedule puts before it;
    what else is in flight is dropped."""
    for backward in range(min(PAIRS, program.microbatches)):
        if in_flight + backward < program.microbatches:
            job.forward(in_flight + backward)
        job.backward(backward, backward == 0 or program.gradients is Gradients.PER_MICROBATCH)
        if program.gradients is Gradients.PER_MICROBATCH:
            job.end_gradients()
    job.end_microbatches()


def _end_of_step(job: _Job, program: Program) -> None:
    job.step(program.step)
    job.end_gradients(program.gradients_kept)
    job.step(program.late_step)
    job.end_gradients()
