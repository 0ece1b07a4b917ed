"""A stage's tape made ready to read: names for what is dropped, running totals, and which modules repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..layers.module import GRAD_OUTPUT, INPUT, STALE
from ..result import ModuleTape
from ..tape import Category, Drop, Hold, Seam
from .names import kind_of


@dataclass(frozen=True, slots=True)
class Line:
    """One event: a tensor held or dropped, or (with no ``category``) a seam."""

    name: str
    change: int = 0
    """Bytes, negative for a drop."""
    running: int = 0
    """Bytes held after the event, counted from the start of the first section."""
    category: Category | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One module in one phase."""

    module: str
    phase: str
    lines: tuple[Line, ...]
    saved: tuple[Hold, ...]
    """What a forward section made and nothing in any forward section drops."""

    @property
    def net(self) -> int:
        """Bytes that stay."""
        return sum(line.change for line in self.lines)

    def pattern(self) -> tuple[object, ...]:
        """Equal for sections that do the same in modules of one kind."""
        lines = tuple(
            (line.name.replace(self.module, "*"), line.change, line.category, line.shape, line.dtype)
            for line in self.lines
        )
        return kind_of(self.module), self.phase, lines


def sections_of(tapes: Sequence[ModuleTape]) -> tuple[Section, ...]:
    """The sections of ``tapes``, in their order."""
    living = _Living(tapes)
    read: list[tuple[Line, ...]] = []
    running = 0
    for index, tape in enumerate(tapes):
        lines = []
        for event in tape.events:
            if isinstance(event, Seam):
                lines.append(Line(event.name, running=running))
                continue
            change = event.bytes if isinstance(event, Hold) else -event.bytes
            running += change
            hold = living.hold(index, event) if isinstance(event, Hold) else living.drop(index, event)
            name, shape, dtype = (hold.name, hold.shape, hold.dtype) if hold else (_unseen(event.tensor), (), "")
            lines.append(Line(name, change, running, event.category, shape, dtype))
        read.append(tuple(lines))
    return tuple(
        Section(tape.module, tape.phase, lines, tuple(living.saved[index]))
        for index, (tape, lines) in enumerate(zip(tapes, read, strict=True))
    )


class _Living:
    """Which holds are alive as a stage's tape is read, and which of them outlive forward.

    A drop means the latest living hold of its tensor, in its own module if there is one: layers that
    share a cached tape use the same ids. What a module borrows from a neighbour has an id of its own
    there, so it is matched with the neighbour's latest living hold of that size and category.
    """

    def __init__(self, tapes: Sequence[ModuleTape]) -> None:
        self.tapes = tapes
        self.alive: dict[int, list[tuple[int, Hold]]] = {}
        self.made: list[list[Hold]] = [[] for _ in tapes]
        self.saved: list[list[Hold]] = [[] for _ in tapes]
        self.forward = {tape.module: index for index, tape in enumerate(tapes) if tape.phase == "forward"}

    def hold(self, index: int, hold: Hold) -> Hold:
        self.alive.setdefault(hold.tensor, []).append((index, hold))
        self.made[index].append(hold)
        if self.tapes[index].phase == "forward":
            self.saved[index].append(hold)
        return hold

    def drop(self, index: int, drop: Drop) -> Hold | None:
        found = self._borrowed(index, drop) if drop.tensor in (INPUT, GRAD_OUTPUT) else self._own(index, drop.tensor)
        if found is None:
            return None
        maker, hold = found
        self.alive[hold.tensor].remove(found)
        if self.tapes[index].phase == "forward":
            self.saved[maker].remove(hold)
        return hold

    def _own(self, index: int, tensor: int) -> tuple[int, Hold] | None:
        holds = self.alive.get(tensor, [])
        own = [found for found in holds if self.tapes[found[0]].module == self.tapes[index].module]
        return next(reversed(own or holds), None)

    def _borrowed(self, index: int, drop: Drop) -> tuple[int, Hold] | None:
        """The input was made by the module before in forward, the output's gradient by the section before."""
        before = index if drop.tensor == GRAD_OUTPUT else self.forward.get(self.tapes[index].module, 0)
        made = self.made[before - 1] if before else []
        same = ((before - 1, hold) for hold in reversed(made) if hold[1:3] == drop[1:3])
        return next((found for found in same if found in self.alive[found[1].tensor]), None)


def _unseen(tensor: int) -> str:
    """A name for what was made before the tape begins."""
    return {INPUT: "input", GRAD_OUTPUT: "gradient of the output", STALE: "of an earlier micro-batch"}.get(
        tensor, f"#{tensor}"
    )


def repeats(sections: Iterable[Section]) -> tuple[tuple[tuple[Section, ...], Section | None], ...]:
    """Runs of sections: each new one alone with ``None``, and those that repeat an earlier one with that one."""
    first: dict[tuple[object, ...], Section] = {}
    runs: list[tuple[tuple[Section, ...], Section | None]] = []
    for section in sections:
        earlier = first.setdefault(section.pattern(), section)
        if earlier is section:
            runs.append(((section,), None))
        elif runs[-1][1] is earlier:
            runs[-1] = ((*runs[-1][0], section), earlier)
        else:
            runs.append(((section,), earlier))
    return tuple(runs)
