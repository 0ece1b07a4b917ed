"""``memplan trace``: how far trace and estimate are apart, at named points and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..trace.comparison import Comparison, Point, Row
from ..trace.planned import Planned
from ..trace.traced import Traced
from .names import modules_text, numbers_text, plan_text
from .output import put, put_line
from .palette import CAUTION, FAINT, GOOD, label
from .stages import plain_table
from .trace_json import breakdown
from .units import MIB, Unit, elements, exact, percent, size

MIBS = Unit("MiB", MIB, 1)
CLOSE = 4096
"""Bytes: scalars, not layers."""


def print_trace(
    asked: Planned, traced: Traced, comparison: Comparison, console: Console, *, verbose: bool, quiet: bool
) -> None:
    """Prints the trace; ``quiet`` only the verdict, ``verbose`` every layer and what was put in CUDA's place."""
    if quiet:
        put_line(console, _verdict(asked, comparison))
    else:
        put(console, _verdict(asked, comparison), *_body(asked, traced, comparison, verbose))


def _verdict(asked: Planned, comparison: Comparison) -> Text:
    peak = max(one.traced for one in comparison.points)
    if asked.program is None:
        return Text.assemble(("Traced", "bold"), f": {asked.name} needs {size(peak)} at the peak; ", _no_recipe(asked))
    apart = comparison.furthest
    if not apart:
        return Text.assemble(("Equal", f"bold {GOOD}"), f": trace and estimate, {size(peak)} at the peak")
    share = percent(apart, peak)
    style = GOOD if apart <= CLOSE else CAUTION
    close = "but for scalars: " if apart <= CLOSE else ""
    text = f"trace and estimate are {close}{exact(apart)} bytes apart at most, of {size(peak)} at the peak"
    return Text.assemble(("Close" if apart <= CLOSE else "Apart", f"bold {style}"), f": {text} ({share} %)")


def _no_recipe(asked: Planned) -> str:
    return f"no recipe to compare it with ({asked.reason})"


def _body(asked: Planned, traced: Traced, comparison: Comparison, verbose: bool) -> Iterator[RenderableType]:
    job = asked.job
    line = (
        plan_text(asked.plan) if asked.plan is not None else f"{asked.name} · mbs {job.b} · seq {job.s} · {job.dtype}"
    )
    yield Text(line, FAINT)
    count = elements(traced.outline.parameters)
    yield Text(f"{count} parameters, torch {traced.torch}, {_code(traced)}{_rank(asked)}", FAINT)
    yield Text()
    yield _points(comparison.points)
    yield Text()
    yield _rows(comparison.rows, verbose)
    yield Text()
    yield Text("MiB (2^20 bytes), each storage rounded up to 512 bytes; difference: estimate − trace, bytes", FAINT)
    whole = breakdown(traced)
    parts = ", ".join(f"{label(key)} {MIBS.figure(count)}" for key, count in whole.items())
    yield Text(f"At the peak: {parts}")
    if verbose:
        yield Text()
        yield Text("In place of what a CPU does")
        for one in traced.substitutions:
            yield Text(f"  {one}", FAINT)


def _code(traced: Traced) -> str:
    """Whose modules ran."""
    return f"transformers {traced.transformers}" if traced.transformers else "memplan's modules of torchtitan's Llama"


def _rank(asked: Planned) -> str:
    """Which rank of a pipeline it is."""
    stages = asked.job.torchtitan.stages if asked.job.torchtitan is not None else None
    return f", stage {stages.rank} of {stages.ranks}" if stages is not None else ""


def _points(points: Sequence[Point]) -> Table:
    table = plain_table()
    table.add_column("")
    for name in ("traced", "estimated", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in points:
        estimated = MIBS.figure(one.estimated) if one.estimated is not None else ""
        table.add_row(one.name, MIBS.figure(one.traced), estimated, _difference(one.traced, one.estimated))
    return table


def _difference(traced: int, estimated: int | None) -> Text:
    if estimated is None:
        return Text("")
    apart = estimated - traced
    if not apart:
        return Text("0", FAINT)
    text = ("+" if apart > 0 else "") + exact(apart)
    return Text(text, FAINT if abs(apart) <= CLOSE else CAUTION)


def _rows(rows: Sequence[Row], verbose: bool) -> Table:
    table = plain_table()
    table.add_column("modules", overflow="fold")
    table.add_column("phase", no_wrap=True)
    for name in ("left", "apart", "peak", "apart"):
        table.add_column(name, justify="right", no_wrap=True)
    for members in [[one] for one in rows] if verbose else _alike(rows):
        table.add_row(*_cells(members))
    return table


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Neighbours that look alike, those of micro-batches that do so too at the first one's place."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for (*looks, _), group in groupby(rows, key=_looks):
        members = list(group)
        found.setdefault((*looks, *(row.entry for row in members)), []).extend(members)
    return list(found.values())


def _looks(row: Row) -> tuple[object, ...]:
    estimated = row.estimated
    known = (estimated.net, estimated.peak) if estimated is not None else ()
    kind = row.entry.partition(".")[0]
    return row.phase, kind, row.traced.net, row.traced.peak, known, row.microbatch


def _cells(rows: Sequence[Row]) -> list[RenderableType]:
    one, estimated = rows[0], rows[0].estimated
    own = [row.entry for row in rows if row.microbatch == one.microbatch]
    numbers = sorted({row.microbatch for row in rows})
    phase = f"{one.phase}, mb {numbers_text(numbers)}" if numbers != [0] else one.phase
    return [
        modules_text(own if one.phase == "forward" else own[::-1]),
        phase,
        MIBS.figure(one.traced.net),
        _difference(one.traced.net, estimated.net if estimated is not None else None),
        MIBS.figure(one.traced.peak),
        _difference(one.traced.peak, estimated.peak if estimated is not None else None),
    ]
