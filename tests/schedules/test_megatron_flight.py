"""What passes hold at most, against the fold of every event."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from memplan.schedules.megatron_flight import AHEAD, between
from memplan.schedules.megatron_fold import Sizes, fold_iteration
from memplan.schedules.megatron_schedule import Schedule, schedule
from memplan.tape.events import Category, change
from memplan.tape.program import Passes

from .test_megatron_fold import SIZE, Layers, chunks, schedules


@settings(max_examples=500, deadline=None)
@given(
    schedules(200, 9),
    st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=3),
    st.sampled_from([0, 1, 9, 200]),
    st.integers(1, 30),
)
def test_the_peak_of_an_iteration_is_between(plan: Schedule, layers: Layers, hidden: int, small: int) -> None:
    sizes = Sizes(hidden, small, small)
    passes = chunks(plan, hidden, layers)
    bounds = between(plan, passes, sizes)
    assert bounds is not None
    assert bounds.least <= fold_iteration(plan, passes, sizes).peak <= bounds.most


@pytest.mark.parametrize("stage", range(8))
def test_bounds_are_a_few_hidden_states_apart(stage: int) -> None:
    """What 8 stages of 4 chunks, whose layers save 100 times a hidden state, hold for 64 micro-batches."""
    plan = schedule(stage, 8, 64, 4)
    passes = chunks(plan, 10, [(1000, 500, 2000)])
    bounds = between(plan, passes, Sizes(10, 1, 1))
    assert bounds is not None
    assert bounds.most - bounds.least <= 10 * (AHEAD + 2 * 4) + 2 + 64 * plan.last
    assert bounds.least > 25 * 1000


def test_unknown_where_backward_leaves_something() -> None:
    plan = Schedule(0, 2, 1, 4, 2, False, False)
    passes = Passes(change(9, Category.ACTIVATIONS), change(-3, Category.ACTIVATIONS))
    assert between(plan, [passes], Sizes(1)) is None
