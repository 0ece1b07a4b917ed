"""Stages in the terminal: their table, one of them over an iteration, and what a variant changes.

The table says what each needs, when and for what, and what is left, in a row for each stage, or for a run of stages
that are built alike. An iteration is a line. A variant stands beside the first plan by category where it matters, and
by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..allocator.timeline import Level, Line
from ..frameworks import framework
from ..plan.errors import PlanError
from ..result import Estimate, Notice, StageEstimate, Verdict
from ..tape.events import Category
from ..values import dataclass, replace
from .names import (
    DASH,
    UNKNOWN,
    Unit,
    elements,
    in_order,
    kind_of,
    modules_text,
    plan_text,
    ranks_text,
    size,
    span,
    stage_word,
    unit_for,
)
from .printing import (
    BAD,
    CAUTION,
    FAINT,
    GAP,
    GOOD,
    Breakable,
    bar,
    entries,
    folded,
    label,
    left,
    plain_table,
    put,
    right,
    shares,
    written_lines,
)


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
        text = ranks_text([rank for stage in self.members for rank in stage.ranks])
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
    return tuple(Row(tuple(members)) for _, members in groupby(estimate.stages, key=_appearance))


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


SHORTEST_BAR, LONGEST_BAR = 28, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """How much room the table takes."""

    one_line: bool
    """Each row on one line; else ranges and peaks take two, and modules as many as they need."""
    ranks: bool = True
    static: bool = True
    """Static bytes have a column of their own; else they stand under the parameters."""
    longest: int | None = None
    """Columns after which lists of modules and peaks wrap; ``None``: where the console ends."""
    bar: int = 0
    """Cells of the bar; 0: no bar."""


ROOMY = Shape(one_line=True)
BESIDE_A_BAR = ROOMY, Shape(one_line=False, longest=40), Shape(one_line=False, longest=24)
NARROWER = (
    Shape(one_line=False),
    Shape(one_line=False, ranks=False),
    Shape(one_line=False, ranks=False, static=False),
)
"""Shapes for less and less room."""


def stage_tables(estimate: Estimate, console: Console, *, folded: bool = True) -> tuple[Table, ...]:
    """The table that suits the console's width, with bars in colour: in the table or else as a chart above it."""
    rows = rows_of(estimate, folded=folded)

    def needs(shape: Shape) -> Measurement:
        return measured(_table(estimate, rows, shape), console)

    if in_colour(console):
        for shape in BESIDE_A_BAR:
            cells = console.width - needs(shape).maximum - GAP
            if cells >= SHORTEST_BAR:
                return (_table(estimate, rows, replace(shape, bar=min(cells, LONGEST_BAR))),)
    if needs(ROOMY).maximum <= console.width:
        shape = ROOMY
    else:
        shape = next((one for one in NARROWER if needs(one).minimum <= console.width), NARROWER[-1])
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
        *([right("params"), right("static")] if shape.static else [right("params\nstatic")]),
        right(f"{peak_reading(estimate)}\npeak"),
        *([right("free")] if estimate.capacity is not None else []),
        folded("at the peak", max_width=shape.longest),
        *([left()] if shape.bar else []),
    )
    for row in rows:
        cells: list[RenderableType] = [row.stages, row.ranks] if shape.ranks else [row.stages]
        cells += [
            Breakable(row.modules(", " if shape.one_line else ",\n")),
            *_sizes(row, estimate, shape),
            _peak(row, shape),
        ]
        if shape.bar:
            cells.append(bar(shares(row.worst), _scale(estimate), shape.bar, limit_of(estimate)))
        table.add_row(*cells)
    return table


def _sizes(row: Row, estimate: Estimate, shape: Shape) -> list[Text]:
    """Parameters, static, peak and free of a row."""
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
    held = [Text(elements(row.worst.parameters)), cell(row.figures(static, unit))]
    cells = held if shape.static else [Text("\n").join(held)]
    cells.append(cell(row.figures(headline, unit), over or "bold"))
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
        if not line.points:
            continue
        totals = [level.bytes for level in line.points]
        highest = max(totals)
        of = next(stage for stage in estimate.stages if stage.stage == line.stage)
        name = (
            f"{who(estimate, of).capitalize()} over one iteration" if len(estimate.stages) > 1 else "Over one iteration"
        )
        shown = ""
        if line.shown < line.microbatches:
            shown = f"; {line.shown:,} of {line.microbatches:,} micro-batches, which the others repeat"
        told = f": live tensors, {size(min(totals))} to {size(highest)}{shown}"
        yield Text.assemble((name, "bold"), (told, FAINT))
        yield from _drawn(_cells(line, min(console.width, WIDEST)), highest)


