"""Sizes and work of sequences of whole chunks, from traces (``chunks``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .chunks import in_tokens
from .fit import Piece, PieceWork, Point, Polynomial
from .structure import Fitted, Structure, fit_sizes, same_at
from .work import EntryWork, fit_work


def fit_chunks(structures: Mapping[Point, Structure], unit: int) -> Fitted:
    """As ``fit_sizes``, of sequences of whole chunks of ``unit`` tokens."""
    point, base = next(iter(structures.items()))
    for other, structure in structures.items():
        same_at(other, structure, base, point)
    found = fit_sizes({(b, s // unit): structure for (b, s), structure in structures.items()})

    def turned(polynomials: Iterable[Polynomial]) -> tuple[Polynomial, ...]:
        return tuple(in_tokens(one, unit) for one in polynomials)

    return Fitted(
        point,
        base,
        tuple(map(turned, found.sizes)),
        tuple(tuple(map(turned, shapes)) for shapes in found.shapes),
        turned(found.inputs),
    )


def fit_chunks_work(piece: Piece, works: Mapping[Point, Mapping[str, EntryWork]], unit: int) -> PieceWork:
    """As ``fit_work``, likewise."""
    found = fit_work(piece, {(b, s // unit): work for (b, s), work in works.items()})
    return replace(found, polynomials=tuple(in_tokens(one, unit) for one in found.polynomials))
