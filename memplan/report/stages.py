"""The table of stages: what each needs, when and for what, and what is left; a row for each stage, or for a run of
stages that are built alike.

A stage over one iteration in a line of the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..allocator.levels import Level, Line
from ..result import Estimate, StageEstimate, Verdict
from ..values import dataclass, replace
from .names import DASH, Unit, elements, in_order, kind_of, modules_text, ranks_text, size, span, stage_word, unit_for
from .printing import BAD, FAINT, GAP, Breakable, bar, folded, left, plain_table, right, shares


@dataclass(frozen=True, slots=True)
class Row:
    """Stages that stand in one row, in order, and what the row says of them."""

    members: tuple[StageEstimate, ...]

    @property
    def worst(self) -> StageEstimate:
        """The member that needs most, the first of equals."""
        return max(self.members, key=lambda stage: stage.headline)

    @property
    def is_over(self) -> bool:
        """A request of a member fails."""
        return any(stage.judged.verdict is Verdict.DOES_NOT_FIT for stage in self.members)

    @property
    def stages(self) -> str:
        return span(self.members[0].stage, self.members[-1].stage)

    @property
    def ranks(self) -> str:
        union = [rank for stage in self.members for rank in stage.ranks]
        text = ranks_text(union)
        return text if not text.startswith("×") or len(self.members) == 1 else f"{ranks_text(self.worst.ranks)} each"

    def modules(self, separator: str = ", ") -> str:
        """``layers 1–60, 2 each``, with ``separator`` before the count."""
        text = modules_text(in_order([module for stage in self.members for module in stage.modules]))
        each = len(self.members[0].modules)
        return text if len(self.members) == 1 or each < 2 else f"{text}{separator}{each} each"

    @property
    def one_cause(self) -> bool:
        """Whether all members peak in the same phase, in a module of the same kind, on the same tensor."""
        return len({_cause(stage) for stage in self.members}) == 1

    @property
    def what(self) -> str:
        """For what the peak is: ``logits_fp32 in head``; ``… in layer.*`` where only the layer's number differs."""
        peak = self.worst.peak
        numbers = {stage.peak.module for stage in self.members}
        module = f"{kind_of(peak.module)}.*" if self.one_cause and len(numbers) > 1 else peak.module
        return f"{peak.tensor} in {module}" if peak.tensor else module

    def when(self, word: str = "micro-batch") -> str:
        """When the peak is: ``forward, micro-batch 0``; and of which stage, where the members differ in cause."""
        told = self.members if self.one_cause else (self.worst,)
        microbatches = {stage.peak.microbatch for stage in told}
        microbatch = microbatches.pop() if len(microbatches) == 1 else None
        parts = [self.worst.peak.phase]
        parts += [] if microbatch is None else [f"{word} {microbatch}"]
        parts += [] if self.one_cause else [f"stage {self.worst.stage}"]
        return ", ".join(parts)

    def figures(self, of: Callable[[StageEstimate], int | None], unit: Unit) -> tuple[str, ...]:
        """A size in ``unit``: once, or the least and the most where members differ."""
        sizes = [of(stage) for stage in self.members]
        known = [size for size in sizes if size is not None]
        ends = [min(known), max(known)] if known else [None]
        return tuple(dict.fromkeys(map(unit.figure, ends)))


def limit_of(estimate: Estimate) -> int | None:
    """Bytes that a stage may take: the capacity less the headroom; ``None`` without a GPU."""
    return None if estimate.capacity is None else estimate.capacity - estimate.headroom


def free_on(estimate: Estimate, stage: StageEstimate) -> int | None:
    """Bytes left on the stage's most loaded rank in the moment that needs most, as ``Estimate.judged`` counts every
    moment; negative where that is too large. ``None`` without a GPU."""
    limit = limit_of(estimate)
    return None if limit is None else limit - stage.headline - worst_moment(estimate, stage)[1]


def worst_moment(estimate: Estimate, stage: StageEstimate) -> tuple[str, int]:
    """The moment of ``stage`` that needs most, and its bytes beyond the headline, which is an iteration's."""
    return stage.worst(evaluated=estimate.plan.trainer.evaluated)


def free_words(estimate: Estimate) -> str:
    """What a column of free bytes counts where another moment than an iteration needs most: ``free: in evaluation,
    which needs 54.60 GiB``; empty where none does, and without a GPU."""
    most: dict[str, int] = {}
    for stage in estimate.stages if estimate.capacity is not None else ():
        moment, more = worst_moment(estimate, stage)
        if more:
            most[moment] = max(most.get(moment, 0), stage.headline + more)
    upto = "up to " if len(estimate.stages) > 1 else ""
    told = " and ".join(f"{moment}, which needs {upto}{size(needed)}" for moment, needed in most.items())
    return f"free: in {told}" if told else ""


def who(estimate: Estimate, stage: StageEstimate) -> str:
    """A stage in a sentence: ``stage 31``; without a pipeline, ``the GPU`` or ``each GPU``."""
    if len(estimate.stages) > 1 or estimate.plan.layout.pp > 1:
        return f"{stage_word(estimate.plan)} {stage.stage}"
    return "each GPU" if len(stage.ranks) > 1 else "the GPU"


def reading_of(stage: StageEstimate) -> str:
    """The furthest reading that is known of the stage, which is its headline."""
    known = (("device", stage.device), ("reserved", stage.reserved), ("allocated", stage.allocated))
    return next((name for name, count in known if count is not None), "requested")


