"""A followed iteration as a rank's reading, beside the program of the estimate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ..program import Program
from ..tape import Category, Excursion, compose, fold
from ..trace.comparison import Row, compared
from ..trace.recording import EVALUATION
from ..trace.traced import Traced
from .readings import Place

NOTABLE = 0.001
"""Part of a rank's peak by which an entry's excursion has to differ to be where measured and estimated part."""
WHOLE = "the whole model"
"""In place of an entry of the layer list."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Requested bytes of one iteration."""

    static: int
    peak: int
    breakdown: dict[str, int]
    apart: Place | None


def footprint_of(traced: Traced, program: Program | None, *, by_pass: bool = False) -> Footprint:
    """Of the iteration that ``traced`` holds; ``program`` is the estimate's for the same rank. ``by_pass``: passes are
    compared as a whole, where what happens between two entries is not always the same one's."""
    start, iteration = traced.setup, _iteration(traced)
    by = [before + during for before, during in zip(start.net_by, iteration.peak_by, strict=True)]
    peak = start.net + iteration.peak
    return Footprint(
        static=start.net,
        peak=peak,
        breakdown={category.key: by[category] for category in Category if by[category]},
        apart=_apart(traced, program, peak, by_pass),
    )


def _iteration(traced: Traced) -> Excursion:
    recording = traced.recording
    zipped = zip(recording.events, recording.places, strict=True)
    return fold(event for event, place in zipped if place.phase not in ("", EVALUATION))


def _apart(traced: Traced, program: Program | None, peak: int, by_pass: bool) -> Place | None:
    if program is None:
        return None
    rows: Iterable[Row] = compared(traced, program).rows
    rows = _whole(rows) if by_pass else rows
    return next((_place(row) for row in rows if _is_notable(row, peak)), None)


def _whole(rows: Iterable[Row]) -> Iterator[Row]:
    """One row for each pass."""
    for (microbatch, phase), own in groupby(rows, lambda row: (row.microbatch, row.phase)):
        parts = list(own)
        estimated = compose(row.estimated for row in parts if row.estimated is not None)
        yield Row(WHOLE, phase, microbatch, compose(row.traced for row in parts), estimated)


def _is_notable(row: Row, peak: int) -> bool:
    if row.estimated is None:
        return False
    furthest = max(abs(row.traced.net - row.estimated.net), abs(row.traced.peak - row.estimated.peak))
    return furthest > NOTABLE * peak


def _place(row: Row) -> Place:
    return Place(
        entry=row.entry,
        phase=row.phase,
        microbatch=row.microbatch,
        net=row.traced.net,
        peak=row.traced.peak,
        estimated_net=row.estimated.net if row.estimated is not None else None,
        estimated_peak=row.estimated.peak if row.estimated is not None else None,
    )
