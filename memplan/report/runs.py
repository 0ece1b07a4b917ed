"""``memplan runs``: all records, newest first, or one of them, measured beside estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from .. import __version__
from ..device.measured import CONTEXT, NCCL, WORKSPACES, code_of
from ..plan.errors import one_line
from ..records.database import Unreadable, facts_of, shortest
from ..records.readings import Failure, Place, RankReading
from ..records.record import SCHEMA, Difference, Record, differences, judged, worst
from ..trace.job import MOST_MICROBATCHES
from ..validate.native import own_code
from .names import MEANING, MINUS, Unit, exact, size, unit_for
from .printing import (
    BAD,
    CAUTION,
    FAINT,
    GOOD,
    Breakable,
    Pieces,
    folded,
    label,
    left,
    plain_table,
    put,
    put_report,
    right,
    spaced,
    titled,
)
from .stages import measured

DEGREES = ("tp", "pp", "dp", "cp", "ep", "vpp")


def model_words(record: Record) -> str:
    return one_line(record.ran.model.name)


def framework_words(record: Record) -> str:
    """``fsdp``; ``megatron by torch`` where another's code ran than the plan's framework has."""
    framework, code = record.ran.framework, record.run.code
    return one_line(framework if code_of(framework) == code else f"{framework} by {code}")


def layout_pieces(record: Record) -> list[str]:
    """``tp 2``, ``pp 4``: what is not 1."""
    layout = record.ran.layout
    pieces = [f"{name} {layout[name]}" for name in DEGREES if layout.get(name) not in (None, 1)]
    return pieces + ([f"zero {layout['zero']}"] if layout.get("zero") else [])


def batch_pieces(record: Record) -> list[str]:
    """The batch, the dtype and the optimizer."""
    ran = record.ran
    sizes = [(name, getattr(ran.batch, name)) for name in ("mbs", "gbs", "seq")]
    named = (one_line(ran.precision.dtype), one_line(ran.optimizer.name))
    return [*(f"{name} {size}" for name, size in sizes if size is not None), *named]


def device_words(record: Record) -> str:
    """``4 × h100-80gb``, ``h100-80gb, emulated``, ``4 × cpu``, ``fake tensors``."""
    run, hardware = record.run, record.hardware
    if run.device == "fake" or run.world == "fake":
        return "fake tensors"
    name = one_line(run.gpu or hardware.gpu or "cpu")
    if run.world == "emulated":
        return f"{name}, emulated"
    count = record.ran.hardware.gpus or len(run.ranks)  # of a run that failed not all have a reading
    return name if count == 1 else f"{count} × {name}"


def part_words(difference: Difference | None) -> str:
    """``+1.2 %``: how much more was estimated than measured; nothing where that is not known."""
    if difference is None or difference.part is None:
        return ""
    figure = f"{100 * abs(difference.part):.1f}"
    if not figure.strip("0."):
        return "0.0 %"
    return f"{MINUS if difference.part < 0 else '+'}{figure} %"


def verdict_words(record: Record, found: tuple[Difference, ...]) -> str:
    """What follows the verdict."""
    tolerance = f"{100 * record.tolerance:.4g} %"
    failures = record.run.failures
    if record.verdict == "failed" and failures:
        first, more = failures[0], len(failures) - 1
        who = "the run" if first.rank is None else f"rank {first.rank}"
        when = f" in {first.when}" if first.when else ""
        others = f"; {more} more failed" if more else ""
        return f"{who}, {first.kind.replace('-', ' ')}{one_line(when)}: {one_line(first.message)}{others}"
    if record.verdict == "failed":
        return "it did not run to its end"
    all_judged = judged(found)
    if record.verdict == "nothing measured" or not all_judged:
        return "there is no reading that the estimate has, too"
    furthest = max(all_judged, key=lambda one: abs(one.part or 0.0))
    where = f" on stage {furthest.stage}" if len(all_judged) > 1 else ""
    return f"{furthest.reading} {part_words(furthest)} from measured{where}, tolerance {tolerance}{_in_place(record)}"


def _in_place(record: Record) -> str:
    """Which framework it says nothing about, where another one's shape ran."""
    given, ran = record.plan.get("framework"), record.ran.framework
    return "" if given in (None, ran) else one_line(f"; of {ran}, which ran in place of {given}")


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
    put(console, runs_table(rows, ids, console))
    for row in [row for row in rows if isinstance(row, Unreadable)]:
        put(console, Text(), Text.assemble((f"{shortest(row.id, ids)} cannot be read", CAUTION), f": {row.problem}"))
    put(console, Text(), Text("difference: estimate from measurement, on the stage where it is largest", FAINT))


