"""Architectures whose layers are of several kinds in no regular order, as convolutions with attention here and there:
the kinds are learnt from a model with a few of the layers, and a trace of all layers says in which order they stand.

Every entry of the trace with all layers must do what one with few layers does, change by change and byte by byte, and
takes that one's polynomials. What comes of it must be what is traced with all layers at another size, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..plan.traced_spec import LAYERS
from .fit import LAYER, Born, Changes, Domain, Gone, Kind, Piece, Point
from .job import Job
from .learning import LayersDifferError, Learner
from .models import config_of
from .rows import gradients_follow_rows, laid_out, piece_of
from .structure import UnfitError, as_traced
from .work import NoWorkError, check_work, work_of

LEAST = 6
"""Layers of the smallest model with few of them: the first two, the last two, and one that repeats between two."""
MOST = 0.75
"""Part of all layers that few of them may be: with more, traces of all take little longer."""

MOST_EVENTS = 20_000
"""Of a step that is learnt as one: what stands in no layer is gone through again for each event."""

Key = tuple[tuple[tuple[object, ...], ...], ...]
"""What an entry does in every pass, at one point."""


def fewer(full: Learner, point: Point) -> Iterator[Learner]:
    """Learners of ``full`` with few of its layers, of which some are like each of all of them: layers of every kind
    with their neighbours where the configuration says of each what it is, and as many of the first as have every kind.
    One that transformers does not make, or that lacks a kind, is left out."""
    traced, _ = full.at(*point)
    if not traced.outline.blocks:
        if len(traced.recording.events) <= MOST_EVENTS:
            raise LayersDifferError("there is no list of layers of one class")
        raise UnfitError(
            "its layers are of several classes in one list, which are not told apart; `memplan trace` with --mbs and "
            "--seq traces all of them at one size"
        )
    piece = traced_piece(full, point)
    row = [kind for kind, names in piece.row for name in names if name.startswith(LAYER)]
    config, layers = full.job.config, len(row)
    tried: list[tuple[int, ...]] = []
    for chosen in (_with_neighbours(row), *_first(row)):
        if not LEAST <= len(chosen) <= MOST * layers or chosen in tried:
            continue
        tried.append(chosen)
        cut = _with_layers(full.job, config, layers, chosen)
        if cut is None:
            continue
        few = replace(full, job=replace(full.job, config=cut), seen={})
        try:
            few.at(*point)
        except Exception:  # whatever transformers says of such a configuration
            continue
        try:
            _partners([piece], [traced_piece(few, point)], [point])
        except UnfitError:
            continue
        yield few


def _with_neighbours(row: Sequence[int]) -> tuple[int, ...]:
    """Places of the first of each kind, of those beside it, and of the first and last two."""
    firsts = [row.index(kind) for kind in dict.fromkeys(row)]
    ends = {0, 1, len(row) - 2, len(row) - 1}
    beside = {at + by for at in firsts for by in (-1, 0, 1)}
    return tuple(sorted(at for at in ends | beside if 0 <= at < len(row)))


def _first(row: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """As many layers as have every kind but those of the last two, with one or two behind them."""
    inner = row[:-2]
    least = max((inner.index(kind) for kind in dict.fromkeys(inner)), default=0)
    for more in (2, 3, 4):
        yield tuple(range(max(least + more, LEAST)))


def _with_layers(job: Job, config: Mapping[str, Any], layers: int, chosen: Sequence[int]) -> dict[str, Any] | None:
    """``config`` with the layers ``chosen`` of ``layers``; nothing where it does not say which layer is which, and they
    are not the first."""
    counts = [name for name in LAYERS if config.get(name) == layers]
    known = {**config_of(job).to_dict(), **config}
    known = {name: value for name, value in known.items() if not name.endswith(OF_TOKENS)}
    places = {name: value for name, value in known.items() if _are_places(value, layers)}
    each = {
        name: value
        for name, value in known.items()
        if len(value if isinstance(value, list) else _pattern(name, value)) == layers and name not in places
    }
    are_first = list(chosen) == list(range(len(chosen)))
    if not (counts or each) or not (each or are_first):
        return None
    cut = dict(config)
    for name, value in each.items():
        taken = [value[at] for at in chosen]
        if name in config or not are_first:
            cut[name] = "".join(taken) if isinstance(value, str) else taken
    for name, value in places.items():
        if name in config:
            cut[name] = [chosen.index(at) for at in value if at in chosen]
    return {**cut, **dict.fromkeys(counts, len(chosen))}


def _pattern(name: str, value: object) -> str:
    """``value``, if it says of each layer in a letter what it is (``hybrid_override_pattern``)."""
    return value if isinstance(value, str) and name.endswith("pattern") else ""


OF_TOKENS = "token_id"
"""What keys of words of the vocabulary end in, which are numbers, too."""


def _are_places(value: object, layers: int) -> bool:
    """Whether ``value`` lists some of the layers by their numbers."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(one) is int and 0 <= one < layers for one in value)
        and all(one < other for one, other in pairwise(value))
    )


