"""Which points are traced to learn an architecture, and what becomes of the traces.

For more than one sequence and for one alone there are pieces of their own, since views of a batch of one are often
contiguous where others are copied. Each piece is fitted through a grid of points, and checked at others: at the
longest sequence, at lengths that are no multiples of anything, and with as many layers as the configuration has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from ..plan.traced_spec import layers_name
from ..values import dataclass
from .fit import Domain, Fit, Piece, Point
from .job import Job
from .recording import Traced
from .rows import gradients_follow_rows, laid_out, piece_of
from .structure import Fitted, Structure, UnfitError, as_traced, fit_sizes, structure_of
from .work import NoWorkError, check_work, fit_work, work_of

Trace = Callable[[Job], Traced]
"""Traces a step of two micro-batches, and an evaluation behind it."""

Seen = dict[tuple[Point, int | None, bool], tuple[Traced, Structure]]
"""Traces and their structures by point, layers, and whether the optimizer is the job's own."""

STATELESS: Mapping[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
"""Fields of most jobs: a structure has nothing of the optimizer, and one without states is traced soonest."""

SHALLOW = 5
"""Layers of most traces, where a configuration has more: two at either end that may differ, and some that repeat."""

UNITS = (128, 32)
"""Tokens of which sequences are multiples at most points: the second where a window begins near the first."""

STEPS = (1, 8, 16, 32, 64)
"""Multiples of s for which a fit may hold, from the loosest."""

SHORTEST = 16
"""Tokens of the shortest sequence that is tried; a length of one is a dimension that views drop."""

MOST_PIECES = 2
"""Of one micro-batch size, one behind another in s: below a sliding window and above it."""


class LayersDifferError(UnfitError):
    """A model of more layers is not one of fewer with some repeated."""


@dataclass
class Learner:
    """Traces an architecture where it has to."""

    job: Job
    trace: Trace
    longest: int
    """Tokens that a sequence may have."""
    unit: int
    """Tokens: sequences are multiples of this at most points."""
    shallow: int | None = None
    """Layers of most traces; ``None`` for as many as the configuration has."""
    seen: Seen = field(default_factory=dict)

    def at(self, b: int, s: int, layers: int | None = None) -> tuple[Traced, Structure]:
        """A trace at a point, and its structure; with an optimizer that keeps nothing."""
        return self._seen(b, s, layers or self.shallow, is_own=False)

    def whole(self, b: int, s: int) -> Traced:
        """The trace of all layers at a point, with the job's own optimizer."""
        return self._seen(b, s, None, is_own=True)[0]

    def _seen(self, b: int, s: int, layers: int | None, is_own: bool) -> tuple[Traced, Structure]:
        config = self.config(layers)
        point, count = (b, s), config.get(layers_name(config) or "")
        key = point, count, is_own or (point, count, True) in self.seen  # an optimizer changes no structure
        if key not in self.seen:
            optimizer = {} if is_own else STATELESS
            traced = self.trace(replace(self.job, b=b, s=s, microbatches=2, config=config, **optimizer))
            _check_gradients(traced)
            self.seen[key] = traced, structure_of(traced)
        return self.seen[key]

    def config(self, layers: int | None) -> dict[str, Any]:
        key = layers_name(self.job.config)
        return {**self.job.config, key: layers} if layers is not None and key is not None else self.job.config

    def runs(self) -> bool:
        """Whether there is such a model of few layers at all."""
        try:
            self.at(2, self.unit)
        except UnfitError:
            return True
        except Exception:  # whatever transformers says of the configuration
            return False
        return True

    # -- one piece ----------------------------------------------------------------------------------

    def piece(self, bs: tuple[int, ...], more: int | None, start: int, expected: int) -> tuple[Piece, Fitted]:
        """For sequences longer than ``start``, and the micro-batch sizes ``bs`` that are fitted, and ``more``, which is
        only checked. ``expected``: how far it probably reaches."""
        unit = self.unit
        if start + 4 * unit > self.longest:
            raise UnfitError(f"too few lengths are between {start} and {self.longest} to learn them")
        grid = {(b, s): self.at(b, s)[1] for b in bs for s in (start + unit, start + 2 * unit, start + 3 * unit)}
        found = fit_sizes(grid)
        last = more or bs[0]
        self.check(found, last, start + 4 * unit)
        middle = start + 2 * unit
        step = next(step for step in (*STEPS, unit) if step >= unit or self.holds(found, bs[0], middle + step))
        if 1 < step < unit:
            self.check(found, last, start + unit + 3 * step)
        to = self.reach(found, bs[-1], start, expected)
        shortest = max(step, SHORTEST)
        is_shorter = not start and shortest < unit and self.holds(found, bs[-1], shortest)
        domain = Domain(bs[0], None if more else bs[0], shortest if is_shorter else start + unit, to, step)
        traced, _ = self.at(bs[0], start + unit)
        piece = piece_of(found, traced, domain)
        return self.with_work(piece, [*grid], (last, start + 4 * unit)), found

    def with_work(self, piece: Piece, grid: Sequence[Point], other: Point) -> Piece:
        """``piece`` with what its kernels do, fitted through ``grid`` and checked at ``other``, where that is known."""
        with suppress(NoWorkError):
            made = replace(piece, work=fit_work(piece, {point: work_of(self.at(*point)[0]) for point in grid}))
            check_work(made, other, work_of(self.at(*other)[0]))
            return made
        return piece

    def check(self, found: Fitted, b: int, s: int) -> None:
        found.check((b, s), self.at(b, s)[1])

    def holds(self, found: Fitted, b: int, s: int) -> bool:
        try:
            self.check(found, b, s)
        except UnfitError:
            return False
        return True

    def reach(self, found: Fitted, b: int, start: int, expected: int) -> int:
        """The longest sequence for which ``found`` holds: the model's own, or where its step becomes another."""
        unit, first = self.unit, start // self.unit
        most = self.longest // unit
        if self.holds(found, b, most * unit):
            return most * unit
        low, high = first + 4, most
        for guess in (expected // unit, expected // unit + 1):
            if low < guess < high:
                low, high = (guess, high) if self.holds(found, b, guess * unit) else (low, guess)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.holds(found, b, middle * unit) else (low, middle)
        return low * unit

    # -- layers -------------------------------------------------------------------------------------

    def check_layers(self, piece: Piece, b: int, s: int, layers: int) -> None:
        """``UnfitError`` unless ``piece`` with so many layers is what is traced with them."""
        traced, structure = self.at(b, s, layers)
        whole = piece_of(as_traced((b, s), structure), traced, piece.domain)
        try:
            row = piece.grown(layers)
        except ValueError as error:
            raise LayersDifferError(str(error)) from None
        ours, theirs = laid_out(piece, row, b, s), laid_out(whole, whole.row, b, s)
        for mine, other in zip(ours, theirs, strict=False):
            if mine != other:
                raise LayersDifferError(f"with {layers} layers, {other[0]} is not what it is with {self.shallow}")
        if sum(len(one.names) for one in row) != sum(len(one.names) for one in whole.row):
            raise LayersDifferError(f"with {layers} layers the row is another than with {self.shallow}")


def _check_gradients(traced: Traced) -> None:
    """An optimizer has no states for a parameter without a gradient, which the rules do not know of."""
    without = [one.path for one in traced.outline.tensors if one.trained and one.path not in set(traced.ready)]
    if without:
        raise UnfitError(f"{without[0]} is trained and never has a gradient ({len(without)} parameters like it)")


def learn(job: Job, trace: Trace, longest: int) -> tuple[Fit, Traced, Point]:
    """The fit, and a trace of all layers with its point, to be compared with what the fit comes to.

    ``UnfitError`` where not even the first piece holds.
    """
    name = layers_name(job.config)
    layers = int(job.config[name]) if name is not None else 0
    units = [unit for unit in UNITS if 4 * unit <= longest] or [_unit_within(longest)]
    learner = Learner(job, trace, longest, units[0], SHALLOW)
    if layers > SHALLOW + 1 and learner.runs():
        with suppress(LayersDifferError):
            return _with_some_unit(learner, units, layers)
    return _with_some_unit(replace(learner, shallow=None), units, layers)


def _unit_within(longest: int) -> int:
    """The largest power of two of which ``longest`` has four."""
    unit = 1
    while 8 * unit <= longest:
        unit *= 2
    return unit


def _with_some_unit(learner: Learner, units: Sequence[int], layers: int) -> tuple[Fit, Traced, Point]:
    """With the first unit that fits; why the last does not, where none does. What one has seen another need not."""
    *first, last = units
    for unit in first:
        with suppress(UnfitError):
            return _learnt(replace(learner, unit=unit), layers)
    return _learnt(replace(learner, unit=last), layers)


def _learnt(learner: Learner, layers: int) -> tuple[Fit, Traced, Point]:
    pieces: list[Piece] = []
    refused: list[str] = []
    unit, shallow = learner.unit, learner.shallow
    verified = (shallow, shallow + 1, layers) if shallow is not None else (layers,)
    whole = learner.whole(1, 2 * unit)
    for bs, more in (((2, 3), 5), ((1,), None)):
        others = [one.domain.s_to for one in pieces]
        found, why = _pieces(learner, bs, more, others)
        for piece in found:
            for count in verified[1:]:
                learner.check_layers(piece, bs[0], piece.domain.s_from // unit * unit + 2 * unit, count)
        pieces += found if shallow is not None else [replace(piece, repeated=None) for piece in found]
        refused += why
    buckets = all(gradients_follow_rows(piece, learner.at(piece.domain.b_from, unit)[0]) for piece in pieces)
    fit = Fit("", "", layers, verified, tuple(pieces), tuple(refused), buckets)
    return fit, whole, (1, 2 * unit)


def _pieces(
    learner: Learner, bs: tuple[int, ...], more: int | None, others: Sequence[int]
) -> tuple[list[Piece], list[str]]:
    """As many as the lengths of sequences need, up to ``MOST_PIECES``, and why there is no more. ``others``: where
    those of other micro-batch sizes end."""
    pieces: list[Piece] = []
    start = 0
    while len(pieces) < MOST_PIECES and start + learner.unit <= learner.longest:
        expected = others[len(pieces)] if len(pieces) < len(others) else 0
        try:
            piece, found = learner.piece(bs, more, start, expected)
        except UnfitError as error:
            if not pieces:
                raise
            return pieces, [str(error)]
        pieces.append(piece)
        start = piece.domain.s_to
    if start + learner.unit > learner.longest:
        return pieces, []
    try:
        learner.check(found, bs[-1], start + learner.unit)
    except UnfitError as error:
        return pieces, [str(error)]
    return pieces, []
