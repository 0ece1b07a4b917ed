"""``memplan estimate --detail STAGE``: the stage's tape layer by layer, and what each kind of layer saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..result import ModuleTape
from ..tape import Category, Hold
from .breakable import Breakable
from .names import kind_of, modules_text
from .output import put
from .palette import COLOURS, FAINT, label
from .sections import Line, Section, repeats, sections_of
from .units import MIB, MINUS, Unit, exact, size

GAP = 2
MIBS = Unit("MiB", MIB, 1)


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
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for width in (widths.change, widths.running) if running else (widths.change,):
        table.add_column(justify="right", no_wrap=True, width=width)
    for width in (widths.category, widths.tensor, widths.shape, widths.dtype):
        table.add_column(overflow="fold", width=width)
    return table


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
        yield Text()
        yield Text.assemble(
            "Held at the end of forward by ", (modules_text(modules), "bold"), f": {tensors}, {_kept(total)}{each}"
        )
        yield _holds(saved, widths)


def _looks(hold: Hold) -> tuple[object, ...]:
    return hold.bytes, hold.category, hold.shape, hold.dtype


def _holds(holds: Sequence[Hold], widths: Widths) -> Table:
    table = _columns(widths, running=False)
    for hold in holds:
        category = Text(_short(hold.category), COLOURS[hold.category])
        name, shape = Breakable(hold.name), Breakable(_shape(hold.shape))
        table.add_row(exact(hold.bytes), category, name, shape, Text(hold.dtype))
    return table
