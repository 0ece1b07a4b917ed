"""What a campaign found, as lines of text: every case, then medians and the worst, then what failed and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from .journal import Line, last_of_each, machines
from .readings import Reading, read_back

MIB = 1 << 20


class Row(NamedTuple):
    """A reading of a case."""

    case: str
    reading: Reading

    @property
    def size(self) -> float:
        return abs(self.reading.part or 0.0)


def rows_of(lines: Iterable[Line]) -> list[Row]:
    """Of every case that was measured, in the order of the file."""
    found = last_of_each(lines)
    return [Row(name, reading) for name, line in found.items() for reading in read_back(line["readings"])]


def compared(rows: Iterable[Row]) -> list[Row]:
    """Those of which memplan says something."""
    return [row for row in rows if row.reading.part is not None]


def kind(name: str) -> str:
    """Of a reading's name what is the same in all cases: without the stage."""
    return name.partition(",")[0]


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """For the end of a campaign."""
    for line in machines(lines)[-1:]:
        machine = line["machine"]
        yield "  ".join(f"{name} {value}" for name, value in machine.items() if value and name != "packages")
    rows = rows_of(lines)
    yield ""
    yield f"{'case':32s} {'reading':28s} {'measured':>16s} {'estimated':>16s} {'difference':>16s}"
    for row in rows:
        yield text_of(row)
    yield ""
    yield from medians(rows)
    yield from failures(lines)


def text_of(row: Row) -> str:
    reading = row.reading
    known = reading.estimated is not None
    estimated = figure(reading.estimated, reading.unit) if known else "–"
    change = figure(reading.estimated - reading.measured, reading.unit) if known else ""  # type: ignore[operator]
    part = f"{reading.part:+.2%}" if reading.part is not None else ""
    measured = figure(reading.measured, reading.unit)
    return f"{row.case:32s} {reading.name:28s} {measured:>16s} {estimated:>16s} {change:>16s} {part:>9s}"


def figure(value: float | None, unit: str) -> str:
    """MiB with three decimals, seconds in milliseconds, or a number."""
    if value is None:
        return "–"
    if unit == "bytes":
        return f"{value / MIB:,.3f} MiB"
    if unit == "seconds":
        return f"{1e3 * value:,.3f} ms"
    return f"{value:,.0f}"


def medians(rows: Sequence[Row]) -> Iterator[str]:
    """For each kind of reading: how many, the median difference, and the worst."""
    kinds = dict.fromkeys((kind(row.reading.name), row.reading.unit) for row in compared(rows))
    for name, unit in kinds:
        own = [row for row in compared(rows) if (kind(row.reading.name), row.reading.unit) == (name, unit)]
        worst = max(own, key=lambda row: row.size)
        exact = sum(row.reading.exact for row in own)
        yield (
            f"{name}: {len(own)} readings, {exact} equal, median difference {median(row.size for row in own):.3%}, "
            f"worst {worst.reading.part:+.3%} ({worst.case}, {worst.reading.name})"
        )


def failures(lines: Sequence[Line]) -> Iterator[str]:
    """What was not measured, and why."""
    for name, line in last_of_each(lines).items():
        if line["status"] != "measured":
            yield f"{line['status']}: {name}: {line['error']}"
