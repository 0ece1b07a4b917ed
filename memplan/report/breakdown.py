"""What one stage's memory is for, as a ledger: the categories, then what PyTorch cannot see."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..result import Estimate, StageEstimate
from .bar import SWATCH
from .names import stage_word
from .palette import FAINT, Share, allocated_shares, beyond_shares, label, unknown_beyond
from .stages import in_colour, measured, unit_of
from .units import UNKNOWN, Unit, percent
from .verdict import reading_of

MOMENTS = ("initialisation", "steady", "evaluation", "checkpoint")
FIRST_ITERATION = "first_iteration_device"
READINGS = ("requested", "allocated", "reserved", "device")
BETWEEN = 6
"""Columns between ledger and facts where they stand beside each other."""


def stage_breakdown(estimate: Estimate, stage: StageEstimate, console: Console) -> RenderableType:
    """Ledger, readings and moments of ``stage``, laid out for the console's width."""
    unit = unit_of(estimate)
    name = f"{stage_word(estimate.plan).capitalize()} {stage.stage} at its peak"
    title = Text.assemble((name if len(estimate.stages) > 1 else "At the peak", "bold"), f": {_moment(stage)}")
    ledger = _ledger(stage, unit, coloured=in_colour(console))
    readings = _facts(
        "readings", READINGS, [getattr(stage, name) for name in READINGS], marked=reading_of(stage), unit=unit
    )
    moments = _facts(
        "moments", MOMENTS, [stage.moments.get(name) for name in MOMENTS], marked=stage.peak.moment, unit=unit
    )
    facts = Group(readings, Text(), moments, *_first_iteration(stage, unit), *_beside_device(stage, unit))
    if measured(ledger, console).maximum + BETWEEN + measured(moments, console).maximum > console.width:
        return Group(title, Text(), ledger, Text(), facts)
    grid = Table.grid(padding=(0, BETWEEN, 0, 0), pad_edge=False)
    grid.add_row(ledger, facts)
    return Group(title, Text(), grid)


def _first_iteration(stage: StageEstimate, unit: Unit) -> list[RenderableType]:
    """What the device shows while no optimizer step has been applied, where that is less."""
    early = stage.moments.get(FIRST_ITERATION)
    if early is None or stage.device is None or early >= stage.device:
        return []
    return [Text(), Text(f"device before the first applied step  {unit.figure(early)}", FAINT)]


def _beside_device(stage: StageEstimate, unit: Unit) -> list[RenderableType]:
    """What the stage's ranks take of a node besides its devices."""
    parts = [("host memory", stage.host), ("NVMe", stage.nvme)]
    shown = [f"{name}  {unit.figure(size)}" for name, size in parts if size]
    return [Text(), Text(f"of a node besides: {', '.join(shown)}", FAINT)] if shown else []


def _moment(stage: StageEstimate) -> str:
    peak = stage.peak
    batch = "" if peak.microbatch is None else f" of micro-batch {peak.microbatch}"
    what = f"{peak.tensor} in {peak.module}" if peak.tensor else peak.module
    alive = f"; {stage.in_flight} micro-batches in flight" if stage.in_flight > 1 else ""
    bound = "; an upper bound" if peak.upper_bound else ""
    return f"{what}, {peak.phase}{batch}{alive}{bound}"


def _ledger(stage: StageEstimate, unit: Unit, *, coloured: bool) -> Table:
    """Every share that shows in ``unit``, with its % of the headline; a line with ``=`` where a reading is complete."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(Text("  for", FAINT), Text(unit.name, FAINT), Text("%", FAINT))

    def add(parts: Sequence[Share]) -> None:
        for part in parts:
            if unit.prints(part.size):
                swatch = (SWATCH, part.colour) if coloured else " "
                name = Text.assemble(swatch, f" {part.label}")
                table.add_row(name, unit.figure(part.size), percent(part.size, stage.headline))

    def total(name: str, size: int | None) -> None:
        if size is not None:
            table.add_row(f"= {name}", unit.figure(size), percent(size, stage.headline), style="bold")

    cache, others = beyond_shares(stage)
    add(allocated_shares(stage))
    total("requested" if stage.allocated is None else "allocated", sum(stage.breakdown))
    if stage.reserved is not None:
        add(cache)
        total("reserved", stage.reserved)
    if stage.device is not None:
        add(others)
        for name in unknown_beyond(stage):
            table.add_row(f"  {name}", UNKNOWN)
        total("device", stage.device)
    return table


def _facts(title: str, names: Sequence[str], sizes: Sequence[int | None], *, marked: str, unit: Unit) -> Table:
    """Sizes under their names, the one that is the headline in bold; ``?`` where not known."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=8, no_wrap=True)
    for name in names:
        table.add_column(justify="right", no_wrap=True, style="bold" if name == marked else "")
    table.add_row(Text(title, FAINT), *(Text(label(name), FAINT) for name in names))
    table.add_row(Text(unit.name, FAINT), *map(unit.figure, sizes))
    return table
