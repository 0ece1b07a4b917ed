"""Fits of a model with adapters, from a few traces beside the fit that is there of the model without them.

That one says for which sizes a piece holds, and which lengths occur; two points then tell every size: it is a
polynomial of the model without adapters, or a multiple of one product of b and s. Traces of another rank, at other
sizes and with other numbers of layers must be what the fit says before it is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

from memplan.plan.traced_spec import layers_name
from memplan.trace import periods, structure, work
from memplan.trace.fit import LAYER, Domain, Fit, NotPolynomialError, Piece, Point, Polynomial
from memplan.trace.job import Job
from memplan.trace.learning import Learner
from memplan.trace.ranks import at_rank
from memplan.trace.recording import Traced
from memplan.trace.rows import gradients_follow_rows, laid_out, piece_of
from memplan.trace.structure import UnfitError, as_traced, fit_sizes
from memplan.trace.work import NoWorkError, check_work, fit_work, work_of
from memplan.trace.worker import evaluated_step

from .renewing import NotRenewedError, check_at, points_of

FEW = 4
"""Layers of traces of a model whose layers are alike: the first, the last, and some that repeat."""
OTHER_RANK = 24
"""Of the check: it divides no other length that the traced rank does."""
STEP = 37
"""Tokens between the lengths of traces, a twelfth of the domain at most."""


def adapted_fit(job: Job, base: Fit) -> tuple[Fit, int]:
    """That of ``job``, which has adapters, and how many steps were traced; ``UnfitError`` and ``NotRenewedError`` where
    traces are not what it says. ``base``: the same model's without adapters."""
    full = Learner(job, _traced, max(one.domain.s_to for one in base.pieces), STEP)
    if base.extends and layers_name(job.config) is not None:
        return _adapted(full, base, job, FEW)
    return _adapted(full, base, replace(job, config=_few(job)), None)


def _adapted(full: Learner, base: Fit, few: Job, layers: int | None) -> tuple[Fit, int]:
    """Learnt of the job ``few``, or of as many ``layers`` of it."""
    import torch
    import transformers

    assert few.tuned is not None
    ranked = replace(few, tuned=replace(few.tuned, rank=OTHER_RANK))
    learner = replace(full, job=few, shallow=layers, seen={})
    other = replace(full, job=ranked, shallow=layers and layers + 2, seen={})
    pieces = [_piece(learner, base.pieces[0])]
    grows = _growth(full, pieces[0]) if few.config != full.job.config else None
    pieces += [_piece(learner, one) for one in base.pieces[1:]]
    small = pieces[0] if other.shallow is None else replace(pieces[0], row=pieces[0].grown(other.shallow))
    (small,) = at_rank(replace(base, pieces=(small,)), OTHER_RANK).pieces
    *_, point = points_of(small)
    check_at(other, small, point)
    check_work(small, point, work_of(other.at(*point)[0]))
    buckets = all(gradients_follow_rows(one, learner.at(*_points(one.domain)[0])[0]) for one in pieces)
    if grows is not None:
        pieces = [grows(one) for one in pieces]
    elif not base.extends:
        pieces = [replace(one, repeated=None) for one in pieces]
    verified = (layers, layers + 2) if layers is not None else base.verified
    traces = len(learner.seen) + len(other.seen) + len(full.seen)
    fit = replace(base, verified=verified, pieces=tuple(pieces), buckets=buckets, casts=False)
    return replace(fit, torch=torch.__version__, transformers=transformers.__version__), traces


def _few(job: Job) -> dict[str, Any]:
    """The job's configuration, with three periods of layers where their kinds take turns: the first of a kind ends what
    others share, and the last may differ."""
    found = periods.shortened(job)
    if found is None:
        return job.config
    config, period, layers = found
    key = periods._layers_key(config)
    count = config[key] + (period if config[key] < 3 * period else 0)
    if count + period > layers:
        return job.config
    lists = {name for name, value in job.config.items() if isinstance(value, list) and len(value) == layers}
    return {**config, **{name: job.config[name][:count] for name in lists}, key: count}


def _traced(job: Job) -> Traced:
    gc.collect()
    gc.freeze()
    return evaluated_step(job)


