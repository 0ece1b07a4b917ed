"""The rows of the table: one for each stage, or one for a run of stages that are built alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from ..result import Estimate, StageEstimate
from .names import in_order, kind_of, modules_text, ranks_text, span
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

    def modules(self, separator: str = ", ") -> str:
        """``layers 1–60, 2 each``, with ``separator`` before the count."""
        text = modules_text(in_order([module for stage in self.members for module in stage.modules]))
        each = len(self.members[0].modules)
        return text if len(self.members) == 1 or each < 2 else f"{text}{separator}{each} each"

    @property
    def one_cause(self) -> bool:
        """Whether all members peak in the same phase, in a module of the same kind, on the same tensor."""
        return len({_cause(stage) for stage in self.members}) == 1

    @property
    def what(self) -> str:
        """For what the peak is: ``logits_fp32 in head``; ``… in layer.*`` where only the layer's number differs."""
        peak = self.worst.peak
        numbers = {stage.peak.module for stage in self.members}
        module = f"{kind_of(peak.module)}.*" if self.one_cause and len(numbers) > 1 else peak.module
        return f"{peak.tensor} in {module}" if peak.tensor else module

    def when(self, word: str = "micro-batch") -> str:
        """When the peak is: ``forward, micro-batch 0``; and of which stage, where the members differ in cause."""
        told = self.members if self.one_cause else (self.worst,)
        microbatches = {stage.peak.microbatch for stage in told}
        microbatch = microbatches.pop() if len(microbatches) == 1 else None
        parts = [self.worst.peak.phase]
        parts += [] if microbatch is None else [f"{word} {microbatch}"]
        parts += [] if self.one_cause else [f"stage {self.worst.stage}"]
        return ", ".join(parts)

    def figures(self, of: Callable[[StageEstimate], int | None], unit: Unit) -> tuple[str, ...]:
        """A size in ``unit``: once, or the least and the most where members differ."""
        sizes = [of(stage) for stage in self.members]
        known = [size for size in sizes if size is not None]
        ends = [min(known), max(known)] if known else [None]
        return tuple(dict.fromkeys(map(unit.figure, ends)))


def limit_of(estimate: Estimate) -> int | None:
    """Bytes that a stage may take: the capacity less the headroom; ``None`` without a GPU."""
    return None if estimate.capacity is None else estimate.capacity - estimate.headroom


def free_on(stage: StageEstimate, limit: int | None) -> int | None:
    """Bytes left on the stage's most loaded rank; negative where it does not fit."""
    return None if limit is None else limit - stage.headline


def rows_of(estimate: Estimate, *, folded: bool = True) -> tuple[Row, ...]:
    """The estimate's rows. Folded, neighbours that hold the same and both fit, or both do not, share one."""
    limit = limit_of(estimate)
    if not folded:
        return tuple(Row((stage,)) for stage in estimate.stages)
    runs = groupby(estimate.stages, key=lambda stage: _appearance(stage, limit))
    return tuple(Row(tuple(members)) for _, members in runs)


def _appearance(stage: StageEstimate, limit: int | None) -> tuple[object, ...]:
    """What two stages must share to stand in one row: what they hold, what is known of it, and the verdict."""
    return (
        tuple(map(kind_of, stage.modules)),
        len(stage.ranks),
        stage.parameters,
        (stage.device is None, stage.reserved is None, stage.allocated is None),
        limit is not None and stage.headline > limit,
    )


def _cause(stage: StageEstimate) -> tuple[str, str, str]:
    return stage.peak.phase, kind_of(stage.peak.module), stage.peak.tensor
