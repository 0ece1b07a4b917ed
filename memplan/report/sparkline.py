"""A stage over one iteration in a line of the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from ..allocator.timeline import Point, Timeline
from ..result import Estimate
from .names import size
from .palette import FAINT
from .stages import who

LEVELS = "▁▂▃▄▅▆▇█"
WIDEST = 100
"""Cells of a line."""
COLOURS = {"forward": "#7aa6d8", "backward": "#d39a5b", "step": "#8f7cc8"}


def timeline_lines(estimate: Estimate, lines: Sequence[Timeline], console: Console) -> Iterator[RenderableType]:
    """For each of ``lines`` its bytes from left to right, and below where passes begin."""
    for line in lines:
        if not line.points:
            continue
        totals = [sum(point.by) for point in line.points]
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


def _cells(line: Timeline, count: int) -> list[Point]:
    """The fullest moment of each of ``count`` equal stretches of the iteration's events, or the one before it."""
    cells: list[Point | None] = [None] * count
    for point in line.points:
        at = min((point.event - 1) * count // max(line.events, 1), count - 1)
        before = cells[at]
        if before is None or sum(point.by) > sum(before.by):
            cells[at] = point
    last, found = line.points[0], []
    for cell in cells:
        last = cell or last
        found.append(last)
    return found


def _drawn(cells: Sequence[Point], highest: int) -> Iterator[Text]:
    bars, phases, before = Text(no_wrap=True), Text(no_wrap=True, style=FAINT), ""
    for cell in cells:
        level = sum(cell.by) * len(LEVELS) // max(highest, 1)
        bars.append(LEVELS[min(level, len(LEVELS) - 1)], COLOURS.get(cell.phase, ""))
        if len(phases) <= len(bars) - 1:
            phases.append(f"{cell.phase} " if cell.phase != before and cell.phase else " ")
        before = cell.phase
    yield bars
    phases.truncate(len(cells))
    phases.rstrip()
    yield phases
