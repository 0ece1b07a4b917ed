"""A stage's tape made ready to read: names for what is dropped, running totals, and which modules repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..result import ModuleTape
from ..tape import Category, Event, Hold, Seam
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
    """The sections of ``tapes``, in their order.

    A drop is matched with the latest hold of its tensor that is still alive, in its own module if
    there is one: layers that share a cached tape use the same ids.
    """
    alive: dict[int, list[tuple[int, Hold]]] = {}
    made: list[list[Hold]] = [[] for _ in tapes]
    lines: list[tuple[Line, ...]] = []
    running = 0

    def held(tensor: int, module: str, phase: str) -> Hold | None:
        holds = alive.get(tensor, [])
        own = [at for at, (maker, _) in enumerate(holds) if tapes[maker].module == module]
        if not holds:
            return None
        maker, hold = holds.pop(own[-1] if own else -1)
        if phase == "forward" and tapes[maker].phase == "forward":
            made[maker].remove(hold)
        return hold

    for index, tape in enumerate(tapes):
        read = []
        for event in tape.events:
            running += _change(event)
            if isinstance(event, Hold):
                alive.setdefault(event.tensor, []).append((index, event))
                made[index].append(event)
                shown: Hold | None = event
            elif isinstance(event, Seam):
                read.append(Line(event.name, running=running))
                continue
            else:
                shown = held(event.tensor, tape.module, tape.phase)
            name, shape, dtype = (shown.name, shown.shape, shown.dtype) if shown else (f"#{event.tensor}", (), "")
            read.append(Line(name, _change(event), running, event.category, shape, dtype))
        lines.append(tuple(read))
    return tuple(
        Section(tape.module, tape.phase, read, tuple(kept) if tape.phase == "forward" else ())
        for tape, read, kept in zip(tapes, lines, made, strict=True)
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


def _change(event: Event) -> int:
    """Bytes by which ``event`` changes what is held."""
    if isinstance(event, Seam):
        return 0
    return event.bytes if isinstance(event, Hold) else -event.bytes
