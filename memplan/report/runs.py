"""``memplan runs``: all records, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..plan.errors import one_line
from ..records.database import Unreadable, shortest
from ..records.differences import differences, worst
from ..records.record import SCHEMA, Record
from .breakable import Breakable
from .output import put
from .palette import BAD, CAUTION, FAINT, GOOD
from .pieces import Pieces
from .run_words import device_words, framework_words, layout_pieces, model_words, part_words
from .stages import measured, plain_table

VERDICTS = {"agrees": GOOD, "differs": BAD, "failed": BAD, "nothing measured": CAUTION}
Row = Record | Unreadable


def runs_to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """What ``memplan runs --json`` prints; ``memplan runs ID --json`` prints all of a record."""
    return {"schema": SCHEMA, "memplan": __version__, "runs": [_to_json(row) for row in rows]}


def _to_json(row: Row) -> dict[str, Any]:
    if isinstance(row, Unreadable):
        return {"id": row.id, "time": row.time, "model": row.model, "gpu": row.gpu, "unreadable": row.problem}
    furthest = worst(differences(row.estimate, row.run))
    return {
        "id": row.id,
        "time": row.time,
        "model": row.ran.model.name,
        "framework": row.ran.framework,
        "code": row.run.code,
        "world": row.run.world,
        "device": row.run.device,
        "gpu": row.run.gpu,
        "ranks": len(row.run.ranks),
        "layout": row.ran.layout,
        "reading": None if furthest is None else furthest.reading,
        "stage": None if furthest is None else furthest.stage,
        "measured_bytes": None if furthest is None else furthest.measured,
        "estimated_bytes": None if furthest is None else furthest.estimated,
        "tolerance": row.tolerance,
        "verdict": row.verdict,
    }


def print_runs(rows: Sequence[Row], ids: Sequence[str], console: Console) -> None:
    """``ids`` are those of all runs, among which each is to be told by a few characters."""
    wide = _wide(rows, ids)
    put(console, wide if measured(wide, console).maximum <= console.width else _narrow(rows, ids))
    unreadable = [row for row in rows if isinstance(row, Unreadable)]
    for row in unreadable:
        put(console, Text(), Text.assemble((f"{shortest(row.id, ids)} cannot be read", CAUTION), f": {row.problem}"))
    put(console, Text(), Text("difference: of the estimate from what was measured, on the worst stage", FAINT))


def _wide(rows: Sequence[Row], ids: Sequence[str]) -> Table:
    table = plain_table()
    for name in ("run", "ended, UTC", "model", "framework", "layout", "ran on"):
        table.add_column(name, no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        when = row.time[:16].replace("T", " ")
        if isinstance(row, Unreadable):
            name, unreadable = one_line(row.model), Text("unreadable", CAUTION)
            table.add_row(shortest(row.id, ids), when, name, "", "", one_line(row.gpu or ""), "", unreadable)
            continue
        layout = " · ".join(layout_pieces(row))
        table.add_row(
            shortest(row.id, ids), when, model_words(row), framework_words(row), layout, device_words(row), *_end(row)
        )
    return table


def _narrow(rows: Sequence[Row], ids: Sequence[str]) -> Table:
    """With dates for times, and model, framework and layout below one another."""
    table = plain_table()
    table.add_column("run", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    table.add_column("ran", ratio=3)
    table.add_column("on", ratio=2, overflow="fold")
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    table.expand = True
    for row in rows:
        when = row.time[:10]
        if isinstance(row, Unreadable):
            unreadable = Text("unreadable", CAUTION)
            name = Breakable(one_line(row.model))
            table.add_row(shortest(row.id, ids), when, name, one_line(row.gpu or ""), "", unreadable)
            continue
        ran = Pieces([model_words(row), framework_words(row), *layout_pieces(row)])
        table.add_row(shortest(row.id, ids), when, ran, device_words(row), *_end(row))
    return table


def _end(row: Record) -> tuple[str, Text]:
    furthest = None if row.verdict == "failed" else worst(differences(row.estimate, row.run))
    return part_words(furthest), Text(row.verdict, VERDICTS[row.verdict])
