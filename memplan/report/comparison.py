"""``memplan estimate --compare`` and ``--vary``: variants beside the first plan, and what each saves where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..result import Estimate, Notice
from .difference import by_category, by_stage, shown
from .names import plan_text, stage_word
from .output import put
from .palette import BAD, CAUTION, FAINT, GOOD
from .rows import free_on, limit_of
from .stages import plain_table
from .units import UNKNOWN, Unit, unit_for
from .verdict import reading_of

LONGEST_NAME = 28
"""Columns after which a variant's name wraps."""


def print_comparison(names: Sequence[str], estimates: Sequence[Estimate], console: Console) -> None:
    """Prints the variants ``estimates``, named by ``names``; the first is what the others are compared with."""
    unit = unit_for(max(estimate.peak for estimate in estimates))
    put(console, _summary(names, estimates, unit), Text())
    put(console, Text(f"{plan_text(estimates[0].plan)}; sizes in {unit.name}", FAINT))
    told: set[Notice] = set()
    for index, (name, estimate) in enumerate(zip(names, estimates, strict=True)):
        lines = list(_changes(estimates[0], estimate, unit)) if index else []
        lines += [(notice.code, Text(notice.message)) for notice in estimate.warnings if notice not in told]
        told.update(estimate.warnings)
        if lines:
            title = Text(name, "bold")
            if index:
                title.append(f": {_effect(estimates[0], estimate, unit)}", "none")
            put(console, Text(), title, _entries(lines))


def _summary(names: Sequence[str], estimates: Sequence[Estimate], unit: Unit) -> Table:
    table = plain_table()
    table.add_column("variant", overflow="fold", max_width=LONGEST_NAME)
    table.add_column("verdict", no_wrap=True)
    table.add_column(f"peak {stage_word(estimates[0].plan)}", justify="right", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("reading", no_wrap=True)
    table.add_column("free", justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    for index, (name, estimate) in enumerate(zip(names, estimates, strict=True)):
        worst = estimate.stages[estimate.peak_stage]
        change = unit.change(estimate.peak - estimates[0].peak) if index else ""
        free = free_on(worst, limit_of(estimate))
        table.add_row(
            Text(name, "bold"),
            _fits(estimate),
            str(worst.stage),
            unit.figure(estimate.peak),
            reading_of(worst),
            Text(unit.figure(free), f"bold {BAD}" if free is not None and free < 0 else ""),
            change,
        )
    return table


def _fits(estimate: Estimate) -> Text:
    if estimate.fits is None:
        return Text(f"no GPU {UNKNOWN}" if estimate.capacity is None else f"may fit {UNKNOWN}", CAUTION)
    return Text("fits", GOOD) if estimate.fits else Text("does not fit", BAD)


def _effect(base: Estimate, variant: Estimate, unit: Unit) -> str:
    """``saves 5.21 GiB at the peak``."""
    change = variant.peak - base.peak
    figure = unit.figure(abs(change))
    if not unit.prints(change):
        return "the same peak"
    return f"saves {figure} {unit.name} at the peak" if change < 0 else f"needs {figure} {unit.name} more at the peak"


def _changes(base: Estimate, variant: Estimate, unit: Unit) -> Iterator[tuple[str, Text]]:
    """The stages that matter category by category, then every stage's difference."""
    word = stage_word(base.plan)
    for before, after in _stages_that_matter(base, variant):
        names = [str(base.stages[before].stage), str(variant.stages[after].stage)]
        changes = by_category(base.stages[before], variant.stages[after])
        text = ", ".join(change.text(unit) for change in shown(changes, unit))
        yield f"{word} {names[0] if before == after else ' → '.join(names)}", Text(text or "no change")
    stages = by_stage(base, variant)
    if stages:
        yield f"by {word}", Text(", ".join(f"{change.of}: {unit.change(change.size)}" for change in stages))


def _stages_that_matter(base: Estimate, variant: Estimate) -> tuple[tuple[int, int], ...]:
    """The peak stage of each, in both; or one against the other where the pipelines differ in length."""
    if len(base.stages) != len(variant.stages):
        return ((base.peak_stage, variant.peak_stage),)
    return tuple((stage, stage) for stage in dict.fromkeys((base.peak_stage, variant.peak_stage)))


def _entries(lines: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=FAINT, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for name, text in lines:
        table.add_row(Text(f"  {name}"), text)
    return table
