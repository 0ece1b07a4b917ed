"""Figures for people: bytes as GiB (2^30) and MiB (2^20), counts with their magnitude.

Bytes stay integers everywhere else; this is the only place where they are divided.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MINUS = "−"
UNKNOWN = "?"


def size(count: int) -> str:
    """``count`` bytes with a unit: ``23.45 GiB``, ``612 MiB``, ``1.5 KiB``, ``40 B``.

    A unit is left for the next larger one where its figure would otherwise round to 1,024.
    """
    magnitude = abs(count)
    sign = MINUS if count < 0 else ""
    if magnitude >= GIB - MIB / 2:
        return f"{sign}{magnitude / GIB:,.2f} GiB"
    if magnitude >= 10 * MIB:
        return f"{sign}{magnitude / MIB:.0f} MiB"
    if magnitude >= MIB - KIB / 20:
        return f"{sign}{magnitude / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{sign}{magnitude / KIB:.1f} KiB"
    return f"{sign}{magnitude} B"


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a whole table, so that its figures can be compared and need no unit of their own."""

    name: str
    bytes: int
    decimals: int

    def figure(self, count: int | None) -> str:
        """``count`` bytes without the unit: ``23.45``, ``−1.33``; ``?`` where not known."""
        if count is None:
            return UNKNOWN
        figure = f"{abs(count) / self.bytes:,.{self.decimals}f}"
        return MINUS + figure if count < 0 and figure.strip("0.") else figure

    def prints(self, count: int) -> bool:
        """Whether ``count`` bytes are more than a zero in this unit."""
        return bool(self.figure(abs(count)).strip("0."))

    def change(self, count: int) -> str:
        """A difference of ``count`` bytes, signed: ``+0.50``, ``−4.10``, ``0`` for none."""
        if not count:
            return "0"
        return self.figure(count) if count < 0 else f"+{self.figure(count)}"


def unit_for(largest: int) -> Unit:
    """GiB to 10 MiB for what fills a GPU; MiB to a tenth below 2 GiB."""
    return Unit("GiB", GIB, 2) if largest >= 2 * GIB else Unit("MiB", MIB, 1)


def percent(part: int, whole: int) -> str:
    """``part`` of ``whole`` to a tenth: ``12.3``."""
    return f"{100 * part / whole:.1f}" if whole else "0.0"


def elements(count: int) -> str:
    """A parameter count to three digits: ``1.45 B``, ``362 M``, ``80.4 K``, ``512``."""
    for magnitude, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * magnitude:
            figure = count / magnitude
            decimals = 2 if figure < 9.995 else 1 if figure < 99.95 else 0
            return f"{figure:,.{decimals}f} {letter}"
    return str(count)


def exact(count: int) -> str:
    """``count`` with thousands separated: ``4,102,029,312``."""
    return f"{count:,}".replace("-", MINUS)
