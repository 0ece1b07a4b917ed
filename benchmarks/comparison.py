"""A measured figure beside an estimated one, and tables of them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Comparison:
    """One reading of one run. ``measured`` and ``estimated`` in bytes."""

    id: str
    reading: str
    measured: int
    estimated: int
    within: bool | None = None
    """Inside the table's limit; ``None`` where no limit applies."""
    cause: str = ""
    """What the difference is, or ``not explained``."""

    @property
    def error(self) -> int:
        """Estimated minus measured, in bytes."""
        return self.estimated - self.measured

    @property
    def percent(self) -> float:
        return 100 * self.error / self.measured


@dataclass(frozen=True, slots=True)
class Table:
    """The comparisons of one file of measurements, or of one thread."""

    name: str
    what: str
    """What was measured, and which reading of memory it is."""
    source: str
    limit: str
    """What counts as within; empty where nothing does."""
    rows: tuple[Comparison, ...] = ()
    not_modelled: tuple[str, ...] = ()
    """Rows that are measured and cannot be estimated yet."""
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line: how far off, and how many rows are within the limit."""
        parts = []
        if self.rows:
            worst = max(self.rows, key=lambda row: abs(row.percent))
            middle = median(abs(row.percent) for row in self.rows)
            parts.append(f"{len(self.rows)} figures")
            if worst.error:
                parts.append(
                    f"median |error| {middle:.3f} %, worst {worst.percent:+.3f} % ({worst.id}, {worst.reading})"
                )
            else:
                parts.append("all exact")
        judged = [row.within for row in self.rows if row.within is not None]
        if judged:
            parts.append(f"{sum(judged)} of {len(judged)} within {self.limit}")
        if self.not_modelled:
            parts.append(f"not modelled yet: {'; '.join(self.not_modelled)}")
        return f"{self.name}: {', '.join(parts)}"


def mib(size: int) -> str:
    """Bytes as MiB, with the digits that a difference of a few KiB needs."""
    return f"{size / MIB:,.2f}"


def near(measured: float, estimated: float, fraction: float, least: float = 0.0) -> bool:
    """Whether the two differ by at most ``fraction`` of the measured one, or by ``least``."""
    return abs(estimated - measured) <= max(fraction * measured, least)
