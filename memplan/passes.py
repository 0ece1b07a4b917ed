"""Tapes of modules made ready for replaying: one flat list of operations for a pass of one micro-batch.

A micro-batch's tensors lie in a *frame*, one slot each: those that modules share first, then those of every module
in a row. What a tape refers to by its neighbour's role (its input, the gradient of its output) is a slot of the
neighbour here, so that nothing is looked up by name while a pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ._blocks import LARGEST_SMALL, SHIFT, Step, Stretch
from .allocator import AllocatorSettings
from .layers.module import GRAD_OUTPUT, INPUT, SHARED, STALE, Module, Tapes
from .program import Span
from .tape import NOTHING, Bytes, Category, Drop, Hold, Tape

NEVER = -1 << SHIFT
"""Fewer units than any peak."""


class Operation(NamedTuple):
    """A tensor begins or ends."""

    slot: int
    """In a module's own list: the tensor's id."""
    units: int
    """What the request is rounded up to, in units of 512 B; negative where the tensor ends."""
    bytes: int
    category: Category


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """Forward or backward of one micro-batch through a row of modules."""

    operations: tuple[Operation, ...]
    small: tuple[Stretch, ...]
    """The operations that small blocks serve, which never exceed requests: peaks are looked for in ``large``."""
    large: tuple[Stretch, ...]
    """The others; held units count both."""
    handed: int
    """Slot of what the next in line gets: output or gradient of the input; 0 where there is none."""
    left: tuple[Operation, ...]
    """Of the micro-batch's tensors, what is live behind the pass, by slot; begun in this pass or an earlier one."""
    net: int
    """Units."""
    net_by: tuple[tuple[int, int], ...]
    """Category and bytes, where it is not 0."""

    def until(self, place: int) -> Bytes:
        """Change of bytes by category through the operation at ``place``."""
        by = list(NOTHING)
        for operation in self.operations[: place + 1]:
            by[operation.category] += operation.bytes if operation.units > 0 else -operation.bytes
        return tuple(by)


@dataclass(frozen=True, eq=False, slots=True)
class Passes:
    """What a micro-batch runs on one rank, or in one chunk of its layers."""

    slots: int
    """Size of a frame."""
    forward: Pass
    first: Pass
    """Backward, leaving gradients behind."""
    steady: Pass
    """Backward, adding to gradients."""
    stale: tuple[int, ...]
    """Slots of tensors that an earlier micro-batch left behind and that forward ends."""
    staying: tuple[int, ...]
    """Slots of those that forward leaves behind for a later one to end."""


def passes(spans: Sequence[Span], settings: AllocatorSettings) -> Passes:
    """The passes of modules in a row."""
    return _passes(tuple([(span.module, len(span.names)) for span in spans]), settings)


@lru_cache(maxsize=1 << 10)
def _passes(rows: tuple[tuple[Module, int], ...], settings: AllocatorSettings) -> Passes:
    modules = [module for module, count in rows for _ in range(count)]
    frame = _Frame(modules, settings)
    forward = frame.forward()
    before = {operation.slot: operation for operation in forward.left}
    return Passes(
        frame.size,
        forward,
        frame.backward([module.first for module in modules], before),
        frame.backward([module.steady for module in modules], before),
        tuple(frame.stale.values()),
        tuple(at + module.slot for at, module in zip(frame.offsets, modules, strict=True) if module.slot),
    )


class _Frame:
    """Where the tensors of one micro-batch lie."""

    def __init__(self, modules: Sequence[Module], settings: AllocatorSettings) -> None:
        self.modules = modules
        self.settings = settings
        self.parts = [_parts(module, settings) for module in modules]
        shared = sorted({id for part in self.parts for id in part.shared}, reverse=True)
        self.shared = {id: 1 + i for i, id in enumerate(shared)}
        self.stale: dict[int, int] = {}
        """By the module's place in the row."""
        self.offsets: list[int] = []
        size = 1 + len(shared)
        for place, part in enumerate(self.parts):
            self.offsets.append(size)
            size += 1 + part.largest
            if any(operation.slot == STALE for operation in part.forward):
                self.stale[place] = size
                size += 1
        self.size = size
        self.inputs: list[int] = []

    def forward(self) -> Pass:
        operations: list[Operation] = []
        handed = 0
        for place, (module, part, offset) in enumerate(zip(self.modules, self.parts, self.offsets, strict=True)):
            self.inputs.append(handed)
            outer = {**self.shared, INPUT: handed, STALE: self.stale.get(place, 0)}
            operations += _placed(part.forward, offset, outer)
            if module.steady.output > 0:
                handed = offset + module.steady.output
        for module, offset in zip(self.modules, self.offsets, strict=True):
            operations += _placed(_listed(module.steady.end, self.settings), offset, self.shared)
        return _summed(operations, handed, {})

    def backward(self, tapes: Sequence[Tapes], before: dict[int, Operation]) -> Pass:
        operations: list[Operation] = []
        handed = 0
        for place in reversed(range(len(self.modules))):
            own, offset = tapes[place], self.offsets[place]
            outer = {**self.shared, INPUT: self.inputs[place], GRAD_OUTPUT: handed}
            operations += _placed(_operations(own, True, self.settings), offset, outer)
            if own.grad_input > 0:
                handed = offset + own.grad_input
            elif own.grad_input <= SHARED:
                handed = self.shared[own.grad_input]
        return _summed(operations, handed, before)


