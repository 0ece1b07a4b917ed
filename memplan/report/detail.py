"""``memplan estimate --detail STAGE``: the stage's tape layer by layer, and what each kind of layer saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..result import ModuleTape
from ..tape import Category, Hold
from .names import kind_of, modules_text
from .output import put
from .palette import COLOURS, FAINT, label
from .sections import Line, Section, repeats, sections_of
from .units import MINUS, exact, size

GAP = 2


@dataclass(frozen=True, slots=True)
class Widths:
    """Columns of every table of the report, so that they stand under each other."""

    figure: int
    category: int
    tensor: int
    shape: int
    dtype: int

    @classmethod
    def of(cls, sections: Sequence[Section], console_width: int) -> Widths:
        """What the lines want; where the console is narrower, names and shapes wrap."""
        lines = [line for section in sections for line in section.lines if line.category is not None]
        figure = 1 + max((len(exact(line.running)) for line in lines), default=1)
        category = max((len(_label(line)) for line in lines), default=1)
        tensor = max((len(line.name) for line in lines), default=1)
        shape = max((len(_shape(line.shape)) for line in lines), default=1)
        dtype = max((len(line.dtype) for line in lines), default=1)
        room = max(12, console_width - 2 * figure - dtype - 5 * GAP)
        word = max((len(word) for line in lines for word in _label(line).split()), default=1)
        category = max(word, min(category, room * 28 // 100))
        tensor = min(tensor, max(4, (room - category) * 55 // 100))
        return cls(figure, category, tensor, min(shape, max(4, room - category - tensor)), dtype)


def print_detail(module_tapes: Sequence[ModuleTape], console: Console, verbose: bool = False) -> None:
    """Prints every event of ``module_tapes``; layers that repeat an earlier one in a line, unless ``verbose``."""
    sections = sections_of(module_tapes)
    widths = Widths.of(sections, console.width)
    put(console, Text("Exact bytes, each tensor rounded up to 512; second column: running total.", FAINT))
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
    table = _columns(widths, figures=2)
    for line in lines:
        sign = "+" if line.change >= 0 else MINUS
        table.add_row(
            f"{sign}{exact(abs(line.change))}",
            exact(line.running),
            Text(_label(line), _colour(line.category)),
            Text(line.name),
            _shape(line.shape),
            line.dtype,
        )
    return table


def _columns(widths: Widths, figures: int) -> Table:
    table = Table.grid(padding=(0, GAP, 0, 0))
    for _ in range(figures):
        table.add_column(justify="right", no_wrap=True, width=widths.figure)
    for width in (widths.category, widths.tensor, widths.shape, widths.dtype):
        table.add_column(overflow="fold", width=width)
    return table


def _label(line: Line) -> str:
    return "" if line.category is None else label(line.category.key)


def _colour(category: Category | None) -> str:
    return "" if category is None else COLOURS[category]


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
    table = _columns(widths, figures=1)
    for hold in holds:
        category = Text(label(hold.category.key), COLOURS[hold.category])
        table.add_row(exact(hold.bytes), category, Text(hold.name), _shape(hold.shape), hold.dtype)
    return table
