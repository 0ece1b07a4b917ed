"""What passes hold at most, against the fold of every event."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.pipeline.megatron_flight import AHEAD, at_most
from memplan.pipeline.megatron_fold import ChunkPasses, Sizes, fold_iteration
from memplan.pipeline.megatron_schedule import Schedule
from memplan.tape import Category, change

from .test_megatron_fold import SIZE, Layers, chunks, schedules


@settings(max_examples=2000, deadline=None)
@given(
    schedules(200, 9),
    st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=3),
    st.sampled_from([0, 1, 9, 200]),
    st.integers(1, 30),
)
def test_an_iteration_never_needs_more(plan: Schedule, layers: Layers, hidden: int, small: int) -> None:
    """Nor much less: by the tensors between stages alone, one set that are there at most and one that are at least."""
    sizes = Sizes(hidden, small, small)
    passes = chunks(plan, hidden, layers)
    peak, bound = fold_iteration(plan, passes, sizes).peak, at_most(plan, passes, sizes)
    assert bound is not None
    early = (plan.group - plan.stages) * (plan.first or plan.last)
    reports = plan.microbatches * plan.last
    ahead = AHEAD + early + plan.chunks + 1
    assert peak <= bound <= peak + ahead * hidden + (2 + early + plan.chunks + reports) * small


def test_unknown_where_backward_leaves_something() -> None:
    plan = Schedule(0, 2, 1, 4, 2, False, False)
    passes = ChunkPasses(change(9, Category.ACTIVATIONS), change(-3, Category.ACTIVATIONS))
    assert at_most(plan, [passes], Sizes(1)) is None
