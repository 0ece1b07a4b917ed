"""Architectures whose layers are of several kinds in turn, as five with a sliding window and one without: learnt with a
few periods of layers, and grown to as many as the configuration has.

What a configuration says of each layer (``layer_types``, and other lists that are as long) tells the period. That the
layers in between repeat is not believed: the grown row must be what is traced with all layers, event by event, else
every trace has all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..plan.traced_spec import LAYERS, layers_name
from ..values import dataclass
from . import assembled, learning
from .chunked import fit_chunks, fit_chunks_work
from .fit import LAYER, Domain, Fit, Gone, Kind, Piece, Places, Point
from .job import Job
from .learning import SHALLOW, SHORTEST, UNITS, LayersDifferError, Learner, Trace
from .models import UnknownModelError, config_of
from .recording import Traced
from .rows import laid_out, piece_of
from .structure import Fitted, UnfitError
from .work import NoWorkError, check_work, work_of


class LoopsError(UnfitError):
    """Longer sequences run more operators, so that no polynomials are of all of them."""


@dataclass
class _Searching(Learner):
    """Which tries whole chunks where layers cut sequences into some, and begins with two of them where it has to: one
    alone is often viewed where several are copied. Loops over tokens are found soon."""

    def piece(self, bs: tuple[int, ...], more: int | None, start: int, expected: int) -> tuple[Piece, Fitted]:
        try:
            return super().piece(bs, more, start, expected)
        except UnfitError:
            if start or not self.has_whole_chunks:
                raise
        with suppress(UnfitError):
            return self.in_chunks(bs, more, 0)
        return self.in_chunks(bs, more, self.unit)

    @property
    def has_whole_chunks(self) -> bool:
        return any(not self.unit % chunk for chunk in chunks_in(self.job.config))

    def in_chunks(self, bs: tuple[int, ...], more: int | None, start: int) -> tuple[Piece, Fitted]:
        """Of whole chunks alone, more than ``start`` tokens."""
        unit = self.unit
        if start + 4 * unit > self.longest:
            raise UnfitError(f"too few chunks of {unit} tokens are between {start} and {self.longest} to learn them")
        points = [(b, s) for b in bs for s in (start + unit, start + 2 * unit, start + 3 * unit)]
        found = fit_chunks({point: self.at(*point)[1] for point in points}, unit)
        other = more or bs[0], start + 4 * unit
        self.check(found, *other)
        domain = Domain(bs[0], None if more else bs[0], start + unit, self.reach(found, bs[-1], start, 0), unit)
        piece = piece_of(found, self.at(*points[0])[0], domain)
        with suppress(NoWorkError):
            works = {point: work_of(self.at(*point)[0]) for point in points}
            made = replace(piece, work=fit_chunks_work(piece, works, unit))
            check_work(made, other, work_of(self.at(*other)[0]))
            return made, found
        return piece, found

    def runs(self) -> bool:
        self.check_loops(3, SHORTEST)  # short sequences say soonest that there are loops
        if self.has_whole_chunks:
            self.check_loops(2, self.unit)
        return super().runs()

    def events(self, b: int, s: int) -> int:
        """Of a step."""
        return sum(map(len, self.at(b, s)[1].passes))

    def check_loops(self, b: int, unit: int) -> None:
        """``LoopsError`` where every ``unit`` of tokens more runs as many operators more."""
        try:
            less, some = (self.events(b, times * unit) for times in (1, 2))
            more = self.events(b, 3 * unit) if less < some else 0
        except Exception:  # whatever a model's code says of such lengths: others say it better
            return
        if 0 < some - less == more - some:
            raise LoopsError(
                f"the step has {less:,} events at s = {unit} and {some - less:,} more with every {unit} tokens more: "
                "the model's code loops over tokens, or chunks of them, in Python, as it does without the CUDA kernels "
                "of its layers; `memplan trace` with --mbs and --seq traces it at one size"
            )


@dataclass
class _Few(_Searching):
    """Learns from ``job``, which has few of the layers of ``full``."""

    full: Learner | None = None

    def whole(self, b: int, s: int) -> Traced:
        assert self.full is not None
        return self.full.whole(b, s)

    def reach(self, found: Fitted, b: int, start: int, expected: int) -> int:
        """Below the window's length attention has no mask."""
        window = self.job.config.get("sliding_window")
        return super().reach(found, b, start, expected or (window - 1 if isinstance(window, int) else 0))


Learnt = tuple[Fit, Traced, Point]


