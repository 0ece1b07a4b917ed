"""What a variant changes against the first plan: by category where it matters, and by stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ..result import Estimate, StageEstimate
from .names import span
from .palette import label, shares
from .rows import rows_of
from .units import Unit


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
