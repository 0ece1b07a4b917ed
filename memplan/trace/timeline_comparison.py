"""A trace of a pipeline's rank beside its timeline: at named points, pass by pass, and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..program import Program, fold_program, static
from ..tape import Excursion, compose, fold
from ..timeline import Timeline
from .comparison import Comparison, Point, Row, rows
from .recording import BACKWARD, BETWEEN, FORWARD, LOSS, OPTIMIZER, REDUCE
from .traced import Traced

PASSES = (FORWARD, LOSS, BACKWARD, REDUCE)
START = "start"


def compared_stage(traced: Traced, program: Program) -> Comparison:
    """``traced``, which has passes, beside ``program``, which has a timeline."""
    timeline = program.timeline
    assert timeline is not None
    whole = list(_passes(traced, timeline))
    return Comparison(tuple(_points(traced, program)), (*whole, *rows(traced, program)))


def _points(traced: Traced, program: Program) -> Iterator[Point]:
    folded, first = fold_program(program), traced.passes[0]
    start, events = traced.setup.net, traced.recording.events
    iteration = fold(events[_begin(traced) : _end(traced)])
    step = traced.recording.of(traced.passes[-1].microbatch, OPTIMIZER)
    after_forward = start + fold(events[_begin(traced) : first.end]).net
    yield Point("between steps", start, folded.static)
    yield Point("after the first forward", after_forward, folded.after_forward)
    yield Point("peak of forward and backward", start + iteration.peak, folded.backward_peak)
    yield Point("peak of the step", start + iteration.net + step.peak, folded.step_peak)
    yield Point("after the step", start + iteration.net + step.net, static(program).net)


def _begin(traced: Traced) -> int:
    """The first event of the iteration."""
    places = traced.recording.places
    return next((at for at, place in enumerate(places) if place.phase), len(places))


def _end(traced: Traced) -> int:
    """The first event of the step."""
    places = traced.recording.places
    return next((at for at, place in enumerate(places) if place.phase == OPTIMIZER), len(places))


def _passes(traced: Traced, timeline: Timeline) -> Iterator[Row]:
    """Each pass with what the schedule does until the next one begins, and what it does in front of the first."""
    events = traced.recording.events
    begins = [_begin(traced), *(one.begin for one in traced.passes), _end(traced)]
    before, *found = [fold(events[low:high]) for low, high in pairwise(begins)]
    estimated = _estimated(timeline)
    stages = sorted({one.stage for one in traced.passes})
    yield Row(START, BETWEEN, 0, before, estimated[None])
    for one, excursion in zip(traced.passes, found, strict=True):
        key = one.what, stages.index(one.stage), one.microbatch
        yield Row(f"stage {one.stage}", one.what, one.microbatch, excursion, estimated.get(key))


Key = tuple[str, int, int]
"""What a pass does, in which of the rank's stages, with which micro-batch."""


def _estimated(timeline: Timeline) -> dict[Key | None, Excursion]:
    """Of each pass with the actions behind it; ``None``: those in front of the first."""
    grouped: dict[Key | None, list[Excursion]] = {None: []}
    key: Key | None = None
    for action in timeline.actions:
        if action.what in PASSES:
            key = action.what, action.chunk, action.microbatch
        grouped.setdefault(key, []).append(timeline.excursion(action))
    return {key: compose(parts) for key, parts in grouped.items()}