def _points(domain: Domain) -> tuple[Point, Point]:
    """Two, of which no two products of b and s have one ratio."""
    multiple = domain.multiple
    first = -(-domain.s_from // multiple) * multiple
    step = max(1, min(-(-STEP // multiple), (domain.s_to - first) // multiple // 12)) * multiple
    b, more = domain.b_from, 0 if domain.b_to == domain.b_from else 3
    return (b, first + 5 * step), (b + more, first + 11 * step)


def _piece(learner: Learner, base: Piece) -> Piece:
    points = _points(base.domain)
    traces = {point: learner.at(*point) for point in points}
    known = (*base.polynomials, *(base.work.polynomials if base.work is not None else ()))
    with _told_by_two(known):
        found = fit_sizes({point: structure for point, (_, structure) in traces.items()})
        piece = piece_of(found, traces[points[0]][0], base.domain)
        with suppress(NoWorkError):
            works = {point: work_of(traced) for point, (traced, _) in traces.items()}
            return replace(piece, work=fit_work(piece, works))
    *grid, other = points_of(piece)
    made = learner.with_work(piece, grid, other)
    if made.work is None:
        raise NotRenewedError("what its operators do is not known")
    return made


@contextmanager
def _told_by_two(known: tuple[Polynomial, ...]) -> Iterator[None]:
    """Polynomials through two points, in the place of those through a grid."""

    def told(values: Mapping[Point, int]) -> Polynomial:
        found = {one for one in known if all(one(*point) == value for point, value in values.items())}
        found |= set(_products(values))
        if len(found) != 1:
            raise NotPolynomialError(f"{len(found)} polynomials are {list(values.values())} at {list(values)}")
        return found.pop()

    def told_of_work(values: Mapping[Point, int]) -> Polynomial:
        with suppress(NotPolynomialError):
            return told(values)
        return _with_weights(values)

    with patch.object(structure, "fitted", told), patch.object(work, "fitted", told_of_work):
        yield


def _products(values: Mapping[Point, int]) -> Iterator[Polynomial]:
    """Multiples of a product of b and s."""
    is_one = len({b for b, _ in values}) == 1
    for at, (in_b, in_s) in enumerate(product((0, 1), (0, 1, 2))):
        sizes = [b**in_b * s**in_s for b, s in values]
        factors = {divmod(value, size) for value, size in zip(values.values(), sizes, strict=True)}
        factor, rest = factors.pop()
        if not factors and not rest and not (is_one and in_b):
            coefficients = [0] * 6
            coefficients[at] = factor
            one, s1, s2, b1, bs1, bs2 = coefficients
            yield Polynomial((one, s1, s2, b1, bs1, bs2))


def _with_weights(values: Mapping[Point, int]) -> Polynomial:
    """So many bytes for each token and some besides, as a norm reads."""
    (low, high), (first, second) = (b * s for b, s in values), values.values()
    of_token, rest = divmod(second - first, high - low)
    besides = first - of_token * low
    if rest or besides <= 0:
        raise NotPolynomialError(f"{first}, {second} at {list(values)} are not those of tokens and weights")
    is_one = len({b for b, _ in values}) == 1
    return Polynomial((besides, of_token, 0, 0, 0, 0) if is_one else (besides, 0, 0, 0, of_token, 0))


def _growth(full: Learner, piece: Piece) -> Callable[[Piece], Piece]:
    """What makes of a piece with few layers, of kinds that take turns, one of all: as it does of ``piece``, which is
    compared with a trace of all."""
    _, period, layers = periods.shortened(full.job) or ({}, 0, 0)
    few = sum(name.startswith(LAYER) for one in piece.row for name in one.names)
    point = _points(piece.domain)[0]
    traced, found = full.at(*point)
    whole = piece_of(as_traced(point, found), traced, piece.domain)
    wanted = list(laid_out(whole, whole.row, *point))

    def grown(one: Piece, end: int) -> Piece:
        entries = sum(len(places.names) for places in one.row)
        return periods._repeating(one, entries + layers - few, end, period)

    for end in range(few - period, period - 1, -1):
        made = grown(piece, end)
        if list(laid_out(made, made.row, *point)) == wanted:
            return lambda one: grown(one, end)
    raise UnfitError(f"with all layers, the row is not what it is with {few}")
