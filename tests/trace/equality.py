"""What it means that a trace equals an estimate."""

from __future__ import annotations

from memplan.program import Program
from memplan.trace.comparison import compared
from memplan.trace.job import Job
from memplan.trace.recording import BACKWARD, FORWARD
from memplan.trace.step import traced_step
from memplan.trace.traced import EMBEDDING, HEAD, Traced

from .test_step import SCALARS, sizes


def assert_equal(job: Job, program: Program, *, scalars: int = SCALARS, layer: str = "layer.1") -> Traced:
    """Every named point but for the loss's scalars, every layer to the byte, and every event of a middle one: forward
    in order, backward but for when gradients of weights and biases, and copies that autocast keeps, end."""
    traced = traced_step(job)
    comparison = compared(traced, program)
    assert comparison.furthest <= scalars, comparison.points
    for row in comparison.rows:
        assert row.estimated is not None
        assert abs(row.traced.net - row.estimated.net) <= scalars, row
        if row.entry not in (EMBEDDING, HEAD):
            assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
    for microbatch in range(job.microbatches):
        is_last = bool(program.last) and microbatch == job.microbatches - 1
        module = next(one.module for one in (program.last if is_last else program.spans) if layer in one.names)
        tapes = module.steady if microbatch else module.first
        assert sizes(traced.events(layer, FORWARD, microbatch)) == sizes(tapes.forward)
        assert sorted(sizes(traced.events(layer, BACKWARD, microbatch))) == sorted(sizes(tapes.backward))
    return traced
