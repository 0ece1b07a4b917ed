"""What it means that a trace equals an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from memplan.tape.program import Program
from memplan.trace.comparison import Row, compared
from memplan.trace.job import Job
from memplan.trace.recording import BACKWARD, EMBEDDING, FORWARD, HEAD, Traced
from memplan.trace.step import traced_step

from ..layers.test_against_transformers import drops_sorted
from .test_step import SCALARS, sizes


def assert_equal(job: Job, program: Program, *, scalars: int = SCALARS, layer: str = "layer.1") -> Traced:
    """Every named point but for the loss's scalars, every layer to the byte, and every event of a middle one: forward
    in order, backward but for when gradients of weights and biases, and copies that autocast keeps, end.

    What ends with backward itself is the embedding's in an estimate, and in a trace of the module that ran last: where
    the embedding has no backward, a layer.
    """
    traced = traced_step(job)
    comparison = compared(traced, program)
    assert comparison.furthest <= scalars, comparison.points
    for row in comparison.rows:
        assert row.estimated is not None
        if row.entry not in (EMBEDDING, HEAD, *(_last(comparison.rows) if row.phase == BACKWARD else ())):
            assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
    for own in _passes(comparison.rows):
        ends = [row for row in own if row.entry in (EMBEDDING, *_last(comparison.rows))]
        for rows in ([row for row in own if row.entry == HEAD], ends):
            assert abs(sum(row.traced.net - row.estimated.net for row in rows if row.estimated)) <= scalars, rows
    for microbatch in range(job.microbatches):
        is_last = bool(program.last) and microbatch == job.microbatches - 1
        module = next(one.module for one in (program.last if is_last else program.spans) if layer in one.names)
        tapes = module.steady if microbatch else module.first
        assert drops_sorted(sizes(traced.events(layer, FORWARD, microbatch))) == drops_sorted(sizes(tapes.forward))
        assert sorted(sizes(traced.events(layer, BACKWARD, microbatch))) == sorted(sizes(tapes.backward))
    return traced


def _passes(rows: Sequence[Row]) -> list[list[Row]]:
    return [list(own) for _, own in groupby(rows, key=lambda row: (row.microbatch, row.phase))]


def _last(rows: Sequence[Row]) -> tuple[str, ...]:
    """The layer that ran last in backward, where the embedding did not."""
    backward = [row for row in rows if row.phase == BACKWARD and row.microbatch == 0]
    (embedding,) = (row for row in backward if row.entry == EMBEDDING)
    ran = [row.entry for row in backward if row.traced.peak or row.traced.net]
    return () if embedding.traced.peak or embedding.traced.net else (ran[-1],)