def _cells(line: Line, count: int) -> list[Level]:
    """The fullest moment of each of ``count`` equal stretches of the iteration's events, or the one before it."""
    cells: list[Level | None] = [None] * count
    for level in line.points:
        at = min((level.event - 1) * count // max(line.events, 1), count - 1)
        before = cells[at]
        if before is None or level.bytes > before.bytes:
            cells[at] = level
    last, found = line.points[0], []
    for cell in cells:
        last = cell or last
        found.append(last)
    return found


def _drawn(cells: Sequence[Level], highest: int) -> Iterator[Text]:
    bars, phases = Text(no_wrap=True), ""
    for phase, alike in groupby(cells, lambda cell: cell.phase):
        if len(phases) <= len(bars) <= len(cells) - len(phase):  # else there is no room for the whole word
            phases = f"{phases.ljust(len(bars))}{phase} "
        heights = (cell.bytes * len(LEVELS) // max(highest, 1) for cell in alike)
        bars.append("".join([LEVELS[min(height, len(LEVELS) - 1)] for height in heights]), COLOURS.get(phase, ""))
    yield bars
    yield Text(phases.rstrip(), FAINT, no_wrap=True)


# -- comparison ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that differs: what it is of, and by how many bytes."""

    of: str
    size: int

    def text(self, unit: Unit) -> str:
        return f"{self.of} {unit.change(self.size)}"


def shown(changes: list[Change], unit: Unit) -> list[Change]:
    """Those that are not zero in print."""
    return [change for change in changes if unit.prints(change.size)]


def by_category(before: StageEstimate, after: StageEstimate) -> list[Change]:
    """Differences of the headline's shares, the largest first. They sum to the headline's difference."""
    old = {share.key: share.size for share in shares(before)}
    new = {share.key: share.size for share in shares(after)}
    changes = [Change(label(key), new.get(key, 0) - old.get(key, 0)) for key in {**old, **new}]
    return sorted(changes, key=lambda change: -abs(change.size))


def by_stage(before: Estimate, after: Estimate) -> list[Change]:
    """Differences of the headlines, stages that change by the same named together (largest change of a run).

    Empty where the variants have different numbers of stages.
    """
    if len(before.stages) != len(after.stages):
        return []
    starts = sorted(_starts(before) | _starts(after))
    runs = []
    for start, stop in zip(starts, [*starts[1:], len(before.stages)], strict=True):
        pairs = zip(before.stages[start:stop], after.stages[start:stop], strict=True)
        largest = max((new.headline - old.headline for old, new in pairs), key=abs)
        runs.append((start, stop, largest))
    return [
        Change(span(before.stages[members[0][0]].stage, before.stages[members[-1][1] - 1].stage), largest)
        for largest, members in ((size, list(same)) for size, same in groupby(runs, key=lambda run: run[2]))
    ]


def _starts(estimate: Estimate) -> set[int]:
    """Indices of the stages that open a row of the table."""
    lengths = [len(row.members) for row in rows_of(estimate)]
    return {sum(lengths[:index]) for index in range(len(lengths))}


LONGEST_NAME = 28
"""Columns after which a variant's name wraps."""


def print_comparison(
    names: Sequence[str], variants: Sequence[Estimate | PlanError], console: Console, written: Sequence[str] = ()
) -> None:
    """Prints ``variants``, named by ``names``: estimates, of which there is one at least and the first is what others
    are compared with, and errors of those that are refused.

    ``written`` are files that were.
    """
    estimates = [variant for variant in variants if not isinstance(variant, PlanError)]
    base = estimates[0]
    unit = unit_for(max(estimate.peak for estimate in estimates))
    put(console, _summary(names, variants, base, unit), Text())
    if len({estimate.plan.framework for estimate in estimates}) > 1:
        kept = [
            (name, Text(_kept(one))) for name, one in zip(names, variants, strict=True) if isinstance(one, Estimate)
        ]
        put(console, entries(kept, FAINT), Text())
    beside = "; free: in the moment that needs most" if any(map(free_words, estimates)) else ""
    put(console, Text(f"{plan_text(base.plan)}; sizes in {unit.name}{beside}", FAINT))
    told: set[Notice] = set()
    for name, variant in zip(names, variants, strict=True):
        title = Text(name, "bold")
        if isinstance(variant, PlanError):
            lines = [("refused", Text(str(variant)))]
        else:
            lines = list(_changes(base, variant, unit)) if variant is not base else []
            lines += [(notice.code, Text(notice.message)) for notice in variant.warnings if notice not in told]
            told.update(variant.warnings)
            if lines and variant is not base:
                title.append(f": {_effect(base, variant, unit)}", "none")
        if lines:
            put(console, Text(), title, entries([(f"  {name}", text) for name, text in lines], FAINT))
    put(console, *written_lines(written))


def _kept(estimate: Estimate) -> str:
    """What is sharded, and in which precision the parameters are that the optimizer updates."""
    stage, dtype = estimate.stages[estimate.peak_stage], estimate.plan.precision.dtype
    if stage.of(Category.MAIN_PARAMETERS):
        precision = f"{dtype} parameters with fp32 copies"
    elif dtype == "fp32" or stage.of(Category.PARAMETERS) >= 4 * stage.parameters:
        precision = "fp32 parameters"
    else:
        precision = f"only {dtype} parameters"
    return f"{framework(estimate.plan.framework).sharded(estimate.plan)}; {precision}"


def _summary(names: Sequence[str], variants: Sequence[Estimate | PlanError], base: Estimate, unit: Unit) -> Table:
    table = plain_table(
        folded("variant", max_width=LONGEST_NAME),
        left("verdict"),
        right(f"peak {stage_word(base.plan)}"),
        right("peak"),
        left("reading"),
        right("free"),
        right("change"),
    )
    for name, estimate in zip(names, variants, strict=True):
        if isinstance(estimate, PlanError):
            table.add_row(Breakable(Text(name, "bold")), Text("refused", BAD))
            continue
        worst = estimate.stages[estimate.peak_stage]
        change = unit.change(estimate.peak - base.peak) if estimate is not base else ""
        free = free_on(estimate, worst)
        table.add_row(
            Breakable(Text(name, "bold")),
            _fits(estimate),
            str(worst.stage),
            unit.figure(estimate.peak),
            reading_of(worst),
            Text(unit.figure(free), f"bold {BAD}" if worst.judged.verdict is Verdict.DOES_NOT_FIT else ""),
            change,
        )
    return table


def _fits(estimate: Estimate) -> Text:
    if estimate.fits is None:
        return Text(f"no GPU {UNKNOWN}" if estimate.capacity is None else f"may fit {UNKNOWN}", CAUTION)
    verdict = estimate.judged.verdict
    colour = {Verdict.FITS: GOOD, Verdict.DOES_NOT_FIT: BAD}.get(verdict, CAUTION)
    return Text(verdict.value.replace("-", " "), colour)


def _effect(base: Estimate, variant: Estimate, unit: Unit) -> str:
    """``saves 5.21 GiB at the peak``."""
    change = variant.peak - base.peak
    figure = unit.figure(abs(change))
    if not unit.prints(change):
        return "the same peak"
    return f"saves {figure} {unit.name} at the peak" if change < 0 else f"needs {figure} {unit.name} more at the peak"


def _changes(base: Estimate, variant: Estimate, unit: Unit) -> Iterator[tuple[str, Text]]:
    """The stages that matter category by category, then every stage's difference."""
    word = stage_word(base.plan)
    for before, after in _stages_that_matter(base, variant):
        names = [str(base.stages[before].stage), str(variant.stages[after].stage)]
        changes = by_category(base.stages[before], variant.stages[after])
        text = ", ".join(change.text(unit) for change in shown(changes, unit))
        yield f"{word} {names[0] if before == after else ' → '.join(names)}", Text(text or "no change")
    stages = by_stage(base, variant)
    if stages:
        yield f"by {word}", Text(", ".join(f"{change.of}: {unit.change(change.size)}" for change in stages))


def _stages_that_matter(base: Estimate, variant: Estimate) -> tuple[tuple[int, int], ...]:
    """The peak stage of each, in both; or one against the other where the pipelines differ in length."""
    if len(base.stages) != len(variant.stages):
        return ((base.peak_stage, variant.peak_stage),)
    return tuple((stage, stage) for stage in dict.fromkeys((base.peak_stage, variant.peak_stage)))
