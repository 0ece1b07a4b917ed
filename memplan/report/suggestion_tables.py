"""Tables of ``memplan suggest-partition``: stages, alternatives, single changes, cuts, and memory against time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..result import Estimate, Verdict
from ..search.changes import Method
from ..search.result import Change, Found, Suggestion
from ..search.time import StepTime
from .names import DASH, Unit, elements, size, stage_word, unit_for
from .printing import (
    BAD,
    CAUTION,
    FAINT,
    FILLED,
    GAP,
    Breakable,
    Pieces,
    bar,
    folded,
    left,
    plain_table,
    right,
    shares,
)
from .stages import free_on, free_words, in_colour, limit_of, measured, peak_reading, rows_of, unit_of
from .suggestion_words import (
    TimeUnit,
    beside_training,
    change_percent,
    difference_pieces,
    layout_pieces,
    part,
    rough,
    same_layout,
    time_unit,
    unit_of_time,
    verdict_words,
)

SHORTEST_BAR, LONGEST_BAR = 12, 64
FRONT_BAR = 12
BILLION = 1e9


def compact_stages(estimate: Estimate, console: Console) -> Iterator[RenderableType]:
    """What stages hold, need and leave: a row for each run that is alike, with a bar in colour where there is room."""
    table = _stage_table(estimate, 0)
    cells = console.width - measured(table, console).maximum - GAP
    if in_colour(console) and cells >= SHORTEST_BAR:
        table = _stage_table(estimate, min(cells, LONGEST_BAR))
    yield table
    words = free_words(estimate)
    if words:
        yield Text(f"{peak_reading(estimate)}: of an iteration, as below; {words}", FAINT)


def _stage_table(estimate: Estimate, cells: int) -> Table:
    limit, unit = limit_of(estimate), unit_of(estimate)
    table = plain_table(
        right(stage_word(estimate.plan)),
        folded("modules", max_width=40),
        right("params"),
        right(f"{peak_reading(estimate)} {unit.name}"),
        right("free"),
        *([left()] if cells else []),
    )
    scale = max(estimate.capacity or 0, estimate.peak, 1)
    for row in rows_of(estimate):
        over = f"bold {BAD}" if row.is_over else ""
        figures: list[RenderableType] = [
            row.stages,
            Breakable(row.modules()),
            elements(row.worst.parameters),
            Text(DASH.join(row.figures(lambda stage: stage.headline, unit)), over or "bold"),
            Text(DASH.join(row.figures(lambda stage: free_on(estimate, stage), unit)), over),
        ]
        table.add_row(*figures, *([bar(shares(row.worst), scale, cells, limit)] if cells else []))
    return table


def alternatives(found: Found) -> Table:
    """The recommended layout, the others, and the plan as given: time and memory of each, and how they differ."""
    best, *others = found.best
    unit, time = units([*found.best, *([found.given] if found.given is not None else [])], best)
    step = f"step {time.name} ±{part(found.error)}" if time.known else "step"
    table = plain_table(folded("layout"), *map(right, (step, "slower", f"peak {unit.name}", "memory")))
    table.add_row(
        Pieces(["recommended", *_moment_marks(best)]), time.figure(best.seconds), "", unit.figure(best.needs), ""
    )
    for other in others:
        table.add_row(_named(other, best), *_beside(other, best, unit, time))
    given = found.given
    if given is not None and not same_layout(given, best):
        marks = [Text("leaves too little free", CAUTION)] if given.fits and given.needs > found.limit else []
        table.add_row(_named(given, best, "as given: ", marks), *_beside(given, best, unit, time))
    return table


def worth(found: Found) -> Iterator[RenderableType]:
    """What the recommended layout costs in time against the fastest, and what it leaves for that."""
    best, *others = found.best
    faster = [
        one
        for one in others
        if one.seconds < best.seconds
        and one.needs > best.needs
        and one.point.keeps_numerics == best.point.keeps_numerics
        and not retry_marks(one)
    ]
    if found.objective == "memory" or not best.timed or not faster:
        return
    fastest = min(faster, key=lambda one: one.seconds)
    lost = best.seconds - fastest.seconds
    saved = [change_percent(best.seconds, fastest.seconds).strip("+")]
    if best.step is not None:
        saved.append(f"{rough(gpu_hours(best, best.step) * lost / best.seconds)} GPU-hours for a billion tokens")
    yield Text(
        f"The fastest layout is {time_unit(lost).text(lost)} faster per step ({', '.join(saved)}) and needs "
        f"{size(fastest.needs - best.needs)} more. Layouts within {part(found.within)} of it count as equally fast, "
        f"and among these the one with most free memory is recommended, if that is {size(found.gain)} or more.",
        FAINT,
    )


def _named(other: Suggestion, best: Suggestion, prefix: str = "", beside: Sequence[Text] = ()) -> Pieces:
    """What the layout does differently, marked where it trains with other numbers, or what its verdict is."""
    first, *pieces = difference_pieces(other, best)
    marks = [] if other.point.keeps_numerics else [Text("changes the numerics", CAUTION)]
    marks += [Text(f"does not fit{beside_training(other.judged)}", BAD)] if not other.fits else retry_marks(other)
    return Pieces([prefix + first, *pieces, *marks, *_moment_marks(other), *beside])


def _moment_marks(one: Suggestion) -> list[Text]:
    """Where another moment than an iteration needs most, which its peak is then of."""
    moment, more = one.worst_moment
    return [Text(f"peak in {moment}", FAINT)] if more else []


def retry_marks(one: Suggestion) -> list[Text]:
    """Where the allocator has to give memory back, or only the least outside PyTorch leaves enough."""
    return [verdict_words(one.judged)] if one.judged.verdict in (Verdict.TIGHT, Verdict.RETRIES) else []


def _beside(other: Suggestion, best: Suggestion, unit: Unit, time: TimeUnit) -> list[str]:
    slower = time.change(other.seconds, best.seconds)
    return [time.figure(other.seconds), slower, unit.figure(other.needs), unit.change(other.needs - best.needs)]


def units(suggestions: Sequence[Suggestion], best: Suggestion) -> tuple[Unit, TimeUnit]:
    return unit_for(max(one.needs for one in suggestions)), unit_of_time(best)


def changes_table(stuck: Suggestion, changes: Sequence[Change]) -> Table:
    """Each with the bytes that it gains and the time that it loses. Peaks are of the moment that needs most, before any
    cache is given back."""
    unit, time = units([stuck, *(change.suggestion for change in changes)], stuck)
    table = plain_table(
        folded("change"), folded(), *map(right, (f"peak {unit.name}", "gained", f"step {time.name}", "slower"))
    )
    table.add_row("as it is", verdict_words(stuck.judged), unit.figure(stuck.needs), "", time.figure(stuck.seconds), "")
    for change in changes:
        after = change.suggestion
        table.add_row(
            Text(change.what),
            verdict_words(after.judged),
            unit.figure(after.needs),
            unit.figure(change.gained),
            time.figure(after.seconds),
            time.change(after.seconds, stuck.seconds),
        )
    return table


def cuts_table(methods: Sequence[Method], best: Suggestion) -> Iterator[RenderableType]:
    """The proposed cut beside other ways to cut the same layout."""
    proposed, *others = methods
    known = [method.requested for method in methods if method.requested is not None]
    if proposed.requested is None or proposed.seconds is None:
        return
    unit, time = unit_for(max(known)), unit_of_time(best)
    table = plain_table(
        folded("cut"), *map(right, (f"requested {unit.name}", "more", "stage", f"step {time.name}", "slower"))
    )
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
            time.change(method.seconds, proposed.seconds) if is_other else "",
        )
    yield Text.assemble(("Other cuts of the same layout", "bold"), (": peak of the fullest stage", FAINT))
    yield table
    for method in others:
        if method.problem:
            yield Text(f"{method.name} makes no cut: {method.problem}", FAINT)


def front_table(front: Sequence[Suggestion], console: Console, most: int | None) -> Iterator[RenderableType]:
    """Layouts of which none needs less memory and less time, fastest first; at most ``most`` of them, ends included."""
    shown = _thinned(front, most)
    unit, time = unit_for(max(one.requested for one in front)), time_unit(front[0].seconds)
    more = len(front) - len(shown)
    table = plain_table(right(f"step {time.name}"), left(), right(unit.name), left(), folded("layout"))
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


def gpu_hours(suggestion: Suggestion, step: StepTime) -> float:
    """For a billion tokens."""
    return (suggestion.plan.hardware.gpus or 1) * BILLION / step.tokens_per_second / 3600
