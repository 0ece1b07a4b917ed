"""Adapters of every rank from traces of one.

What a step allocates for an adapter of rank r is proportional to r (its matrices, (r, k) and (n, r), and its inner
activations, (b, s, r)) or does not depend on it: no tensor has two dimensions of r. Traces have a prime number for r,
which no other dimension is a multiple of, so that a polynomial all of whose coefficients it divides is one of r.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..layers.module import Parameter
from .chunks import TERMS, with_coefficients
from .fit import Fit, Kind, Piece, Polynomial
from .job import Tuned

TRACED_RANK = 10_007
"""A prime number."""
DROPOUT = 0.1


def of_any_rank(tuned: Tuned) -> Tuned:
    """What is traced of adapters: what changes no event is what it always is. Stacked experts are not scaled by 1."""
    if tuned.rank is None:
        return tuned
    is_one = tuned.alpha == (tuned.rank**0.5 if tuned.rslora else tuned.rank)
    return replace(
        tuned,
        rank=TRACED_RANK,
        targets=sorted(tuned.targets),
        dropout=DROPOUT if tuned.dropout else 0.0,
        alpha=float(TRACED_RANK) if tuned.parameters and is_one else 8.0,
        rslora=False,
    )


def lacks_rank(fit: Fit) -> str:
    """A parameter of which the traced rank divides a dimension that is none, if there is one."""
    parameters = (one for piece in fit.pieces for kind in piece.kinds for one in kind.parameters)
    return next((one.name for one in parameters if not one.trained and any(map(_is_of_rank, one.shape))), "")


def names_all(fit: Fit, targets: Iterable[str]) -> bool:
    """Whether ``targets`` are the layers of ``fit`` that have adapters, all of them and no other (peft
    ``tuners_utils.py``, ``check_target_module_exists``)."""
    parameters = (one.name for piece in fit.pieces for kind in piece.kinds for one in kind.parameters)
    adapted = {f".{layer}" for layer, of, _ in (name.partition(".lora_A.") for name in parameters) if of}
    ends = {f".{target}" for target in targets}
    matched = {end: {layer for layer in adapted if layer.endswith(end)} for end in ends}
    return all(matched.values()) and set().union(*matched.values()) == adapted


def at_rank(fit: Fit, rank: int | None) -> Fit:
    """``fit``, of traces with ``TRACED_RANK``, with adapters of rank ``rank``; as it is without."""
    if rank is None or rank == TRACED_RANK:
        return fit
    return replace(fit, pieces=tuple(_piece_at(one, rank) for one in fit.pieces))


def _piece_at(piece: Piece, rank: int) -> Piece:
    def sizes(polynomials: Iterable[Polynomial]) -> tuple[Polynomial, ...]:
        return tuple(with_coefficients(one, _scaled(one.coefficients, rank)) for one in polynomials)

    work = piece.work and replace(piece.work, polynomials=sizes(piece.work.polynomials))
    kinds = tuple(_kind_at(one, rank) for one in piece.kinds)
    return replace(piece, polynomials=sizes(piece.polynomials), kinds=kinds, work=work)


def _kind_at(kind: Kind, rank: int) -> Kind:
    def scaled(one: Parameter) -> Parameter:
        if not any(map(_is_of_rank, one.shape)):
            return one
        return replace(one, shape=tuple(n // TRACED_RANK * rank if _is_of_rank(n) else n for n in one.shape))

    return replace(kind, parameters=tuple(map(scaled, kind.parameters)))


def _is_of_rank(length: int) -> bool:
    return not length % TRACED_RANK


def _scaled(coefficients: tuple[int, ...], rank: int) -> tuple[int, ...]:
    terms = coefficients[:TERMS]
    return tuple(value // TRACED_RANK * rank for value in terms) if all(map(_is_of_rank, terms)) else terms
