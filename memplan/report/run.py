"""``memplan runs ID``: one record, measured beside estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..measured import CONTEXT, NCCL, WORKSPACES
from ..plan.errors import one_line
from ..records.differences import Difference, differences, worst
from ..records.learned import facts_of
from ..records.record import Record
from ..trace.job import MOST_MICROBATCHES
from ..validate.readings import Failure, Place, RankReading
from .output import put, put_line
from .palette import BAD, FAINT, label
from .pieces import Pieces
from .run_words import (
    batch_pieces,
    device_words,
    framework_words,
    layout_pieces,
    model_words,
    part_words,
    verdict_words,
)
from .runs import VERDICTS
from .stages import plain_table
from .units import Unit, exact, size, unit_for

NOT_COMPARED = ("workspaces", "block_rounding")
"""Categories that requested bytes do not have."""
LEARNED = {CONTEXT: "CUDA context", NCCL: "NCCL's buffers", WORKSPACES: "cuBLAS workspaces"}


def print_run(record: Record, console: Console, *, quiet: bool = False) -> None:
    """Prints ``record``; ``quiet`` only the verdict."""
    found = differences(record.estimate, record.run)
    verdict = Text.assemble(
        (record.verdict.capitalize(), f"bold {VERDICTS[record.verdict]}"), f": {verdict_words(record, found)}"
    )
    if quiet:
        put_line(console, verdict)
    else:
        put(console, verdict, *_body(record, found))


def _body(record: Record, found: tuple[Difference, ...]) -> Iterator[RenderableType]:
    yield Pieces(
        [model_words(record), framework_words(record), *layout_pieces(record), *batch_pieces(record)], style=FAINT
    )
    yield Pieces(_circumstances(record), style=FAINT)
    if found:
        unit = unit_for(max(one.measured for one in found))
        yield Text()
        yield _readings(found, unit, record.tolerance)
        yield Text()
        yield Text(f"{_units(unit)}, most loaded rank of each stage; difference: estimate − measured", FAINT)
        yield from _categories(record, found, unit)
    for title, lines in _sections(record):
        yield Text()
        yield Text(title, "bold")
        for line in lines:
            yield Text(f"  {one_line(line)}")
    yield Text()
    yield Text(f"run {record.id}, {record.time.replace('T', ' ').rstrip('Z')} UTC: {one_line(record.command)}", FAINT)


def _units(unit: Unit) -> str:
    return {"GiB": "GiB (2^30 bytes)", "MiB": "MiB (2^20 bytes)"}[unit.name]


def _circumstances(record: Record) -> list[str]:
    """What it ran on, and whose code it was."""
    run, versions = record.run, record.run.versions
    named = [("torch", versions.torch), ("CUDA", versions.cuda), ("driver", versions.driver), ("NCCL", versions.nccl)]
    pieces = [device_words(record)] + [f"{record.hardware.nodes} nodes"] * (record.hardware.nodes > 1)
    code = {"torch": "PyTorch's code", "megatron": "Megatron-Core's code", "deepspeed": "DeepSpeed's code"}[run.code]
    pieces += [code, *(f"{name} {version}" for name, version in named if version)]
    pieces += [f"{name} {version}" for name, version in sorted(versions.others.items())]
    return [one_line(piece) for piece in (*pieces, f"memplan {versions.memplan}")]


def _readings(found: Sequence[Difference], unit: Unit, tolerance: float) -> Table:
    table = plain_table()
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("reading", no_wrap=True)
    for name in ("measured", "estimated", "difference", ""):
        table.add_column(name, justify="right", no_wrap=True)
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
    table = plain_table()
    table.add_column(f"stage {rank.stage}, rank {rank.rank}")
    for name in ("measured", "estimated", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    names = dict.fromkeys([*estimated.breakdown, *rank.breakdown])
    for name in names:
        measured, expected = rank.breakdown.get(name, 0), estimated.breakdown.get(name, 0)
        if name not in NOT_COMPARED and (measured or expected):
            table.add_row(
                label(one_line(name)), unit.figure(measured), unit.figure(expected), unit.change(expected - measured)
            )
    yield Text()
    yield table


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
    if run.notes:
        yield "Notes", list(run.notes)
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