def traced_piece(learner: Learner, point: Point) -> Piece:
    """What was traced at one point."""
    b, s = point
    traced, structure = learner.at(b, s)
    return piece_of(as_traced(point, structure), traced, Domain(b, b, s - 2 * learner.unit, s, 1))


def assembled(piece: Piece, full: Learner, unit: int) -> Piece:
    """``piece``, of few layers, with all; ``LayersDifferError`` where that is not what is traced with them."""
    b, s = piece.domain.b_from, piece.domain.s_from // unit * unit + 2 * unit
    points = [(b, s), (b + (piece.domain.b_to is None), s + unit)]
    wholes = [traced_piece(full, point) for point in points]
    partners = _partners(wholes, [piece, piece], points)
    first = wholes[0]
    kinds = tuple(_with_sizes(kind, piece.kinds[partners[at]]) for at, kind in enumerate(first.kinds))
    made = replace(piece, kinds=kinds, row=first.row, repeated=None, work=None)
    for point, whole in zip(points, wholes, strict=True):
        if list(laid_out(made, made.row, *point)) != list(laid_out(whole, whole.row, *point)):
            raise LayersDifferError(f"with all layers, the row at b = {point[0]}, s = {point[1]} is another")
    if piece.work is None:
        return made
    with suppress(NoWorkError):
        work = replace(piece.work, kinds=tuple(piece.work.kinds[partners[at]] for at in range(len(kinds))))
        worked = replace(made, work=work)
        check_work(worked, points[1], work_of(full.at(*points[1])[0]))
        return worked
    return made


def follow_rows(pieces: Sequence[Piece], full: Learner, unit: int) -> bool:
    """Whether gradients of all layers are ready entry by entry, in each of ``pieces``."""
    points = ((one.domain.b_from, one.domain.s_from // unit * unit + 2 * unit) for one in pieces)
    return all(gradients_follow_rows(one, full.at(*at)[0]) for one, at in zip(pieces, points, strict=True))


def _partners(wholes: Sequence[Piece], fews: Sequence[Piece], points: Sequence[Point]) -> list[int]:
    """For each kind of the first of ``wholes`` that of the first of ``fews`` which does the same at all ``points``, at
    which they were traced or hold; ``LayersDifferError`` where there is none, or there are two of other sizes."""
    wanted = [_by_kind(whole, point) for whole, point in zip(wholes, points, strict=True)]
    known = [_by_kind(few, point) for few, point in zip(fews, points, strict=True)]
    rows = [[kind for kind, names in whole.row for _ in names] for whole in wholes]
    if len({len(row) for row in rows}) > 1:
        raise LayersDifferError("with all layers, another number of entries runs at another size")
    found: dict[int, int] = {}
    for at, kinds in enumerate(zip(*rows, strict=True)):
        if kinds[0] in found:
            continue
        keys = [keys[kind] for keys, kind in zip(wanted, kinds, strict=True)]
        alike = [kind for kind in known[0] if all(own[kind] == key for own, key in zip(known, keys, strict=True))]
        if len({_sizes(fews[0].kinds[kind]) for kind in alike}) != 1:
            names = [name for _, names in wholes[0].row for name in names]
            raise LayersDifferError(f"with fewer layers, none does what {names[at]} does")
        found[kinds[0]] = alike[0]
    return [found[kind] for kind in range(len(wholes[0].kinds))]


def _by_kind(piece: Piece, point: Point) -> dict[int, Key]:
    sizes = [one(*point) for one in piece.polynomials]
    return {
        at: tuple(tuple(_done(one, sizes) for one in changes) for changes in kind.passes)
        for at, kind in enumerate(piece.kinds)
    }


def _done(change: Born | Gone, sizes: Sequence[int]) -> tuple[object, ...]:
    """Where the entry stands counts only where it is near: others stand elsewhere with fewer layers."""
    if isinstance(change, Born):
        return sizes[change.size], change.category, change.operator, change.dtype
    where = "far" if change.far else change.entry
    return sizes[change.size], change.category, where, change.forward, change.number


def _sizes(kind: Kind) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one.size for one in changes) for changes in kind.passes)


def _with_sizes(kind: Kind, like: Kind) -> Kind:
    """``kind`` with the sizes and shapes of ``like``, which does the same."""

    def sized(changes: Changes, others: Changes) -> Changes:
        return tuple(
            one._replace(size=other.size, shape=other.shape)
            if isinstance(one, Born) and isinstance(other, Born)
            else one._replace(size=other.size)
            for one, other in zip(changes, others, strict=True)
        )

    return replace(kind, passes=tuple(map(sized, kind.passes, like.passes)))
