"""The table of stages: what each needs, when and for what, and what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..result import Estimate, StageEstimate
from .bar import bar
from .breakable import Breakable
from .names import DASH, stage_word
from .palette import BAD, FAINT, shares
from .rows import Row, free_on, limit_of, rows_of
from .units import Unit, elements, unit_for
from .verdict import reading_of

GAP = 2
SHORTEST_BAR, LONGEST_BAR = 32, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """How much room the table takes."""

    one_line: bool
    """Each row on one line; else ranges and peaks take two, and modules as many as they need."""
    ranks: bool = True
    longest: int | None = None
    """Columns after which lists of modules and peaks wrap; ``None``: where the console ends."""
    bar: int = 0
    """Cells of the bar; 0: no bar."""


ROOMY, COMPACT = Shape(one_line=True), Shape(one_line=False, longest=24)
"""Shapes that a bar can stand beside."""
NARROW, NARROWEST = Shape(one_line=False), Shape(one_line=False, ranks=False)


def stage_tables(estimate: Estimate, console: Console, *, folded: bool = True) -> tuple[Table, ...]:
    """The table that suits the console's width, with bars in colour: in the table or else as a chart above it."""
    rows = rows_of(estimate, folded=folded)

    def needs(shape: Shape) -> Measurement:
        return measured(_table(estimate, rows, shape), console)

    if in_colour(console):
        for shape in (ROOMY, COMPACT):
            cells = console.width - needs(shape).maximum - GAP
            if cells >= SHORTEST_BAR:
                return (_table(estimate, rows, replace(shape, bar=min(cells, LONGEST_BAR))),)
    if needs(ROOMY).maximum <= console.width:
        shape = ROOMY
    else:
        shape = NARROW if needs(NARROW).minimum <= console.width else NARROWEST
    chart = (_chart(estimate, rows, console.width),) if in_colour(console) else ()
    return (*chart, _table(estimate, rows, shape))


def in_colour(console: Console) -> bool:
    """Whether bars and swatches mean anything on ``console``."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def measured(table: Table, console: Console) -> Measurement:
    """The least and the most columns that ``table`` can use, however wide the console is."""
    return Measurement.get(console, console.options.update(max_width=10_000), table)


def peak_reading(estimate: Estimate) -> str:
    """The reading that the column of peaks shows; ``furthest`` where stages differ in what is known."""
    readings = {reading_of(stage) for stage in estimate.stages}
    return readings.pop() if len(readings) == 1 else "furthest"


def unit_of(estimate: Estimate) -> Unit:
    """The unit of all the estimate's tables."""
    return unit_for(max(stage.headline for stage in estimate.stages))


def plain_table() -> Table:
    """A table with a rule under its header and nothing else."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="")


def _scale(estimate: Estimate) -> int:
    """Bytes at the right end of every bar: the capacity, or more where a stage needs more."""
    return max(estimate.capacity or 0, *(stage.headline for stage in estimate.stages), 1)


def _chart(estimate: Estimate, rows: tuple[Row, ...], width: int) -> Table:
    """The bars alone, one for each row."""
    chart = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    chart.add_column(justify="right", no_wrap=True)
    chart.add_column(no_wrap=True)
    cells = width - GAP - max(len(row.stages) for row in rows)
    for row in rows:
        chart.add_row(row.stages, bar(shares(row.worst), _scale(estimate), cells, limit_of(estimate)))
    return chart


def _table(estimate: Estimate, rows: tuple[Row, ...], shape: Shape) -> Table:
    table = plain_table()
    table.add_column(stage_word(estimate.plan), justify="right", no_wrap=True)
    if shape.ranks:
        table.add_column("ranks", no_wrap=True)
    table.add_column("modules", overflow="fold", max_width=shape.longest)
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("static", justify="right", no_wrap=True)
    table.add_column(f"{peak_reading(estimate)}\npeak", justify="right", no_wrap=True)
    if estimate.capacity is not None:
        table.add_column("free", justify="right", no_wrap=True)
    table.add_column("at the peak", overflow="fold", max_width=shape.longest)
    if shape.bar:
        table.add_column("", no_wrap=True)
    for row in rows:
        cells: list[RenderableType] = [row.stages, row.ranks] if shape.ranks else [row.stages]
        cells += [
            Breakable(row.modules(", " if shape.one_line else ",\n")),
            elements(row.worst.parameters),
            *_sizes(row, estimate, shape),
            _peak(row, shape),
        ]
        if shape.bar:
            cells.append(bar(shares(row.worst), _scale(estimate), shape.bar, limit_of(estimate)))
        table.add_row(*cells)
    return table


def _sizes(row: Row, estimate: Estimate, shape: Shape) -> list[Text]:
    """Static, peak and free of a row."""
    limit, unit = limit_of(estimate), unit_of(estimate)

    def cell(figures: tuple[str, ...], style: str = "") -> Text:
        return Text((DASH if shape.one_line else f"{DASH}\n").join(figures), style=style)

    def static(stage: StageEstimate) -> int:
        return stage.static

    def headline(stage: StageEstimate) -> int:
        return stage.headline

    def free(stage: StageEstimate) -> int | None:
        return free_on(stage, limit)

    over = f"bold {BAD}" if limit is not None and row.worst.headline > limit else ""
    cells = [cell(row.figures(static, unit)), cell(row.figures(headline, unit), over or "bold")]
    return cells if limit is None else [*cells, cell(row.figures(free, unit), over)]


def _peak(row: Row, shape: Shape) -> Breakable:
    """For what and when the peak is; marked where it is an upper bound."""
    bound = " (upper bound)" if any(stage.peak.upper_bound for stage in row.members) else ""
    when = row.when() if shape.one_line else row.when("mb")
    return Breakable(Text.assemble(row.what, ", " if shape.one_line else "\n", (f"{when}{bound}", FAINT)))