def runs_table(rows: Sequence[Row], ids: Sequence[str], console: Console) -> Table:
    """A line for each run, as ``console`` has room for."""
    wide = _wide(rows, ids)
    return wide if measured(wide, console).maximum <= console.width else _narrow(rows, ids)


def _wide(rows: Sequence[Row], ids: Sequence[str]) -> Table:
    table = plain_table(
        *[left(name) for name in ("run", "ended, UTC", "model", "framework", "layout", "ran on")],
        right("difference"),
        left("verdict"),
    )
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
    table = plain_table(
        left("run"),
        left("ended"),
        Column("ran", ratio=3),
        folded("on", ratio=2),
        right("difference"),
        folded("verdict"),
    )
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


NOT_COMPARED = ("workspaces", "block_rounding")
"""Categories that requested bytes do not have."""
LEARNED = {CONTEXT: "CUDA context", NCCL: "NCCL's buffers", WORKSPACES: "cuBLAS workspaces"}


def print_run(record: Record, console: Console, *, quiet: bool = False) -> None:
    """Prints ``record``; ``quiet`` only the verdict."""
    put_report(console, _verdict(record, differences(record.estimate, record.run)), run_report(record), quiet=quiet)


def _verdict(record: Record, found: tuple[Difference, ...]) -> Text:
    word = record.verdict.capitalize(), f"bold {VERDICTS[record.verdict]}"
    return Text.assemble(word, f": {verdict_words(record, found)}")


def run_report(record: Record) -> Iterator[RenderableType]:
    """The verdict, and what follows it."""
    found = differences(record.estimate, record.run)
    yield _verdict(record, found)
    yield Pieces(
        [model_words(record), framework_words(record), *layout_pieces(record), *batch_pieces(record)], style=FAINT
    )
    yield Pieces(_circumstances(record), style=FAINT)
    if found:
        unit = unit_for(max(one.measured for one in found))
        yield from spaced(_readings(found, unit, record.tolerance))
        yield Text()
        alone = "; device: without NCCL, which a played group has not" if record.run.world == "emulated" else ""
        legend = f"{MEANING[unit.name]}, most loaded rank of each stage; difference: estimate − measured{alone}"
        yield Text(legend, FAINT)
        yield from _categories(record, found, unit)
    for title, lines in _sections(record):
        yield from titled(title)
        for line in lines:
            yield Text(f"  {one_line(line)}")
    yield from spaced(
        Text(f"run {record.id}, {record.time.replace('T', ' ').rstrip('Z')} UTC: {one_line(record.command)}", FAINT)
    )


def _circumstances(record: Record) -> list[str]:
    """What it ran on, and whose code it was."""
    run, versions = record.run, record.run.versions
    named = [("torch", versions.torch), ("CUDA", versions.cuda), ("driver", versions.driver), ("NCCL", versions.nccl)]
    pieces = [device_words(record)] + [f"{record.hardware.nodes} nodes"] * (record.hardware.nodes > 1)
    code = own_code(run.code).title
    pieces += [code, *(f"{name} {version}" for name, version in named if version)]
    pieces += [f"{name} {version}" for name, version in sorted(versions.others.items())]
    return [one_line(piece) for piece in (*pieces, f"memplan {versions.memplan}")]


def _readings(found: Sequence[Difference], unit: Unit, tolerance: float) -> Table:
    table = plain_table(right("stage"), left("reading"), *map(right, ("measured", "estimated", "difference", "")))
    shown = None
    for one in found:
        change = "" if one.bytes is None else unit.change(one.bytes)
        far = one.part is not None and abs(one.part) > tolerance
        table.add_row(
            str(one.stage) if one.stage != shown else "",
            one.reading,
            unit.figure(one.measured),
            unit.figure(one.estimated),
            Text(change, BAD if far else ""),
            Text(part_words(one), BAD if far else ""),
        )
        shown = one.stage
    return table