def learn(job: Job, trace: Trace, longest: int) -> Learnt:
    """As ``learning.learn``, with few layers also where they take turns, or are of several kinds in any order."""
    chunks = [one for one in chunks_in(job.config) if one > UNITS[0]]
    units = [unit for unit in (*chunks, *UNITS) if 4 * unit <= longest] or [learning._unit_within(longest)]
    full = _Searching(job, trace, longest, units[0])
    for way in (_in_turn, _alike, _assembled):
        with suppress(LayersDifferError):
            return way(full, units)
    return _with_some_unit(full, units, _counted(job))


def chunks_in(config: Mapping[str, Any]) -> list[int]:
    """Tokens of the chunks that layers cut sequences into, by whatever name ends so: ``mamba_chunk_size``."""
    return [value for name, value in config.items() if name.endswith(CHUNKS) and type(value) is int and value > 0]


CHUNKS = ("chunk_size", "block_size")


def _counted(job: Job) -> int:
    """Layers, where nothing is said of each."""
    name = layers_name(job.config)
    return int(job.config[name]) if name is not None else 0


def _alike(full: _Searching, units: Sequence[int]) -> Learnt:
    """Of a model whose layers are alike, or all but a few."""
    layers, few = _counted(full.job), replace(full, shallow=SHALLOW)
    if layers <= SHALLOW + 1 or not few.runs():
        raise LayersDifferError("the configuration says something of each layer")
    return _with_some_unit(few, units, layers)


def _in_turn(full: _Searching, units: Sequence[int]) -> Learnt:
    """Of a model whose layers take turns."""
    found = shortened(full.job)
    if found is None:
        raise LayersDifferError("layers do not take turns")
    config, period, layers = found
    if config[_layers_key(config)] > MOST_IN_TURN:
        raise LayersDifferError("a period has many layers")
    few, shallow = _few(replace(full.job, config=config), full), config[_layers_key(config)]
    if not few.runs() or not few.at(2, 2 * units[0])[0].outline.blocks:
        raise LayersDifferError("there is no such model of few layers")
    _grown(assembled.traced_piece(few, (2, 2 * units[0])), full, units[0], shallow, period)
    fit, whole, point = _with_some_unit(few, units, layers if layers_name(full.job.config) else 0)
    pieces = tuple(_grown(piece, full, point[1] // 2, shallow, period) for piece in fit.pieces)
    return replace(fit, verified=(shallow, layers), pieces=pieces), whole, point


MOST_IN_TURN = 20
"""Layers of a model with few periods; of more, one with a few layers of each kind has fewer."""


def _assembled(full: _Searching, units: Sequence[int]) -> Learnt:
    """Of a model whose layers are of several kinds."""
    if full.job.config.get(_layers_key(full.job.config), assembled.LEAST) < assembled.LEAST:
        raise LayersDifferError("the model has few layers")
    for known in assembled.fewer(full, (2, 2 * units[0])):
        few = replace(_few(known.job, full), seen=known.seen)
        with suppress(LayersDifferError):
            fit, whole, point = _with_some_unit(few, units, _counted(full.job))
            unit = point[1] // 2
            pieces = tuple(assembled.assembled(piece, full, unit) for piece in fit.pieces)
            buckets = assembled.follow_rows(pieces, full, unit)
            layers = sum(name.startswith(LAYER) for _, names in pieces[0].row for name in names)
            return replace(fit, verified=(layers,), pieces=pieces, buckets=buckets), whole, point
    raise LayersDifferError("no few layers do what all do")


def _few(job: Job, full: Learner) -> _Few:
    return _Few(job, full.trace, full.longest, full.unit, full=full)


def _with_some_unit(learner: _Searching, units: Sequence[int], layers: int) -> Learnt:
    """With the first unit that fits; why the last does not, where none does. What one has seen another need not."""
    learner.check_loops(3, SHORTEST)
    *first, last = units
    for unit in first:
        if (found := _with_unit(learner, unit, layers)) is not None:
            return found
        learner.check_loops(2, unit)
    return learning._learnt(replace(learner, unit=last), layers)


def _with_unit(learner: _Searching, unit: int, layers: int) -> Learnt | None:
    try:
        return learning._learnt(replace(learner, unit=unit), layers)
    except LayersDifferError:
        raise
    except UnfitError:
        return None


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
    whole = assembled.traced_piece(full, (b, s))
    wanted = list(laid_out(whole, whole.row, b, s))
    for end in range(shallow - period, period - 1, -1):
        grown = _repeating(piece, len(wanted), end, period)
        if all(one == other for one, other in zip(laid_out(grown, grown.row, b, s), wanted, strict=True)):
            return grown
    raise LayersDifferError(f"with all layers, the row is not what it is with {shallow}")


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
