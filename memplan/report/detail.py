"""A stage's tape made ready to read: names for what is dropped, running totals, and which modules repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..layers.module import STALE
from ..result import ModuleTape
from ..tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Hold, Seam
from ..values import dataclass
from .names import MIBS, MINUS, exact, kind_of, modules_text, size
from .printing import COLOURS, FAINT, GAP, Breakable, folded, label, put, right, spaced


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


SHORT_LABELS = {
    Category.MAIN_PARAMETERS: "main params",
    Category.OPTIMIZER_STATES: "optimizer",
    Category.GATHERED_PARAMETERS: "gathered",
    Category.COMMUNICATION_BUFFERS: "comm buffer",
    Category.WORKSPACES: "workspace",
    Category.BLOCK_ROUNDING: "rounding",
}
"""Labels of one column's width, where the full one is longer."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Columns of every table of the report, so that they stand under each other."""

    change: int
    running: int
    category: int
    tensor: int
    shape: int
    dtype: int

    @classmethod
    def of(cls, sections: Sequence[Section], console_width: int) -> Widths:
        """What the lines want; where the console is narrower, names and shapes wrap."""
        lines = [line for section in sections for line in section.lines]

        def longest(text: Callable[[Line], str]) -> int:
            return max((len(text(line)) for line in lines), default=1)

        change = longest(_change)
        running, category, dtype = longest(_running), longest(_label), longest(lambda line: line.dtype)
        tensor, shape = longest(lambda line: line.name), longest(lambda line: _shape(line.shape))
        room = max(8, console_width - change - running - category - dtype - 5 * GAP)
        if tensor + shape > room:
            shape = min(shape, max(room * 45 // 100, room - tensor))
            tensor = min(tensor, room - shape)
        return cls(change, running, category, tensor, shape, dtype)


def print_detail(module_tapes: Sequence[ModuleTape], console: Console, verbose: bool = False) -> None:
    """Prints every event of ``module_tapes``; layers that repeat an earlier one in a line, unless ``verbose``."""
    sections = sections_of(module_tapes)
    widths = Widths.of(sections, console.width)
    put(console, Text("Bytes, each tensor rounded up to 512; the second column is the running total in MiB.", FAINT))
    put(console, *_tape(sections, widths, verbose))
    put(console, *_saved(sections, widths))


def _tape(sections: Sequence[Section], widths: Widths, verbose: bool) -> Iterator[RenderableType]:
    for run, earlier in repeats(sections):
        yield Text()
        if earlier is not None and not verbose:
            yield _repetition(run, earlier)
            continue
        for index, section in enumerate(run):
            if index:
                yield Text()
            yield from _section(section, widths)


def _section(section: Section, widths: Widths) -> Iterator[RenderableType]:
    """A title, then the events, seams on lines of their own."""
    title = f"{section.module}/{section.phase}"
    yield Text.assemble((f"{section.module}, {section.phase}", "bold"), f"  {_kept(section.net)}")
    for seams, lines in groupby(section.lines, key=lambda line: line.category is None):
        if seams:
            yield from (Text(f"  seam {line.name}", FAINT) for line in lines if line.name != title)
        else:
            yield _events(list(lines), widths)


def _repetition(run: Sequence[Section], earlier: Section) -> Text:
    names = run[0].module if len(run) == 1 else f"{run[0].module} … {run[-1].module}"
    each = " each" if len(run) > 1 else ""
    total = f"; then {exact(run[-1].lines[-1].running)}" if run[-1].lines else ""
    return Text.assemble(
        (f"{names}, {earlier.phase}", "bold"), f"  same as {earlier.module}: {_kept(earlier.net)}{each}{total}"
    )


def _kept(net: int) -> str:
    """The net change in exact bytes, and what that is in GiB or MiB."""
    sign = "+" if net > 0 else ""
    return f"{sign}{exact(net)} ({size(net)})"


def _events(lines: Sequence[Line], widths: Widths) -> Table:
    table = _columns(widths, running=True)
    for line in lines:
        name, shape = Breakable(line.name), Breakable(_shape(line.shape))
        category = Text(_label(line), "" if line.category is None else COLOURS[line.category])
        table.add_row(_change(line), _running(line), category, name, shape, Text(line.dtype))
    return table


def _columns(widths: Widths, *, running: bool) -> Table:
    return Table.grid(
        *[right(width=width) for width in ((widths.change, widths.running) if running else (widths.change,))],
        *[folded(width=width) for width in (widths.category, widths.tensor, widths.shape, widths.dtype)],
        padding=(0, GAP, 0, 0),
        pad_edge=False,
    )


def _change(line: Line) -> str:
    if line.category is None:
        return ""
    return f"{'+' if line.change >= 0 else MINUS}{exact(abs(line.change))}"


def _running(line: Line) -> str:
    return MIBS.figure(line.running)


def _label(line: Line) -> str:
    return "" if line.category is None else _short(line.category)


def _short(category: Category) -> str:
    return SHORT_LABELS.get(category, label(category.key))


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _saved(sections: Sequence[Section], widths: Widths) -> Iterator[RenderableType]:
    """The tensors that outlive forward, once for all layers of a kind that save the same."""
    alike: dict[tuple[object, ...], list[Section]] = {}
    for section in sections:
        if section.saved:
            alike.setdefault((kind_of(section.module), *map(_looks, section.saved)), []).append(section)
    for members in alike.values():
        saved = members[0].saved
        total = sum(hold.bytes for hold in saved)
        modules = list(dict.fromkeys(section.module for section in members))
        each = " each" if len(modules) > 1 else ""
        tensors = f"{len(saved)} tensor{'s' * (len(saved) > 1)}"
        yield from spaced(
            Text.assemble(
                "Held at the end of forward by ", (modules_text(modules), "bold"), f": {tensors}, {_kept(total)}{each}"
            ),
            _holds(saved, widths),
        )


def _looks(hold: Hold) -> tuple[object, ...]:
    return hold.bytes, hold.category, hold.shape, hold.dtype


def _holds(holds: Sequence[Hold], widths: Widths) -> Table:
    table = _columns(widths, running=False)
    for hold in holds:
        category = Text(_short(hold.category), COLOURS[hold.category])
        name, shape = Breakable(hold.name), Breakable(_shape(hold.shape))
        table.add_row(exact(hold.bytes), category, name, shape, Text(hold.dtype))
    return table
