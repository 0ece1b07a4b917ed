"""A trace beside the estimate: at named points, pass by pass of a pipeline's rank, and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..layers.module import Tapes
from ..schedules.torch_schedules import Pipelined
from ..tape.events import Excursion, compose, fold
from ..tape.program import Program, Span, fold_program, static
from ..values import dataclass
from .recording import BACKWARD, BETWEEN, FINAL_NORM, FORWARD, HEAD, LOSS, OPTIMIZER, REDUCE, Traced

ENDS = (FINAL_NORM, "return", HEAD, "loss")
"""Entries behind the last layer, compared as one: what ends between two of them is either's."""


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes held, or needed at most, at one moment of the step."""

    name: str
    traced: int
    estimated: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of the layer list in one phase of one micro-batch."""

    entry: str
    phase: str
    microbatch: int
    traced: Excursion
    estimated: Excursion | None


@dataclass(frozen=True, slots=True)
class Comparison:
    points: tuple[Point, ...]
    rows: tuple[Row, ...]

    @property
    def furthest(self) -> int:
        """The largest difference in bytes at a named point; 0 where nothing is estimated."""
        return max((abs(one.traced - one.estimated) for one in self.points if one.estimated is not None), default=0)


def compared(traced: Traced, program: Program | None) -> Comparison:
    """``traced`` beside ``program``, which is ``None`` for a model without a recipe."""
    if program is not None and isinstance(program.order, Pipelined):
        return compared_stage(traced, program)
    return Comparison(tuple(_points(traced, program)), tuple(rows(traced, program)))


def _points(traced: Traced, program: Program | None) -> Iterator[Point]:
    folded = fold_program(program) if program is not None else None
    recording, start = traced.recording, traced.setup.net
    microbatches = sorted({place.microbatch for place in recording.places})
    parts = [recording.of(microbatch, phase) for microbatch in microbatches for phase in (FORWARD, BACKWARD)]
    passes = compose(parts)
    step = recording.of(microbatches[-1], OPTIMIZER)

    def known(name: str) -> int | None:
        return None if folded is None else int(getattr(folded, name))

    yield Point("between steps", start, known("static"))
    yield Point("after the first forward", start + parts[0].net, known("after_forward"))
    yield Point("peak of forward and backward", start + passes.peak, known("backward_peak"))
    yield Point("peak of the step", start + passes.net + step.peak, known("step_peak"))
    yield Point("after the step", start + passes.net + step.net, known("static"))


def rows(traced: Traced, program: Program | None) -> Iterator[Row]:
    """Each entry of the layer list in every pass, in order."""
    spans = program.spans if program is not None else ()
    numbers = sorted({place.microbatch for place in traced.recording.places})
    for microbatch in numbers:
        is_final = program is not None and bool(program.last) and microbatch == numbers[-1]
        if is_final and program is not None:
            spans = program.last
        estimated, ended = _by_entry(spans), [span for span in spans if span.module.steady.end]
        names = list(estimated) or _entries(traced)
        for phase in (FORWARD, BACKWARD):
            for name in names if phase == FORWARD else reversed(names):
                own = estimated.get(name, ())
                found = traced.of(ENDS if name == HEAD else (name,), phase, microbatch)
                behind = ended if name == HEAD else ()
                expected = _estimated(own, behind, phase, is_final or not microbatch) if own else None
                yield Row(name, phase, microbatch, found, expected)


def _entries(traced: Traced) -> list[str]:
    """In the order of the first forward pass."""
    zipped = zip(traced.entries, traced.recording.places, strict=True)
    found = dict.fromkeys(entry for entry, place in zipped if place[:2] == (0, FORWARD))
    return [entry for entry in found if entry not in ENDS] + [HEAD]


def _by_entry(spans: Sequence[Span]) -> dict[str, list[Span]]:
    result: dict[str, list[Span]] = {}
    is_normed = any(FINAL_NORM in span.names for span in spans)
    for span in spans:
        for name in span.names:
            if name == "return" and not is_normed:  # what ran last is a layer
                name = next(reversed(result))
            result.setdefault(HEAD if name in ENDS else name, []).append(span)
    return result


def _estimated(spans: Sequence[Span], ended: Sequence[Span], phase: str, first: bool) -> Excursion:
    """``spans`` in one pass; ``ended`` are those of which something ends with the model's forward, as autocast's copies
    do."""

    def tapes(span: Span) -> Tapes:
        return span.module.first if first else span.module.steady

    if phase == FORWARD:
        return compose([*(tapes(span).forward_fold for span in spans), *(span.end for span in ended)])
    return compose(tapes(span).backward_fold for span in reversed(spans))


PASSES = (FORWARD, LOSS, BACKWARD, REDUCE)
START = "start"


def compared_stage(traced: Traced, program: Program) -> Comparison:
    """``traced``, which has passes, beside ``program``, which has a order."""
    assert isinstance(program.order, Pipelined)
    whole = list(_passes(traced, program.order))
    return Comparison(tuple(_stage_points(traced, program)), (*whole, *rows(traced, program)))


def _stage_points(traced: Traced, program: Program) -> Iterator[Point]:
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


def _passes(traced: Traced, order: Pipelined) -> Iterator[Row]:
    """Each pass with what the schedule does until the next one begins, and what it does in front of the first."""
    events = traced.recording.events
    begins = [_begin(traced), *(one.begin for one in traced.passes), _end(traced)]
    before, *found = [fold(events[low:high]) for low, high in pairwise(begins)]
    estimated = _estimated_passes(order)
    stages = sorted({one.stage for one in traced.passes})
    yield Row(START, BETWEEN, 0, before, estimated[None])
    for one, excursion in zip(traced.passes, found, strict=True):
        key = one.what, stages.index(one.stage), one.microbatch
        yield Row(f"stage {one.stage}", one.what, one.microbatch, excursion, estimated.get(key))


Key = tuple[str, int, int]
"""What a pass does, in which of the rank's stages, with which micro-batch."""


def _estimated_passes(order: Pipelined) -> dict[Key | None, Excursion]:
    """Of each pass with the actions behind it; ``None``: those in front of the first."""
    grouped: dict[Key | None, list[Excursion]] = {None: []}
    key: Key | None = None
    for action in order.actions:
        if action.what in PASSES:
            key = action.what, action.chunk, action.microbatch
        grouped.setdefault(key, []).append(order.excursion(action))
    return {key: compose(parts) for key, parts in grouped.items()}