class _Parts(NamedTuple):
    """What a frame has to know of a module."""

    forward: tuple[Operation, ...]
    largest: int
    """The largest id of a tensor of its own."""
    shared: frozenset[int]


@lru_cache(maxsize=1 << 12)
def _parts(module: Module, settings: AllocatorSettings) -> _Parts:
    forward = _operations(module.steady, False, settings)
    backward = (_operations(module.first, True, settings), _operations(module.steady, True, settings))
    ids = {operation.slot for part in (forward, *backward) for operation in part}
    ids |= {module.slot, module.steady.output, module.first.grad_input, module.steady.grad_input}
    return _Parts(forward, max(ids), frozenset(id for id in ids if id <= SHARED))


@lru_cache(maxsize=1 << 13)
def _operations(tapes: Tapes, backward: bool, settings: AllocatorSettings) -> tuple[Operation, ...]:
    """A module's own operations."""
    return _listed(tapes.backward if backward else tapes.forward, settings)


def _listed(tape: Tape, settings: AllocatorSettings) -> tuple[Operation, ...]:
    """Empty tensors never reach the allocator."""
    found: list[Operation] = []
    for event in tape:
        if isinstance(event, (Hold, Drop)) and event.bytes:
            units = settings.units(event.bytes)
            found.append(
                Operation(event.tensor, units if isinstance(event, Hold) else -units, event.bytes, event.category)
            )
    return tuple(found)


def _placed(operations: Sequence[Operation], offset: int, outer: dict[int, int]) -> list[Operation]:
    """With slots of the frame."""
    return [
        Operation(offset + id if id > 0 else outer[id], units, size, category)
        for id, units, size, category in operations
    ]


def _summed(operations: Sequence[Operation], handed: int, before: dict[int, Operation]) -> Pass:
    live = dict(before)
    by = [0] * len(Category)
    for operation in operations:
        if operation.units > 0:
            live[operation.slot] = operation
            by[operation.category] += operation.bytes
        else:
            live.pop(operation.slot, None)
            by[operation.category] -= operation.bytes
    small, large, net = _steps(operations)
    left = tuple(live[slot] for slot in sorted(live))
    changed = tuple((category, size) for category, size in enumerate(by) if size)
    return Pass(tuple(operations), small, large, handed, left, net, changed)


def _steps(operations: Sequence[Operation]) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...], int]:
    """Small and large steps, and the net change in units. A small step's peak belongs to the large one before it."""
    small: list[Step] = []
    large: list[Step] = []
    slot = units = total = top = 0
    place = -1
    for at, operation in enumerate(operations):
        total += operation.units
        if abs(operation.units) <= LARGEST_SMALL:
            small.append((operation.slot, operation.units, operation.units << SHIFT, NEVER, -1))
            if total > top:
                top, place = total, at
            continue
        large.append((slot, units, units << SHIFT, top, place))
        slot, units, top, place = operation.slot, operation.units, total, at
    large.append((slot, units, units << SHIFT, top, place))
    return stretches(small), stretches(large), total


MOST_TOGETHER = 4
"""Blocks of a stretch that gives back what it takes: of more there are seldom enough free ones of the largest size."""


def stretches(steps: Sequence[Step]) -> tuple[Stretch, ...]:
    """``steps`` with those in a row together that give back all they take, and nothing else."""
    parts: list[list[Step]] = []
    most: list[int] = []
    at = 0
    while at < len(steps):
        end, together = _closed(steps, at)
        if not most or bool(most[-1]) is not bool(together):
            parts.append([])
            most.append(0)
        parts[-1] += steps[at : end + 1]
        most[-1] = max(most[-1], together)
        at = end + 1
    return tuple(
        Stretch(tuple(part), together, max(step[2] for step in part), max(step[3] for step in part))
        for part, together in zip(parts, most, strict=True)
    )


def _closed(steps: Sequence[Step], start: int) -> tuple[int, int]:
    """Where the shortest stretch from ``start`` on ends that gives back what it takes, and how many blocks it holds at
    once; ``start`` and 0 where there is none."""
    live: set[int] = set()
    together = 0
    for at in range(start, len(steps)):
        slot, units = steps[at][:2]
        if units > 0:
            live.add(slot)
            together = max(together, len(live))
        elif units == 0 or slot not in live:
            break
        else:
            live.remove(slot)
        if together > MOST_TOGETHER:
            break
        if not live:
            return at, together
    return start, 0
