"""Architectures whose layers are of several kinds in turn, as five with a sliding window and one without: learnt with a
few periods of layers, and grown to as many as the configuration has.

What a configuration says of each layer (``layer_types``, and other lists that are as long) tells the period. That the
layers in between repeat is not believed: the grown row must be what is traced with all layers, event by event, else
every trace has all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..plan.traced_spec import LAYERS, layers_name
from ..values import dataclass
from . import learning
from .fit import LAYER, Domain, Fit, Gone, Kind, Piece, Places, Point
from .job import Job
from .learning import SHALLOW, UNITS, LayersDifferError, Learner, Trace
from .models import UnknownModelError, config_of
from .recording import Traced
from .rows import laid_out, piece_of
from .structure import Fitted, UnfitError, as_traced


@dataclass
class _Few(Learner):
    """Learns from ``job``, which has few of the layers of ``full``."""

    full: Learner | None = None

    def whole(self, b: int, s: int) -> Traced:
        assert self.full is not None
        return self.full.whole(b, s)

    def reach(self, found: Fitted, b: int, start: int, expected: int) -> int:
        """Below the window's length attention has no mask."""
        window = self.job.config.get("sliding_window")
        return super().reach(found, b, start, expected or (window - 1 if isinstance(window, int) else 0))


def learn(job: Job, trace: Trace, longest: int) -> tuple[Fit, Traced, Point]:
    """As ``learning.learn``, with fewer layers where their kinds take turns."""
    units = [unit for unit in UNITS if 4 * unit <= longest]
    found = shortened(job) if units else None
    if found is not None:
        config, period, layers = found
        full = Learner(job, trace, longest, units[0])
        few = _Few(replace(job, config=config), trace, longest, units[0], full=full)
        with suppress(UnfitError):
            _grown(_traced_piece(few, 2, 2 * units[0]), full, units[0], config[_layers_key(config)], period)
            fit, whole, point = learning._with_some_unit(few, units, layers if layers_name(job.config) else 0)
            shallow = config[_layers_key(config)]
            pieces = tuple(_grown(piece, full, point[1] // 2, shallow, period) for piece in fit.pieces)
            return replace(fit, verified=(shallow, layers), pieces=pieces), whole, point
    return learning.learn(job, trace, longest)


def _layers_key(config: dict[str, Any]) -> str:
    return next((name for name in LAYERS if type(config.get(name)) is int), "")


def shortened(job: Job) -> tuple[dict[str, Any], int, int] | None:
    """The job's configuration with few layers: two periods, since the first of each kind may differ, one more, since
    the last does, and as many as the number of all is more than whole periods; the period, and the number of all.
    Nothing where layers are alike, or fewer would not be much fewer."""
    key = _layers_key(job.config)
    layers = job.config.get(key, 0)
    try:
        known = config_of(job).to_dict()
    except (UnknownModelError, TypeError, ValueError):  # which the first trace says better
        return None
    lists = {name: value for name, value in known.items() if isinstance(value, list) and len(value) == layers}
    given = [name for name in lists if name in job.config]
    row = list(zip(*(map(repr, value) for value in lists.values()), strict=True))
    period, lead = _period(row)
    if not lists or (period == 1 and not lead and not given):
        return None
    least = max(SHALLOW, lead + 2 * period + 1)
    fewer = least + (layers - least) % period
    if fewer + period > layers:
        return None
    return {**job.config, **{name: lists[name][:fewer] for name in given}, key: fewer}, period, layers


def _period(row: Sequence[object]) -> tuple[int, int]:
    """After how many entries each is what it was, but for the first few; the fewest of both together."""
    found = ((period, _lead(row, period)) for period in range(1, len(row) + 1))
    return min(found, key=sum, default=(1, 0))


def _lead(row: Sequence[object], period: int) -> int:
    return max((at + 1 for at in range(len(row) - period) if row[at] != row[at + period]), default=0)


def _grown(piece: Piece, full: Learner, unit: int, shallow: int, period: int) -> Piece:
    """``piece`` with all layers; ``LayersDifferError`` where that is not what is traced with them."""
    b, s = piece.domain.b_from, piece.domain.s_from // unit * unit + 2 * unit
    whole = _traced_piece(full, b, s)
    wanted = list(laid_out(whole, whole.row, b, s))
    for end in range(shallow - period, period - 1, -1):
        grown = _repeating(piece, len(wanted), end, period)
        if all(one == other for one, other in zip(laid_out(grown, grown.row, b, s), wanted, strict=True)):
            return grown
    raise LayersDifferError(f"with all layers, the row is not what it is with {shallow}")


def _traced_piece(learner: Learner, b: int, s: int) -> Piece:
    """What was traced at one point."""
    traced, structure = learner.at(b, s)
    return piece_of(as_traced((b, s), structure), traced, Domain(b, b, s - 2 * learner.unit, s, 1))


def _repeating(piece: Piece, total: int, end: int, period: int) -> Piece:
    """``piece`` with copies of the ``period`` layers before the layer ``end``, so that ``total`` entries stand in the
    row; places behind them are counted from the end."""
    row = [(kind, name) for kind, names in piece.row for name in names]
    cut = end + next(at for at, (_, name) in enumerate(row) if name.startswith(LAYER))
    copies = (total - len(row)) // period
    kinds = [kind for kind, _ in row]
    grown = kinds[:cut] + kinds[cut - period : cut] * copies + kinds[cut:]
    names = list(_names(row, len(grown) - len(row)))

    def moved(kind: Kind) -> Kind:
        passes = (
            tuple(
                one._replace(entry=one.entry - len(row))
                if isinstance(one, Gone) and one.far and one.entry >= cut
                else one
                for one in changes
            )
            for changes in kind.passes
        )
        return replace(kind, passes=tuple(passes))

    placed = groupby(zip(grown, names, strict=True), key=lambda one: (one[0], one[1].startswith(LAYER)))
    places = tuple(Places(kind, tuple(name for _, name in group)) for (kind, _), group in placed)
    return replace(piece, kinds=tuple(map(moved, piece.kinds)), row=places, repeated=None)


def _names(row: Sequence[tuple[int, str]], more: int) -> Iterator[str]:
    """Of the entries of a row with ``more`` layers."""
    layers = sum(name.startswith(LAYER) for _, name in row) + more
    first = next(at for at, (_, name) in enumerate(row) if name.startswith(LAYER))
    yield from (name for _, name in row[:first])
    yield from (f"{LAYER}{number}" for number in range(layers))
    yield from (name for _, name in row[first:] if not name.startswith(LAYER))
