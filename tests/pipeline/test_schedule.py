"""Schedules folded leg by leg equal to the same passes written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.pipeline.schedule import Passes, fold_iteration, in_flight
from memplan.tape import Category, Excursion, change, compose

ACTIVATIONS, GRADIENTS, TEMPORARIES = Category.ACTIVATIONS, Category.GRADIENTS, Category.TEMPORARIES


def passes(activations: int, gradients: int, spike: int) -> Passes:
    """A forward pass that leaves activations, and backward passes that end them."""
    forward = compose((change(spike, TEMPORARIES), change(activations, ACTIVATIONS), change(-spike, TEMPORARIES)))
    steady = compose(
        (change(2 * spike, TEMPORARIES), change(-activations, ACTIVATIONS), change(-2 * spike, TEMPORARIES))
    )
    return Passes(forward, compose((change(gradients, GRADIENTS), steady)), steady)


def written_out(passes: Passes, stage: int, stages: int, microbatches: int, schedule: str) -> Excursion:
    """Every pass by itself, in the order of 1F1B or GPipe."""
    flight = in_flight(schedule, stage, stages, microbatches)
    order = ["F"] * (flight - 1) + ["F", "B"] * (microbatches - flight + 1) + ["B"] * (flight - 1)
    total, seen = Excursion(), False
    for step in order:
        if step == "F":
            total = total.then(passes.forward)
        else:
            total = total.then(passes.steady if seen else passes.first)
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
def test_legs_equal_the_passes_written_out(
    stage: int, stages: int, microbatches: int, schedule: str, activations: int, gradients: int, spike: int
) -> None:
    stage = min(stage, stages - 1)
    once = passes(activations, gradients, spike)
    folded = fold_iteration(once, in_flight(schedule, stage, stages, microbatches), microbatches)
    expected = written_out(once, stage, stages, microbatches, schedule)
    assert (folded.net, folded.peak) == (expected.net, expected.peak)
    assert (folded.net_by, folded.peak_by) == (expected.net_by, expected.peak_by)


def test_in_flight_of_1f1b_falls_towards_the_last_stage() -> None:
    assert [in_flight("1f1b", stage, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert in_flight("gpipe", 3, 4, 16) == 16
