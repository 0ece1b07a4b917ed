"""Sizes as polynomials in b (micro-batch) and s (sequence), recovered exactly: integers and fractions, no floats.

A tensor of a training step is a product of lengths, of which b occurs at most once and s at most twice (scores), so its
bytes are a polynomial of degree 1 in b and 2 in s. Bytes are those of the storage, before the allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Point = tuple[int, int]
"""Micro-batch size and sequence length."""

Coefficients = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients of 1, s, s², b, bs and bs²."""

    coefficients: Coefficients

    def __call__(self, b: int, s: int) -> int:
        one, s1, s2, b1, bs1, bs2 = self.coefficients
        return one + s * (s1 + s * s2) + b * (b1 + s * (bs1 + s * bs2))

    def __str__(self) -> str:
        letters = ("", "s", "s²", "b", "bs", "bs²")
        terms = [f"{n:,} {letter}".strip() for n, letter in zip(self.coefficients, letters, strict=True) if n]
        return " + ".join(terms) or "0"


class NotPolynomialError(ValueError):
    """No polynomial of these degrees with whole coefficients has the values."""


def fitted(values: Mapping[Point, int]) -> Polynomial:
    """The polynomial with ``values`` at points that are a grid: two values of b, or one, by three of s.

    With one value of b alone the polynomial is in s. ``NotPolynomialError`` where a coefficient is no integer.
    """
    bs, ss = sorted({b for b, _ in values}), sorted({s for _, s in values})
    if len(ss) != 3 or len(bs) > 2 or len(values) != len(bs) * 3:
        raise ValueError(f"{len(values)} points are no grid of two by three")
    rows = [_in_s(ss, [values[b, s] for s in ss]) for b in bs]
    if len(rows) == 1:
        return _whole((*rows[0], *(Fraction(0),) * 3))
    low, high = rows
    slopes = [(after - before) / (bs[1] - bs[0]) for before, after in zip(low, high, strict=True)]
    constants = [before - bs[0] * slope for before, slope in zip(low, slopes, strict=True)]
    return _whole((*constants, *slopes))


def _in_s(points: Sequence[int], values: Sequence[int]) -> tuple[Fraction, Fraction, Fraction]:
    """Coefficients of 1, s and s² through three points: Newton's divided differences, multiplied out."""
    (x, y, z), (p, q, r) = points, values
    first = Fraction(q - p, y - x)
    second = (Fraction(r - q, z - y) - first) / (z - x)
    return p - first * x + second * x * y, first - second * (x + y), second


def _whole(found: Sequence[Fraction]) -> Polynomial:
    broken = next((one for one in found if one.denominator != 1), None)
    if broken is not None:
        raise NotPolynomialError(f"a coefficient is {broken}, not a whole number")
    one, s1, s2, b1, bs1, bs2 = map(int, found)
    return Polynomial((one, s1, s2, b1, bs1, bs2))
