"""Architectures whose layers cut sequences into chunks, as the scans of Mamba-2 do: what one chunk hands to another is
as large as the square of how many there are, so that sizes are polynomials with whole coefficients in chunks, not in
tokens. They hold for whole chunks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..values import dataclass
from .fit import Coefficients, Fit, Piece, Polynomial

TERMS = 6
"""Coefficients of a polynomial; one in chunks has their tokens behind them."""


@dataclass(frozen=True, slots=True)
class PerChunk(Polynomial):
    """In b and chunks, whose tokens are the last of ``coefficients``."""

    def __call__(self, b: int, s: int) -> int:
        return self._in_chunks(b, s // self.coefficients[TERMS:][0])

    def __str__(self) -> str:
        return f"{self._in_chunks}, s in chunks of {self.coefficients[TERMS:][0]},"

    @property
    def _in_chunks(self) -> Polynomial:
        return Polynomial(_of_terms(self.coefficients))


def _of_terms(coefficients: tuple[int, ...]) -> Coefficients:
    one, s1, s2, b1, bs1, bs2 = coefficients[:TERMS]
    return one, s1, s2, b1, bs1, bs2


def in_tokens(one: Polynomial, unit: int) -> Polynomial:
    """``one``, in chunks of ``unit`` tokens, in tokens where its coefficients are whole then."""
    scales = (1, unit, unit * unit) * 2
    if any(value % scale for value, scale in zip(one.coefficients, scales, strict=True)):
        made: Any = (*one.coefficients, unit)
        return PerChunk(made)
    return Polynomial(_of_terms(tuple(value // scale for value, scale in zip(one.coefficients, scales, strict=True))))


class AnyFit:
    """A fit from its JSON, whatever its polynomials are in."""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Fit:
        fit = Fit.from_json(data)
        return replace(fit, pieces=tuple(map(_read, fit.pieces)))


def _read(piece: Piece) -> Piece:
    def turned(polynomials: tuple[Polynomial, ...]) -> tuple[Polynomial, ...]:
        return tuple(PerChunk(one.coefficients) if len(one.coefficients) > TERMS else one for one in polynomials)

    work = piece.work and replace(piece.work, polynomials=turned(piece.work.polynomials))
    return replace(piece, polynomials=turned(piece.polynomials), work=work)


def with_coefficients(one: Polynomial, terms: tuple[int, ...]) -> Polynomial:
    """``one`` with other ``terms``."""
    made: Any = (*terms, *one.coefficients[TERMS:])
    return replace(one, coefficients=made)