def _categories(record: Record, found: Sequence[Difference], unit: Unit) -> Iterator[RenderableType]:
    """What the worst stage's requested bytes are for, where the run could tell."""
    furthest = worst(found)
    rank = None if furthest is None else _most_loaded(record.run.ranks, furthest.stage)
    estimated = None if rank is None else record.estimate.of(rank.stage)
    if rank is None or estimated is None or not rank.breakdown:
        return
    table = plain_table(
        Column(f"stage {rank.stage}, rank {rank.rank}"), *map(right, ("measured", "estimated", "difference"))
    )
    for name in dict.fromkeys([*estimated.breakdown, *rank.breakdown]):
        measured, expected = rank.breakdown.get(name, 0), estimated.breakdown.get(name, 0)
        if name not in NOT_COMPARED and (measured or expected):
            table.add_row(
                label(one_line(name)), unit.figure(measured), unit.figure(expected), unit.change(expected - measured)
            )
    live = sum(count for name, count in estimated.breakdown.items() if name not in NOT_COMPARED)
    apart = live != estimated.requested_bytes
    words = (
        "the columns are of different moments: measured when most bytes were requested, estimated when most are "
        f"allocated ({unit.figure(live)} {unit.name} requested then)"
    )
    yield from spaced(table, *([Text(words, FAINT)] if apart else []))


def _most_loaded(ranks: Sequence[RankReading], stage: int) -> RankReading | None:
    own = [rank for rank in ranks if rank.stage == stage]
    return max(own, key=lambda rank: (rank.allocated or rank.requested or 0, -rank.rank), default=None)


def _estimated_ranks(ranks: Sequence[RankReading]) -> Iterator[RankReading]:
    """Of each stage the one that an estimate is about: others may have less by the plan."""
    for stage in sorted({rank.stage for rank in ranks}):
        rank = _most_loaded(ranks, stage)
        if rank is not None:
            yield rank


def _sections(record: Record) -> Iterator[tuple[str, list[str]]]:
    run = record.run
    if run.failures:
        yield "Failures", [line for failure in run.failures for line in (_failure_line(failure), *failure.lines)]
    apart = next((rank for rank in _estimated_ranks(run.ranks) if rank.apart is not None), None)
    if apart is not None and apart.apart is not None:
        place = apart.apart
        where = f"{place.entry}, {place.phase}, micro-batch {place.microbatch}, on rank {apart.rank}"
        title = "First apart" + (", within the tolerance" if record.verdict == "agrees" else "")
        yield title, [f"{where}: {_excursion_words(place)}"]
    steps = _steps(record)
    if steps:
        yield "Steps", steps
    facts = facts_of(record)
    if facts:
        stages = len({one.stage for one in facts if one.stage is not None}) > 1
        lines = []
        for one in facts:
            where = f" on stage {one.stage}" if stages and one.name == NCCL else ""
            lines.append(f"{LEARNED[one.name]} {size(one.bytes)}{where}")
        yield "Learned", lines
    if run.notes:
        yield "Notes", list(run.notes)


def _excursion_words(place: Place) -> str:
    """The peak, or where that is as estimated, what stays."""
    what, measured, estimated = "peak", place.peak, place.estimated_peak
    if measured == estimated:
        what, measured, estimated = "what stays", place.net, place.estimated_net
    expected = "nothing" if estimated is None else f"{exact(estimated)} bytes"
    return f"{what} {exact(measured)} bytes, estimated {expected}"


def _failure_line(failure: Failure) -> str:
    who = "the run" if failure.rank is None else f"rank {failure.rank}"
    when = f" in {failure.when}" if failure.when else ""
    sizes = [("allocated", failure.allocated), ("reserved", failure.reserved), ("asked for", failure.failing)]
    held = ", ".join(f"{name} {size(count)}" for name, count in sizes if count is not None)
    text = f"{who}, {failure.kind.replace('-', ' ')}{when}: {failure.message}"
    return f"{text} ({held})" if held else text


def _steps(record: Record) -> list[str]:
    """The slowest rank's seconds, and how the loss went."""
    ranks, lines = record.run.ranks, []
    medians = [sorted(rank.seconds)[len(rank.seconds) // 2] for rank in ranks if rank.seconds]
    if medians:
        count = max(len(rank.seconds) for rank in ranks)
        words = [f"median of {count}", "slowest rank", *_left_out(record)]
        lines.append(f"{max(medians):.4g} s ({', '.join(words)})")
    losses = next((rank.losses for rank in ranks if rank.losses), ())
    if losses:
        lines.append(f"loss {losses[0]:.4g} → {losses[-1]:.4g} in {len(losses)} micro-batches")
    return lines


def _left_out(record: Record) -> Iterator[str]:
    """What an iteration's seconds lack."""
    ran, layout = record.ran, record.ran.layout
    microbatches = (ran.batch.gbs or 0) // (ran.batch.mbs * (layout.get("dp") or 1))
    if record.run.code == "torch" and layout.get("pp") in (None, 1) and microbatches > MOST_MICROBATCHES:
        yield f"{MOST_MICROBATCHES} of {microbatches:,} micro-batches"
    if record.run.world == "emulated":
        yield "without what ranks send one another"
