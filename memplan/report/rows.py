"""The rows of the table: one for each stage, or one for a run of stages that read alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..result import Estimate, StageEstimate
from .names import kind_of, modules_text, ranks_text, span
from .units import Unit


@dataclass(frozen=True, slots=True)
class Row:
    """Stages that stand in one row, in order, and what the row says of them."""

    members: tuple[StageEstimate, ...]

    @property
    def worst(self) -> StageEstimate:
        """The member that needs most, the first of equals."""
        return max(self.members, key=lambda stage: stage.headline)

    @property
    def stages(self) -> str:
        return span(self.members[0].stage, self.members[-1].stage)

    @property
    def ranks(self) -> str:
        union = [rank for stage in self.members for rank in stage.ranks]
        text = ranks_text(union)
        return text if not text.startswith("×") or len(self.members) == 1 else f"{ranks_text(self.worst.ranks)} each"

    @property
    def modules(self) -> str:
        text = modules_text([module for stage in self.members for module in stage.modules])
        each = len(self.members[0].modules)
        return text if len(self.members) == 1 or each < 2 else f"{text}, {each} each"

    @property
    def what(self) -> str:
        """For what the peak is: ``logits_fp32 in head``."""
        peak, module = self.worst.peak, self.module
        return f"{peak.tensor} in {module}" if peak.tensor else module

    @property
    def module(self) -> str:
        """The module of the peak; ``layer.*`` where the members differ in its number."""
        modules = {stage.peak.module for stage in self.members}
        return modules.pop() if len(modules) == 1 else f"{kind_of(self.worst.peak.module)}.*"

    def when(self, word: str = "micro-batch") -> str:
        """When the peak is: ``forward, micro-batch 0``; without a number where the members differ in it."""
        microbatches = {stage.peak.microbatch for stage in self.members}
        microbatch = microbatches.pop() if len(microbatches) == 1 else None
        phase = self.worst.peak.phase
        return phase if microbatch is None else f"{phase}, {word} {microbatch}"

    def figures(self, of: Callable[[StageEstimate], int | None], unit: Unit) -> tuple[str, ...]:
        """A size in ``unit``: once, or of the first and the last member where they differ."""
        first, last = unit.figure(of(self.members[0])), unit.figure(of(self.members[-1]))
        return (first,) if first == last else (first, last)


def limit_of(estimate: Estimate) -> int | None:
    """Bytes that a stage may take: the capacity less the headroom; ``None`` without a GPU."""
    return None if estimate.capacity is None else estimate.capacity - estimate.headroom


def free_on(stage: StageEstimate, limit: int | None) -> int | None:
    """Bytes left on the stage's most loaded rank; negative where it does not fit."""
    return None if limit is None else limit - stage.headline


def rows_of(estimate: Estimate, *, folded: bool = True) -> tuple[Row, ...]:
    """The estimate's rows. Folded, a run of like stages shares one; it is split where sizes turn."""
    limit = limit_of(estimate)
    rows: list[Row] = []
    for stage in estimate.stages:
        if folded and rows and _alike(longer := (*rows[-1].members, stage), limit):
            rows[-1] = Row(longer)
        else:
            rows.append(Row((stage,)))
    return tuple(rows)


def _alike(stages: Sequence[StageEstimate], limit: int | None) -> bool:
    """Whether one row can speak for ``stages`` (all but the last of which are known to be alike)."""
    before, last = stages[-2:]
    return (
        _appearance(before, limit) == _appearance(last, limit)
        and _monotone([stage.static for stage in stages])
        and _monotone([stage.headline for stage in stages])
    )


def _appearance(stage: StageEstimate, limit: int | None) -> tuple[object, ...]:
    """What two stages must share to stand in one row."""
    peak = stage.peak
    return (
        tuple(map(kind_of, stage.modules)),
        len(stage.ranks),
        stage.parameters,
        (peak.phase, kind_of(peak.module), peak.tensor, peak.upper_bound),
        (stage.device is None, stage.reserved is None, stage.allocated is None),
        limit is not None and stage.headline > limit,
    )


def _monotone(sizes: Sequence[int]) -> bool:
    return list(sizes) in (sorted(sizes), sorted(sizes, reverse=True))
