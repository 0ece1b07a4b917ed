"""``memplan explain`` of a memory snapshot: the run's peak beside the plan's, and what only one of them holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..explain.compared import Compared, Parting, Same
from ..explain.requests import Explanation
from ..tape.events import Category
from .explanation import SCHEMA, explanation_report, explanation_to_json
from .names import exact, percent, size, unit_for
from .printing import (
    COLOURS,
    FAINT,
    SWATCH,
    Breakable,
    WholeTable,
    folded,
    label,
    left,
    plain_table,
    put_report,
    right,
    spaced,
    titled,
)


def verdict(told: Compared, failed: Explanation | None) -> Text:
    """One sentence: the run's peak, and how far the plan is from it."""
    run = told.run
    text = Text(f"GPU {run.device} held {size(run.peak)} of tensors at its peak", "bold")
    if told.stage is not None:
        off = percent(told.planned - run.peak, run.peak)
        text += Text(
            f"; the plan {size(told.planned)} ({'+' if told.planned > run.peak else ''}{off} %)".replace("-", "−")
        )
    if failed is not None:
        text += Text("; a request failed")
    return text


def print_snapshot(told: Compared, failed: Explanation | None, console: Console, *, quiet: bool = False) -> None:
    """Prints ``told``, and what ``failed`` in the trace; ``quiet`` only the first sentence."""
    put_report(console, verdict(told, failed), _report(told, failed), quiet=quiet)


def _report(told: Compared, failed: Explanation | None) -> Iterator[RenderableType]:
    yield verdict(told, failed)
    yield Text(_facts(told), FAINT)
    if told.stage is not None:
        yield from spaced(_categories(told))
        if told.only_planned:
            yield from titled("Only in the plan", _same_table(told.only_planned, planned=True))
    if told.only_ran:
        yield from titled(
            "Only in the run" if told.stage is not None else "At the peak", _same_table(told.only_ran, planned=False)
        )
    if told.parting is not None:
        yield from spaced(Text.assemble(("Where they part", "bold"), f": {_parting(told.parting)}"))
    if failed is not None:
        yield from spaced(*explanation_report(failed))


def _facts(told: Compared) -> str:
    run = told.run
    parts = [f"{run.entries:,} entries", f"{exact(run.peak)} bytes", f"{size(run.reserved)} reserved at the end"]
    parts += [f"{size(run.unknown)} there before the trace"] if run.unknown else []
    parts += [f"beside stage {told.stage}"] if told.stage is not None else []
    return " · ".join(parts)


def _categories(told: Compared) -> Table:
    unit = unit_for(max(told.planned, told.run.peak))
    table = WholeTable.grid(left(), right(), right(), padding=(0, 2, 0, 0))
    table.add_row(Text("  for", FAINT), Text(f"plan {unit.name}", FAINT), Text("in the run, too", FAINT))
    for category in Category:
        if unit.prints(told.by[category]):
            name = Text.assemble((SWATCH, COLOURS[category]), f" {label(category.key)}")
            table.add_row(name, unit.figure(told.by[category]), unit.figure(told.matched[category]))
    table.add_row("= requested", unit.figure(told.planned), unit.figure(sum(told.matched)), style="bold")
    table.add_row("  the run", "", unit.figure(told.run.peak))
    return table


def _same_table(shown: Sequence[Same], *, planned: bool) -> Table:
    kinds = [left("for")] if planned else []
    table = plain_table(folded("what"), *kinds, *map(right, ("each", "count", "together")))
    for one in shown:
        row: list[RenderableType] = [Breakable(one.what)]
        row += [Text(label(one.category))] if planned else []
        table.add_row(*row, Text(size(one.size)), Text(f"{one.times:,}"), Text(size(one.total)))
    return table


def _parting(parting: Parting) -> str:
    """``behind 12 requests of the iteration that are the same the plan has …, the run …``."""
    planned, ran = parting.planned, parting.ran
    if planned is None:
        return f"nowhere: all {parting.same:,} requests of 1 MiB or more of forward and backward are the same."
    tensor = planned.tensor
    shape = f" {'×'.join(map(str, tensor.shape))} {tensor.dtype}".rstrip() if tensor.shape else ""
    text = (
        f"behind {parting.same:,} requests of 1 MiB or more that are the same, the plan has {tensor.name}{shape} in "
        f"{tensor.module or tensor.phase}, {tensor.phase} ({size(planned.size)}), and the run "
    )
    if ran is None:
        return f"{text}no more."
    frame = parting.frame
    where = f" at {frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}" if frame is not None else ""
    return f"{text}{size(ran.size)}{where}."


def snapshot_to_json(told: Compared, failed: Explanation | None) -> dict[str, Any]:
    """What ``memplan explain SNAPSHOT --json`` prints: bytes as asked for, each tensor rounded up to 512."""
    parting, planned = told.parting, told.stage is not None
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "device": told.run.device,
        "entries": told.run.entries,
        "run_peak_bytes": told.run.peak,
        "run_unknown_bytes": told.run.unknown,
        "run_reserved_bytes": told.run.reserved,
        "stage": told.stage,
        "plan_peak_bytes": told.planned if planned else None,
        "plan": {category.key: told.by[category] for category in Category} if planned else None,
        "matched": {category.key: told.matched[category] for category in Category} if planned else None,
        "only_in_plan": [_same_to_json(one) for one in told.only_planned],
        "only_in_run": [_same_to_json(one) for one in told.only_ran],
        "parting": None if parting is None else _parting_to_json(parting),
        "failed": None if failed is None else explanation_to_json(failed),
    }


def _same_to_json(one: Same) -> dict[str, Any]:
    return {"what": one.what, "category": one.category or None, "bytes": one.size, "count": one.times}


def _parting_to_json(parting: Parting) -> dict[str, Any]:
    planned, ran = parting.planned, parting.ran
    tensor = planned.tensor if planned is not None else None
    return {
        "same_requests": parting.same,
        "plan": None
        if planned is None or tensor is None
        else {"tensor": tensor.name, "module": tensor.module, "phase": tensor.phase, "bytes": planned.size},
        "run": None
        if ran is None
        else {"bytes": ran.size, "frame": str(parting.frame) if parting.frame is not None else None},
    }