def rows_of(estimate: Estimate, *, folded: bool = True) -> tuple[Row, ...]:
    """The estimate's rows. Folded, neighbours that hold the same and have the same verdict share one."""
    if not folded:
        return tuple(Row((stage,)) for stage in estimate.stages)
    runs = groupby(estimate.stages, key=_appearance)
    return tuple(Row(tuple(members)) for _, members in runs)


def _appearance(stage: StageEstimate) -> tuple[object, ...]:
    """What two stages must share to stand in one row: what they hold, what is known of it, and the verdict."""
    return (
        tuple(map(kind_of, stage.modules)),
        len(stage.ranks),
        stage.parameters,
        (stage.device is None, stage.reserved is None, stage.allocated is None),
        stage.judged.verdict,
    )


def _cause(stage: StageEstimate) -> tuple[str, str, str]:
    return stage.peak.phase, kind_of(stage.peak.module), stage.peak.tensor


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


def _scale(estimate: Estimate) -> int:
    """Bytes at the right end of every bar: the capacity, or more where a stage needs more."""
    return max(estimate.capacity or 0, *(stage.headline for stage in estimate.stages), 1)


def _chart(estimate: Estimate, rows: tuple[Row, ...], width: int) -> Table:
    """The bars alone, one for each row."""
    chart = Table.grid(right(), left(), padding=(0, GAP, 0, 0), pad_edge=False)
    cells = width - GAP - max(len(row.stages) for row in rows)
    for row in rows:
        chart.add_row(row.stages, bar(shares(row.worst), _scale(estimate), cells, limit_of(estimate)))
    return chart


def _table(estimate: Estimate, rows: tuple[Row, ...], shape: Shape) -> Table:
    table = plain_table(
        right(stage_word(estimate.plan)),
        *([left("ranks")] if shape.ranks else []),
        folded("modules", max_width=shape.longest),
        right("params"),
        right("static"),
        right(f"{peak_reading(estimate)}\npeak"),
        *([right("free")] if estimate.capacity is not None else []),
        folded("at the peak", max_width=shape.longest),
        *([left()] if shape.bar else []),
    )
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
    unit = unit_of(estimate)

    def cell(figures: tuple[str, ...], style: str = "") -> Text:
        return Text((DASH if shape.one_line else f"{DASH}\n").join(figures), style=style)

    def static(stage: StageEstimate) -> int:
        return stage.static

    def headline(stage: StageEstimate) -> int:
        return stage.headline

    def free(stage: StageEstimate) -> int | None:
        return free_on(estimate, stage)

    over = f"bold {BAD}" if row.is_over else ""
    cells = [cell(row.figures(static, unit)), cell(row.figures(headline, unit), over or "bold")]
    return cells if estimate.capacity is None else [*cells, cell(row.figures(free, unit), over)]


def _peak(row: Row, shape: Shape) -> Breakable:
    """For what and when the peak is; marked where it is an upper bound."""
    bound = " (upper bound)" if any(stage.peak.upper_bound for stage in row.members) else ""
    when = row.when() if shape.one_line else row.when("mb")
    return Breakable(Text.assemble(row.what, ", " if shape.one_line else "\n", (f"{when}{bound}", FAINT)))


LEVELS = "▁▂▃▄▅▆▇█"
WIDEST = 100
"""Cells of a line."""
COLOURS = {"forward": "#7aa6d8", "backward": "#d39a5b", "step": "#8f7cc8"}


def drawn_lines(estimate: Estimate, lines: Sequence[Line], console: Console) -> Iterator[RenderableType]:
    """For each of ``lines`` its bytes from left to right, and below where passes begin."""
    for line in lines:
        if not line.levels:
            continue
        totals = [level.bytes for level in line.levels]
        highest = max(totals)
        of = next(stage for stage in estimate.stages if stage.stage == line.stage)
        name = (
            f"{who(estimate, of).capitalize()} over one iteration" if len(estimate.stages) > 1 else "Over one iteration"
        )
        shown = ""
        if line.shown < line.microbatches:
            shown = f", {line.shown:,} of {line.microbatches:,} micro-batches"
        told = f": live tensors, {size(min(totals))} to {size(highest)}{shown}"
        yield Text.assemble((name, "bold"), (told, FAINT))
        yield from _drawn(_cells(line, min(console.width, WIDEST)), highest)


def _cells(line: Line, count: int) -> list[Level]:
    """The fullest moment of each of ``count`` equal stretches of the iteration's events, or the one before it."""
    cells: list[Level | None] = [None] * count
    for level in line.levels:
        at = min((level.event - 1) * count // max(line.events, 1), count - 1)
        before = cells[at]
        if before is None or level.bytes > before.bytes:
            cells[at] = level
    last, found = line.levels[0], []
    for cell in cells:
        last = cell or last
        found.append(last)
    return found


def _drawn(cells: Sequence[Level], highest: int) -> Iterator[Text]:
    bars, phases = Text(no_wrap=True), ""
    for phase, alike in groupby(cells, lambda cell: cell.phase):
        if len(phases) <= len(bars):
            phases = f"{phases.ljust(len(bars))}{phase} "
        heights = (cell.bytes * len(LEVELS) // max(highest, 1) for cell in alike)
        bars.append("".join([LEVELS[min(height, len(LEVELS) - 1)] for height in heights]), COLOURS.get(phase, ""))
    yield bars
    yield Text(phases[: len(cells)].rstrip(), FAINT, no_wrap=True)
