"""``memplan trace``: how far trace and estimate are apart, at named points and layer by layer, as text and as JSON;
with ``--learn`` what was learnt of an architecture, and where it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from .. import __version__
from ..plan.plan import ResolvedPlan
from ..tape.events import Category, Excursion
from ..trace.comparison import Comparison, Point, Row
from ..trace.learned import Learned
from ..trace.recording import Traced
from ..trace.run import Planned
from .json import SCHEMA
from .names import MIBS, elements, exact, modules_text, numbers_text, percent, plan_text, size
from .printing import CAUTION, FAINT, GOOD, folded, label, left, plain_table, put_report, right, spaced

CLOSE = 4096
"""Bytes: scalars, not layers."""


def print_trace(
    asked: Planned, traced: Traced, comparison: Comparison, console: Console, *, verbose: bool, quiet: bool
) -> None:
    """Prints the trace; ``quiet`` only the verdict, ``verbose`` every layer and what was put in CUDA's place."""
    found = _verdict(asked, comparison)
    put_report(console, found, chain([found], _body(asked, traced, comparison, verbose)), quiet=quiet)


def _verdict(asked: Planned, comparison: Comparison) -> Text:
    peak = max(one.traced for one in comparison.points)
    if asked.program is None:
        return Text.assemble(("Traced", "bold"), f": {asked.name} needs {size(peak)} at the peak; ", _no_recipe(asked))
    apart = comparison.furthest
    if not apart:
        return Text.assemble(("Equal", f"bold {GOOD}"), f": trace and estimate, {size(peak)} at the peak")
    share = percent(apart, peak)
    style = GOOD if apart <= CLOSE else CAUTION
    scalars = ", which scalars explain," if apart <= CLOSE else ""
    text = f"trace and estimate differ by at most {exact(apart)} bytes{scalars} of {size(peak)} at the peak"
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
    yield from spaced(_points(comparison.points))
    yield from spaced(_rows(comparison.rows, verbose))
    yield from spaced(
        Text("MiB (2^20 bytes), each storage rounded up to 512 bytes; difference: estimate − trace, bytes", FAINT)
    )
    whole = breakdown(traced)
    parts = ", ".join(f"{label(key)} {MIBS.figure(count)}" for key, count in whole.items())
    yield Text(f"At the peak: {parts}")
    if verbose:
        yield from spaced(Text("In place of what a CPU does"))
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
    table = plain_table(Column(), *map(right, ("traced", "estimated", "difference")))
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
    table = plain_table(folded("modules"), left("phase"), *map(right, ("left", "apart", "peak", "apart")))
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


def trace_to_json(asked: Planned, traced: Traced, comparison: Comparison) -> dict[str, Any]:
    """What ``memplan trace --json`` prints."""
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "torch": traced.torch,
        "transformers": traced.transformers or None,
        "model": asked.name,
        "plan": asked.plan.model_dump(mode="json") if asked.plan is not None else None,
        "no_recipe": asked.reason or None,
        "job": asked.job.to_json(),
        "parameters": traced.outline.parameters,
        "events": len(traced.recording.events),
        "substitutions": list(traced.substitutions),
        "breakdown": breakdown(traced),
        "points": [
            {"name": one.name, "traced_bytes": one.traced, "estimated_bytes": one.estimated}
            for one in comparison.points
        ],
        "modules": [
            {
                "module": row.entry,
                "phase": row.phase,
                "microbatch": row.microbatch,
                "traced": _excursion(row.traced),
                "estimated": _excursion(row.estimated) if row.estimated is not None else None,
            }
            for row in comparison.rows
        ],
    }


def breakdown(traced: Traced) -> dict[str, int]:
    """What is held at the peak of the whole step, by category."""
    peak = traced.whole.peak_by
    return {category.key: peak[category] for category in Category if peak[category]}


def _excursion(excursion: Excursion) -> dict[str, int]:
    return {"net_bytes": excursion.net, "peak_bytes": excursion.peak}


def print_learned(plan: ResolvedPlan, learned: Learned, console: Console, *, quiet: bool) -> None:
    verdict = Text.assemble(("Learnt", f"bold {GOOD}"), f": {plan.model.name}, from {learned.traces} traces")
    put_report(console, verdict, chain([verdict], _learned_body(learned)), quiet=quiet)


def _learned_body(learned: Learned) -> Iterator[Text]:
    fit = learned.fit
    yield Text(f"torch {fit.torch}, transformers {fit.transformers}; kept in {learned.path}", FAINT)
    yield Text()
    for piece in fit.pieces:
        kinds, sizes = len(piece.kinds), len(piece.polynomials)
        yield Text(f"{piece.domain}: {kinds} kinds of entries, {sizes} polynomials")
    if fit.layers:
        text = ", ".join(map(str, fit.verified))
        yield Text(f"layers: {'any number from ' if fit.extends else ''}{min(fit.verified)} (traced: {text})")
    for reason in fit.refused:
        yield Text(f"not beyond: {reason}", CAUTION)


def learned_to_json(plan: ResolvedPlan, learned: Learned) -> dict[str, Any]:
    """What ``memplan trace --learn --json`` prints."""
    fit = learned.fit
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "torch": fit.torch,
        "transformers": fit.transformers,
        "model": plan.model.source,
        "file": str(learned.path),
        "traces": learned.traces,
        "layers": {"verified": list(fit.verified), "any": fit.extends} if fit.layers else None,
        "pieces": [
            {
                "mbs": [one.domain.b_from, one.domain.b_to],
                "seq": [one.domain.s_from, one.domain.s_to],
                "seq_multiple": one.domain.multiple,
                "polynomials": len(one.polynomials),
            }
            for one in fit.pieces
        ],
        "not_beyond": list(fit.refused),
    }
