"""The tables of ``memplan suggest-partition``: stages, alternatives, changes, cuts, and memory against time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..result import Estimate
from ..search.methods import Method
from ..search.result import Change, Found, Suggestion
from .bar import FILLED, bar
from .breakable import Breakable
from .names import DASH, stage_word
from .palette import BAD, CAUTION, FAINT, GOOD, shares
from .pieces import Pieces
from .rows import free_on, limit_of, rows_of
from .stages import GAP, in_colour, measured, peak_reading, plain_table, unit_of
from .suggestion_words import TimeUnit, change_percent, difference_pieces, layout_pieces, same_layout, time_unit
from .units import Unit, elements, unit_for

SHORTEST_BAR, LONGEST_BAR = 12, 64
FRONT_BAR = 12


def compact_stages(estimate: Estimate, console: Console) -> Iterator[RenderableType]:
    """What stages hold, need and leave: a row for each run that is alike, with a bar in colour where there is room."""
    table = _stage_table(estimate, 0)
    cells = console.width - measured(table, console).maximum - GAP
    if in_colour(console) and cells >= SHORTEST_BAR:
        table = _stage_table(estimate, min(cells, LONGEST_BAR))
    yield table


def _stage_table(estimate: Estimate, cells: int) -> Table:
    limit, unit = limit_of(estimate), unit_of(estimate)
    table = plain_table()
    table.add_column(stage_word(estimate.plan), justify="right", no_wrap=True)
    table.add_column("modules", overflow="fold", max_width=40)
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column(f"{peak_reading(estimate)} {unit.name}", justify="right", no_wrap=True)
    table.add_column("free", justify="right", no_wrap=True)
    if cells:
        table.add_column("", no_wrap=True)
    scale = max(estimate.capacity or 0, estimate.peak, 1)
    for row in rows_of(estimate):
        over = f"bold {BAD}" if limit is not None and row.worst.headline > limit else ""
        figures: list[RenderableType] = [
            row.stages,
            Breakable(row.modules()),
            elements(row.worst.parameters),
            Text(DASH.join(row.figures(lambda stage: stage.headline, unit)), over or "bold"),
            Text(DASH.join(row.figures(lambda stage: free_on(stage, limit), unit)), over),
        ]
        table.add_row(*figures, *([bar(shares(row.worst), scale, cells, limit)] if cells else []))
    return table


def alternatives(found: Found) -> Table:
    """The recommended layout, the others, and the plan as given: time and memory of each, and how they differ."""
    best, *others = found.best
    unit, time = _units([*found.best, *([found.given] if found.given is not None else [])], best)
    table = plain_table()
    table.add_column("layout", overflow="fold")
    for header in (f"step {time.name}", "slower", f"peak {unit.name}", "memory"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row("recommended", time.figure(best.seconds), "", unit.figure(best.needs), "")
    for other in others:
        table.add_row(_named(other, best, found.limit), *_beside(other, best, unit, time))
    if found.given is not None and not same_layout(found.given, best):
        table.add_row(_named(found.given, best, found.limit, "as given: "), *_beside(found.given, best, unit, time))
    return table


def _named(other: Suggestion, best: Suggestion, limit: int, prefix: str = "") -> Pieces:
    """What the layout does differently, marked where it trains with other numbers or does not fit."""
    first, *pieces = difference_pieces(other, best)
    marks = [] if other.point.keeps_numerics else [Text("changes the numerics", CAUTION)]
    marks += [Text("does not fit", BAD)] if other.needs > limit else []
    return Pieces([prefix + first, *pieces, *marks])


def _beside(other: Suggestion, best: Suggestion, unit: Unit, time: TimeUnit) -> list[str]:
    slower = change_percent(other.seconds, best.seconds)
    return [time.figure(other.seconds), slower, unit.figure(other.needs), unit.change(other.needs - best.needs)]


def _units(suggestions: Sequence[Suggestion], best: Suggestion) -> tuple[Unit, TimeUnit]:
    return unit_for(max(one.needs for one in suggestions)), time_unit(best.seconds)


def changes_table(stuck: Suggestion, changes: Sequence[Change]) -> Table:
    """Each with the bytes that it gains and the time that it loses."""
    unit, time = _units([stuck, *(change.suggestion for change in changes)], stuck)
    table = plain_table()
    table.add_column("change", overflow="fold")
    table.add_column("", no_wrap=True)
    for header in (f"peak {unit.name}", "gained", f"step {time.name}", "slower"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row("none", "", unit.figure(stuck.needs), "", time.figure(stuck.seconds), "")
    for change in changes:
        after = change.suggestion
        table.add_row(
            Text(change.what),
            Text("fits", GOOD) if change.fits else Text("too large", BAD),
            unit.figure(after.needs),
            unit.figure(change.gained),
            time.figure(after.seconds),
            change_percent(after.seconds, stuck.seconds),
        )
    return table


def cuts_table(methods: Sequence[Method]) -> Iterator[RenderableType]:
    """The proposed cut beside other ways to cut the same layout."""
    proposed, *others = methods
    known = [method.requested for method in methods if method.requested is not None]
    if proposed.requested is None or proposed.seconds is None:
        return
    unit, time = unit_for(max(known)), time_unit(proposed.seconds)
    table = plain_table()
    table.add_column("cut", overflow="fold")
    for header in (f"requested {unit.name}", "more", "stage", f"step {time.name}", "slower"):
        table.add_column(header, justify="right", no_wrap=True)
    for method in methods:
        if method.requested is None or method.seconds is None:
            table.add_row(Text(method.name), Text(DASH, FAINT), "", "", "", "")
            continue
        is_other = method is not proposed
        table.add_row(
            Text(method.name),
            unit.figure(method.requested),
            unit.change(method.requested - proposed.requested) if is_other else "",
            str(method.fullest),
            time.figure(method.seconds),
            change_percent(method.seconds, proposed.seconds) if is_other else "",
        )
    yield Text.assemble(("The same layout cut by others", "bold"), (": peak of the fullest stage", FAINT))
    yield table
    for method in others:
        if method.problem:
            yield Text(f"{method.name} makes no cut: {method.problem}", FAINT)


def front_table(front: Sequence[Suggestion], console: Console, most: int | None) -> Iterator[RenderableType]:
    """Layouts of which none needs less memory and less time, fastest first; at most ``most`` of them, ends included."""
    shown = _thinned(front, most)
    unit, time = unit_for(max(one.requested for one in front)), time_unit(front[0].seconds)
    more = len(front) - len(shown)
    table = plain_table()
    table.add_column(f"step {time.name}", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column(unit.name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("layout", overflow="fold")
    slowest, largest = max(one.seconds for one in front), max(one.requested for one in front)
    cells = FRONT_BAR if console.width < 120 else 2 * FRONT_BAR
    for one in shown:
        table.add_row(
            time.figure(one.seconds),
            Text(FILLED * max(1, round(cells * one.seconds / slowest)), "yellow"),
            unit.figure(one.requested),
            Text(FILLED * max(1, round(cells * one.requested / largest)), "blue"),
            Pieces(layout_pieces(one) if one is front[0] else difference_pieces(one, front[0])),
        )
    told = ": requested by the fullest stage" + (f" ({more} more with -v)" if more else "")
    yield Text.assemble(("Memory against time", "bold"), (told, FAINT))
    yield table


def _thinned(front: Sequence[Suggestion], most: int | None) -> Sequence[Suggestion]:
    """``front``, or points of it at equal distances."""
    if most is None or len(front) <= most:
        return front
    return [front[at * (len(front) - 1) // (most - 1)] for at in range(most)]
