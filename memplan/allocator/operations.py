"""What tapes of modules ask of the allocator: operations of one module, and those of modules in a row.

A module comes many times in a model. What its operations come to wherever it is, its ``Listed`` says once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, cast, overload

from ..tape.events import Category, Drop, Hold, Tape
from ..values import NamedTuple
from .caching import AllocatorSettings


class Operation(NamedTuple):
    """A tensor begins or ends."""

    slot: int
    """In a module's own list: the tensor's id."""
    units: int
    """What the request is rounded up to, in units of 512 B; negative where the tensor ends."""
    bytes: int
    category: Category
    stream: int = 0


class Listed:
    """A tape's operations, with tensors' ids as their slots. Empty tensors never reach the allocator."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)

    @cached_property
    def begun(self) -> dict[int, int]:
        """By the place of an operation that ends an own tensor which began in the tape, the place where that was: two
        modules may know others' tensors by one id.

        Empty where a gradient's end may make another tensor the gradient (``takes_over``), since that depends on what
        there was before.
        """
        under_way: dict[int, int] = {}
        found: dict[int, int] = {}
        for at, (slot, units, _, category, _) in enumerate(self.operations):
            if slot > 0 and units > 0:
                under_way[slot] = at
            elif slot in under_way:
                found[at] = under_way.pop(slot)
            elif units < 0 and category == Category.WORKSPACES:
                return {}
        ends = [(self.operations[start], self.operations[end]) for end, start in found.items()]
        return {} if any(takes_over(held, end) for held, end in ends) else found

    @cached_property
    def lasting(self) -> tuple[tuple[int, Operation], ...]:
        """What is not an own tensor that both begins and ends in the tape, each with its place."""
        passing = {*self.begun, *self.begun.values()}
        return tuple([(at, one) for at, one in enumerate(self.operations) if at not in passing])

    @cached_property
    def known(self) -> tuple[Operation, ...]:
        """The operations, what ends as what it began as, where it began in the tape."""
        found = [*self.operations]
        for end, start in self.begun.items():
            found[end] = ends(found[end], found[start])
        return tuple(found)

    @cached_property
    def by(self) -> tuple[tuple[int, int], ...]:
        """Change of bytes by category, without tensors that began before, where it is not 0."""
        by = [0] * len(Category)
        for at, (_, units, size, category, _) in enumerate(self.known):
            if units > 0:
                by[category] += size
            elif at in self.begun:
                by[category] -= size
        return tuple([(category, size) for category, size in enumerate(by) if size])

    @cached_property
    def sums(self) -> list[list[int]]:
        """Change of bytes by category before each operation, and behind the last."""
        by = [0] * len(Category)
        found = [by]
        for _, units, size, category, _ in self.known:
            by = by[:]
            by[category] += size if units > 0 else -size
            found.append(by)
        return found

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Bytes that are held behind each operation more than before the first."""
        return tuple(accumulate(size if units > 0 else -size for _, units, size, _, _ in self.operations))

    @cached_property
    def totals(self) -> frozenset[int]:
        """``held`` behind requests."""
        return frozenset([held for held, one in zip(self.held, self.operations, strict=True) if one.units > 0])

    @cached_property
    def streams(self) -> bool:
        """Not all tensors are on the main stream."""
        return any(one.stream for one in self.operations)


def alone(operations: Sequence[Operation]) -> Operations:
    """``operations`` that have their slots."""
    return Operations((Placed(Listed(operations), 0, {}),), {})


def takes_over(held: Operation, end: Operation) -> bool:
    """A sum that began as a workspace takes the place of the gradient that ends."""
    return (held.category, end.category) == (Category.GRADIENTS, Category.WORKSPACES)


def ends(end: Operation, held: Operation) -> Operation:
    """The end of ``held``: a neighbour may take the tensor for one of another kind."""
    return (
        end
        if (held.category, held.stream) == (end.category, 0)
        else end._replace(category=held.category, stream=held.stream)
    )


def listed(tape: Tape, settings: AllocatorSettings) -> Listed:
    """The operations of ``tape``."""
    found: list[Operation] = []
    for event in tape:
        if isinstance(event, Hold):
            if event.bytes:
                units = settings.units(event.bytes)
                found.append(Operation(event.tensor, units, event.bytes, event.category, event.stream))
        elif isinstance(event, Drop) and event.bytes:
            found.append(Operation(event.tensor, -settings.units(event.bytes), event.bytes, event.category, 0))
    return Listed(found)


class Placed(NamedTuple):
    """Operations with slots of a frame."""

    listed: Listed
    offset: int
    """Of the slots of own tensors;"""
    outer: Mapping[int, int]
    """slots of the others, by id."""

    def slot(self, id: int) -> int:
        return self.offset + id if id > 0 else self.outer[id]

    def operations(self) -> list[Operation]:
        known = self.listed.known
        if not known:
            return []
        ids, *others = zip(*known, strict=True)
        offset, outer = self.offset, self.outer
        slots = [offset + id if id > 0 else outer[id] for id in ids]
        return list(map(_operation, zip(slots, *others, strict=True)))


_operation = cast(Callable[[tuple[Any, ...]], Operation], partial(tuple.__new__, Operation))
"""``Operation._make`` without a step through Python for each."""


class Operations(Sequence[Operation]):
    """Those of a pass, made when somebody asks for them."""

    def __init__(self, placed: Sequence[Placed], changed: Mapping[int, Operation]) -> None:
        """``changed``: operations that are others than ``placed`` says, by their place."""
        self.placed, self.changed = placed, changed
        self.starts = [*accumulate([len(one.listed.operations) for one in placed], initial=0)]

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, at: int) -> Operation: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Operation]: ...
    def __getitem__(self, at: int | slice) -> Operation | Sequence[Operation]:
        if isinstance(at, slice) or at < 0:
            return self.every[at]
        part = bisect_right(self.starts, at) - 1
        one, place = self.placed[part], at - self.starts[part]
        found = one.listed.known[place]
        return self.changed.get(at) or found._replace(slot=one.slot(found.slot))

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.every)

    @cached_property
    def every(self) -> list[Operation]:
        found: list[Operation] = []
        for one in self.placed:
            found += one.operations()
        for at, operation in self.changed.items():
            found[at] = operation
        return found

    def modules(self) -> Iterator[tuple[int, int, Placed]]:
        """Of each module the place of its first operation, and the bytes that are held before it more than before the
        pass."""
        held = 0
        for start, one in zip(self.starts, self.placed, strict=False):
            yield start, held, one
            held += one.listed.held[-1] if one.listed.held else 0

    @cached_property
    def held(self) -> list[int]:
        """Bytes that are held behind each operation more than before the pass."""
        found: list[int] = []
        for _, before, (own, _, _) in self.modules():
            found += [before + one for one in own.held]
        return found

    def lasting(self) -> Iterator[tuple[int, int, Operation]]:
        """What is not an own tensor that both begins and ends in one of its modules, with its place and its slot."""
        for start, _, (own, offset, outer) in self.modules():
            for place, one in own.lasting:
                yield start + place, offset + one.slot if one.slot > 0 else outer[one.slot], one

    @cached_property
    def begun(self) -> list[int]:
        """Slots of tensors that outlive the module in which they begin."""
        return [slot for _, slot, one in self.lasting() if one.units > 0]

    def reach(self, total: int) -> bool:
        """Behind a request ``total`` bytes are held more than before the pass."""
        return any(total - before in one.listed.totals for _, before, one in self.modules())

    def began(self, at: int) -> int:
        """Where the tensor began that ends at ``at``, if that was in the same module; else -1."""
        part = bisect_right(self.starts, at) - 1
        start = self.starts[part]
        return start + self.placed[part].listed.begun.get(at - start, -1 - start)

    def change(self, start: int, end: int) -> list[int]:
        """Change of bytes by category through the operations from ``start`` up to ``end``."""
        by = [0] * len(Category)
        part = bisect_right(self.starts, start) - 1
        at = start
        while at < end:
            own, first, stop = self.placed[part].listed, self.starts[part], min(end, self.starts[part + 1])
            if len(self.placed) == 1:  # it does not come again
                for _, units, size, category, _ in own.known[at:stop]:
                    by[category] += size if units > 0 else -size
            else:
                by = [*map(int.__add__, by, map(int.__sub__, own.sums[stop - first], own.sums[at - first]))]
            at, part = stop, part + 1
        places = self.changes
        for at in places[bisect_left(places, start) : bisect_left(places, end)]:
            part = bisect_right(self.starts, at) - 1
            before, now = self.placed[part].listed.known[at - self.starts[part]], self.changed[at]
            by[before.category] += before.bytes
            by[now.category] -= now.bytes
        return by

    @cached_property
    def changes(self) -> list[int]:
        """Places of ``changed``, all of operations that end."""
        return sorted(self.changed)
