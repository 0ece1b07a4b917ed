"""The fold of a schedule of one chunk is that of its passes written out."""

from __future__ import annotations

from hypothesis import given, strategies as st

from memplan.layers.module import Module, Tapes
from memplan.schedules.one_chunk import OneChunk, in_flight
from memplan.tape.events import Category, Drop, Excursion, Hold
from memplan.tape.program import Chunk, Span

ACTIVATIONS, GRADIENTS, TEMPORARIES = Category.ACTIVATIONS, Category.GRADIENTS, Category.TEMPORARIES


def layer(activations: int, gradients: int, spike: int) -> Module:
    """A forward pass that leaves activations, and backward passes that end them."""
    passing = Hold(1, spike, TEMPORARIES), Drop(1, spike, TEMPORARIES)
    forward = (passing[0], Hold(2, activations, ACTIVATIONS), passing[1])
    again = Hold(3, 2 * spike, TEMPORARIES), Drop(2, activations, ACTIVATIONS), Drop(3, 2 * spike, TEMPORARIES)
    first = Tapes(forward, (Hold(4, gradients, GRADIENTS), *again), 0, 0)
    return Module("layer", first, Tapes(forward, again, 0, 0), (), ())


def written_out(module: Module, flight: int, microbatches: int) -> Excursion:
    """Every pass by itself, in the order of 1F1B or GPipe."""
    order = ["F"] * (flight - 1) + ["F", "B"] * (microbatches - flight + 1) + ["B"] * (flight - 1)
    total, seen = Excursion(), False
    for step in order:
        if step == "F":
            total = total.then(module.steady.forward_fold)
        else:
            total = total.then((module.steady if seen else module.first).backward_fold)
            seen = True
    return total


@given(
    st.integers(0, 7),
    st.integers(1, 8),
    st.integers(1, 20),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_the_fold_equals_the_passes_written_out(
    stage: int, stages: int, microbatches: int, schedule: str, activations: int, gradients: int, spike: int
) -> None:
    module = layer(activations, gradients, spike)
    flight = in_flight(schedule, min(stage, stages - 1), stages, microbatches)
    folded = OneChunk((Chunk((Span(module, ("layer.0",)),)),), microbatches, flight).whole
    expected = written_out(module, flight, microbatches)
    assert (folded.net, folded.peak) == (expected.net, expected.peak)
    assert (folded.net_by, folded.peak_by) == (expected.net_by, expected.peak_by)


def test_in_flight_of_1f1b_falls_towards_the_last_stage() -> None:
    assert [in_flight("1f1b", stage, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert in_flight("gpipe", 3, 4, 16) == 16
