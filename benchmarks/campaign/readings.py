"""What a case measured, beside what memplan says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Unit = Literal["bytes", "seconds", "count"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure of one case."""

    name: str
    unit: Unit
    measured: float
    estimated: float | None
    """``None`` where memplan says nothing of it."""

    @property
    def part(self) -> float | None:
        """Estimated less measured, as a part of what was measured; 0 where both are nothing."""
        if self.estimated is None:
            return None
        if not self.measured:
            return 0.0 if not self.estimated else None
        return (self.estimated - self.measured) / self.measured

    @property
    def exact(self) -> bool:
        return self.estimated == self.measured


def answer(readings: Iterable[Reading], note: str = "") -> dict[str, Any]:
    """What a probe prints as JSON."""
    return {"readings": [asdict(reading) for reading in readings], "note": note}


def read_back(data: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """The readings of a line of a campaign's file."""
    return [Reading(**one) for one in data]
