"""What a variant changes against the first plan: by category where it matters, and by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..frameworks import framework
from ..plan.errors import PlanError
from ..result import Estimate, Notice, StageEstimate, Verdict
from ..tape.events import Category
from ..values import dataclass
from .names import UNKNOWN, Unit, plan_text, span, stage_word, unit_for
from .printing import (
    BAD,
    CAUTION,
    FAINT,
    GOOD,
    Breakable,
    entries,
    folded,
    label,
    left,
    plain_table,
    put,
    right,
    shares,
    written_lines,
)
from .stages import free_on, free_words, reading_of, rows_of


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that differs: what it is of, and by how many bytes."""

    of: str
    size: int

    def text(self, unit: Unit) -> str:
        return f"{self.of} {unit.change(self.size)}"


def shown(changes: list[Change], unit: Unit) -> list[Change]:
    """Those that are not zero in print."""
    return [change for change in changes if unit.prints(change.size)]


def by_category(before: StageEstimate, after: StageEstimate) -> list[Change]:
    """Differences of the headline's shares, the largest first. They sum to the headline's difference."""
    old = {share.key: share.size for share in shares(before)}
    new = {share.key: share.size for share in shares(after)}
    changes = [Change(label(key), new.get(key, 0) - old.get(key, 0)) for key in {**old, **new}]
    return sorted(changes, key=lambda change: -abs(change.size))


def by_stage(before: Estimate, after: Estimate) -> list[Change]:
    """Differences of the headlines, stages that change by the same named together (largest change of a run).

    Empty where the variants have different numbers of stages.
    """
    if len(before.stages) != len(after.stages):
        return []
    starts = sorted(_starts(before) | _starts(after))
    runs = []
    for start, stop in zip(starts, [*starts[1:], len(before.stages)], strict=True):
        pairs = zip(before.stages[start:stop], after.stages[start:stop], strict=True)
        largest = max((new.headline - old.headline for old, new in pairs), key=abs)
        runs.append((start, stop, largest))
    return [
        Change(span(before.stages[members[0][0]].stage, before.stages[members[-1][1] - 1].stage), largest)
        for largest, members in ((size, list(same)) for size, same in groupby(runs, key=lambda run: run[2]))
    ]


def _starts(estimate: Estimate) -> set[int]:
    """Indices of the stages that open a row of the table."""
    lengths = [len(row.members) for row in rows_of(estimate)]
    return {sum(lengths[:index]) for index in range(len(lengths))}


LONGEST_NAME = 28
"""Columns after which a variant's name wraps."""


def print_comparison(
    names: Sequence[str], variants: Sequence[Estimate | PlanError], console: Console, written: Sequence[str] = ()
) -> None:
    """Prints ``variants``, named by ``names``: estimates, of which there is one at least and the first is what others
    are compared with, and errors of those that are refused.

    ``written`` are files that were.
    """
    estimates = [variant for variant in variants if not isinstance(variant, PlanError)]
    base = estimates[0]
    unit = unit_for(max(estimate.peak for estimate in estimates))
    put(console, _summary(names, variants, base, unit), Text())
    if len({estimate.plan.framework for estimate in estimates}) > 1:
        kept = [
            (name, Text(_kept(one))) for name, one in zip(names, variants, strict=True) if isinstance(one, Estimate)
        ]
        put(console, entries(kept, FAINT), Text())
    beside = "; free: in the moment that needs most" if any(map(free_words, estimates)) else ""
    put(console, Text(f"{plan_text(base.plan)}; sizes in {unit.name}{beside}", FAINT))
    told: set[Notice] = set()
    for name, variant in zip(names, variants, strict=True):
        title = Text(name, "bold")
        if isinstance(variant, PlanError):
            lines = [("refused", Text(str(variant)))]
        else:
            lines = list(_changes(base, variant, unit)) if variant is not base else []
            lines += [(notice.code, Text(notice.message)) for notice in variant.warnings if notice not in told]
            told.update(variant.warnings)
            if lines and variant is not base:
                title.append(f": {_effect(base, variant, unit)}", "none")
        if lines:
            put(console, Text(), title, entries([(f"  {name}", text) for name, text in lines], FAINT))
    put(console, *written_lines(written))


def _kept(estimate: Estimate) -> str:
    """What is sharded, and in which precision the parameters are that the optimizer updates."""
    stage, dtype = estimate.stages[estimate.peak_stage], estimate.plan.precision.dtype
    if stage.of(Category.MAIN_PARAMETERS):
        precision = f"{dtype} parameters with fp32 copies"
    elif dtype == "fp32" or stage.of(Category.PARAMETERS) >= 4 * stage.parameters:
        precision = "fp32 parameters"
    else:
        precision = f"{dtype} parameters alone"
    return f"{framework(estimate.plan.framework).sharded(estimate.plan)}; {precision}"


def _summary(names: Sequence[str], variants: Sequence[Estimate | PlanError], base: Estimate, unit: Unit) -> Table:
    table = plain_table(
        folded("variant", max_width=LONGEST_NAME),
        left("verdict"),
        right(f"peak {stage_word(base.plan)}"),
        right("peak"),
        left("reading"),
        right("free"),
        right("change"),
    )
    for name, estimate in zip(names, variants, strict=True):
        if isinstance(estimate, PlanError):
            table.add_row(Breakable(Text(name, "bold")), Text("refused", BAD))
            continue
        worst = estimate.stages[estimate.peak_stage]
        change = unit.change(estimate.peak - base.peak) if estimate is not base else ""
        free = free_on(estimate, worst)
        table.add_row(
            Breakable(Text(name, "bold")),
            _fits(estimate),
            str(worst.stage),
            unit.figure(estimate.peak),
            reading_of(worst),
            Text(unit.figure(free), f"bold {BAD}" if worst.judged.verdict is Verdict.DOES_NOT_FIT else ""),
            change,
        )
    return table


def _fits(estimate: Estimate) -> Text:
    if estimate.fits is None:
        return Text(f"no GPU {UNKNOWN}" if estimate.capacity is None else f"may fit {UNKNOWN}", CAUTION)
    verdict = estimate.judged.verdict
    colour = {Verdict.FITS: GOOD, Verdict.DOES_NOT_FIT: BAD}.get(verdict, CAUTION)
    return Text(verdict.value.replace("-", " "), colour)


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
