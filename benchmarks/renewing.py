"""A fit that another tracer made, beside traces of this one at points that it was not learnt at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from memplan.trace.fit import LAYER, Fit, Piece, PieceWork, Point, Worked
from memplan.trace.job import Job
from memplan.trace.learning import Learner
from memplan.trace.recording import Traced
from memplan.trace.rows import laid_out, piece_of
from memplan.trace.structure import UnfitError, as_traced
from memplan.trace.work import PASSES, NoWorkError, check_work, work_of
from memplan.trace.worker import evaluated_step

STEP = 72
"""Tokens between lengths: most fits were made at multiples of 128 and 32."""


class NotRenewedError(Exception):
    """How a trace is not what the fit says; one line."""


def renewed_fit(job: Job, fit: Fit, recomputed: Fit | None = None) -> tuple[Fit, int]:
    """``fit`` with what operators do, and how many steps were traced for it. Of a job without recompute that may be
    what they do in the one with it (``recomputed``), but for what runs again: one trace tells whether it is."""
    import torch
    import transformers

    versions = torch.__version__, transformers.__version__
    if versions != (fit.torch, fit.transformers):
        raise NotRenewedError(f"it was made with torch {fit.torch} and transformers {fit.transformers}")
    layers = max(fewest_layers(one) for one in fit.pieces) if fit.extends else None
    learner = Learner(job, _traced, fit.pieces[0].domain.s_to, STEP, layers)
    try:
        pieces = tuple(_renewed(learner, one, recomputed) for one in fit.pieces)
    except UnfitError as error:
        raise NotRenewedError(str(error)) from None
    return replace(fit, pieces=pieces), len(learner.seen)


def fewest_layers(piece: Piece) -> int:
    """With each kind of layer, and one of those that repeat."""
    have = [len(one.names) for one in piece.row if one.names[0].startswith(LAYER)]
    return sum(have) if piece.repeated is None else sum(have) - len(piece.row[piece.repeated].names) + 1


def _traced(job: Job) -> Traced:
    gc.collect()
    gc.freeze()
    return evaluated_step(job)


def _renewed(learner: Learner, piece: Piece, recomputed: Fit | None) -> Piece:
    *grid, other = points_of(piece)
    row = piece.row if learner.shallow is None else piece.grown(learner.shallow)
    small = replace(piece, row=row, work=None)
    given = next((one for one in recomputed.pieces if one.domain == piece.domain), None) if recomputed else None
    if given is not None and given.work is not None:
        check_at(learner, small, other)
        with suppress(NoWorkError):
            work = without_recompute(given, given.work, piece)
            check_work(replace(small, work=work), other, work_of(learner.at(*other)[0]))
            return replace(piece, work=work)
    for point in (*grid, other):
        check_at(learner, small, point)
    made = learner.with_work(small, grid, other)
    if made.work is None:
        raise NotRenewedError("what its operators do is not known")
    return replace(piece, work=made.work)


def without_recompute(given: Piece, work: PieceWork, piece: Piece) -> PieceWork:
    """``work`` of the piece ``given`` for the entries of ``piece``, which are called the same."""
    by_name: dict[str, int] = {}
    for kind, names in given.row:
        for name in names:
            by_name.setdefault(name, kind)
    nothing: tuple[tuple[Worked, ...], ...] = ((),) * len(PASSES)
    kinds = [nothing] * len(piece.kinds)
    seen: set[str] = set()
    for kind, names in piece.row:
        if names[0] in by_name and names[0] not in seen:
            kinds[kind] = (*work.kinds[by_name[names[0]]][:-1], ())
        seen.update(names)
    return PieceWork(work.polynomials, tuple(kinds))


def points_of(piece: Piece) -> Iterator[Point]:
    """A grid, and another point; of one sequence the last of the grid."""
    domain = piece.domain
    first = -(-domain.s_from // domain.multiple) * domain.multiple
    step = max(1, min(-(-STEP // domain.multiple), (domain.s_to - first) // domain.multiple // 4)) * domain.multiple
    bs = (domain.b_from,) if domain.b_to == domain.b_from else (domain.b_from, domain.b_from + 2)
    for b in bs:
        yield from ((b, first + at * step) for at in (1, 2, 3))
    yield bs[-1], first + (4 if len(bs) > 1 else 3) * step


def check_at(learner: Learner, piece: Piece, point: Point) -> None:
    if point not in piece.domain:
        raise NotRenewedError(f"it has no room for {point}")
    traced, structure = learner.at(*point)
    whole = piece_of(as_traced(point, structure), traced, piece.domain)
    ours, theirs = laid_out(piece, piece.row, *point), laid_out(whole, whole.row, *point)
    for mine, other in zip(ours, theirs, strict=False):
        if _sizes(mine) != _sizes(other):
            raise NotRenewedError(f"{other[0]} is another at b = {point[0]}, s = {point[1]}")
    if sum(len(one.names) for one in piece.row) != sum(len(one.names) for one in whole.row):
        raise NotRenewedError("its row is another")


def _sizes(entry: tuple[object, ...]) -> tuple[object, ...]:
    """What stands in an entry, whichever of several tensors of one size and category ends: transformers goes through
    sets of layers' types, in an order of the process."""
    name, passes, *rest = entry
    assert isinstance(passes, tuple)
    return name, tuple(tuple(one[:2] if len(one) == ENDS else one for one in changes) for changes in passes), *rest


ENDS = 5
"""Fields of the end of a tensor, as ``laid_out`` has them."""
