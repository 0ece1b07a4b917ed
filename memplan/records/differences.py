"""Measured beside estimated, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from ..values import dataclass
from .estimated import Estimated, Stage
from .readings import RankReading, Run

Verdict = Literal["agrees", "differs", "failed", "nothing measured"]
READINGS = ("requested", "allocated", "reserved", "device")
JUDGED = ("allocated", "requested")
"""The first of them that was measured decides: requested bytes where a device has no allocator's statistics."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One reading of one stage, in bytes; measured on its most loaded rank."""

    stage: int
    reading: str
    measured: int
    estimated: int | None
    """``None`` where it could not be derived."""

    @property
    def bytes(self) -> int | None:
        """Estimated less measured."""
        return None if self.estimated is None else self.estimated - self.measured

    @property
    def part(self) -> float | None:
        """``bytes`` as a part of what was measured."""
        if self.bytes is None or not self.measured:
            return None
        return self.bytes / self.measured


def differences(estimate: Estimated, run: Run) -> tuple[Difference, ...]:
    """Of every stage and reading that was measured, by stage."""
    return tuple(one for stage in _stages(run.ranks) for one in _of_stage(estimate.of(stage), stage, run.ranks))


def _stages(ranks: Iterable[RankReading]) -> list[int]:
    return sorted({rank.stage for rank in ranks})


def _of_stage(estimated: Stage | None, stage: int, ranks: Sequence[RankReading]) -> Iterable[Difference]:
    for reading in READINGS:
        name = "device_bytes" if reading == "device" else reading
        found = [size for rank in ranks if rank.stage == stage and (size := getattr(rank, name)) is not None]
        if found:
            known = None if estimated is None else getattr(estimated, f"{reading}_bytes")
            yield Difference(stage, reading, max(found), known)


def judged(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """One of each stage: the reading that the verdict is about."""
    chosen: dict[int, Difference] = {}
    for reading in JUDGED:
        for one in found:
            if one.reading == reading and one.part is not None:
                chosen.setdefault(one.stage, one)
    return tuple(chosen[stage] for stage in sorted(chosen))


def worst(found: Sequence[Difference]) -> Difference | None:
    """Of those that are judged the one that is furthest from its estimate; of several the first."""
    return max(judged(found), key=lambda one: abs(one.part or 0.0), default=None)


def verdict_of(run: Run, found: Sequence[Difference], tolerance: float) -> Verdict:
    """What ``found`` says of ``run``."""
    if run.failures:
        return "failed"
    furthest = worst(found)
    if furthest is None or furthest.part is None:
        return "nothing measured"
    return "agrees" if abs(furthest.part) <= tolerance else "differs"
