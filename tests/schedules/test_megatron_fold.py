"""The fold of an iteration equals composing its events one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings, strategies as st

from memplan.plan.errors import PlanError
from memplan.schedules.megatron_fold import (
    CATEGORIES,
    MegatronOrder,
    Sizes,
    composed,
    fold_iteration,
    most_in_flight,
)
from memplan.schedules.megatron_schedule import Schedule, schedule, trace
from memplan.tape.events import ZERO, Category, Excursion, change, compose
from memplan.tape.program import Passes

from .megatron_events import in_flight

OUTPUT, INPUT_GRAD = CATEGORIES["output"], CATEGORIES["input_grad"]


@st.composite
def schedules(draw: st.DrawFn, most: int = 40, widest: int = 5) -> Schedule:
    stages = draw(st.integers(1, widest))
    chunks = draw(st.integers(1, 4)) if stages > 1 else 1
    group = draw(st.none() | st.integers(stages, stages + 3)) if chunks > 1 else None
    overlap, warmup = draw(st.sampled_from([(True, False), (True, True), (False, False)]))
    microbatches = draw(st.integers(1, most))
    stage = draw(st.integers(0, stages - 1))
    try:
        return schedule(stage, stages, microbatches, chunks, group, overlap, warmup and chunks > 1)
    except PlanError:
        assume(False)
        raise


def chunk(plan: Schedule, at: int, hidden: int, saved: int, spikes: tuple[int, int]) -> Passes:
    """Passes of a chunk that saves ``saved`` bytes, with temporaries on the way."""
    forward = compose(
        (
            change(spikes[0], Category.TEMPORARIES, "forward/layer/spike"),
            change(saved, Category.ACTIVATIONS, "forward/layer/saved"),
            change(-spikes[0], Category.TEMPORARIES),
            change(hidden * plan.sends(at), OUTPUT, "forward/layer/output"),
        )
    )
    backward = compose(
        (
            change(spikes[1], Category.WORKSPACES, "backward/layer/spike"),
            change(-saved, Category.ACTIVATIONS),
            change(hidden * plan.receives(at), INPUT_GRAD, "backward/layer/gradient"),
            change(-spikes[1], Category.WORKSPACES),
        )
    )
    return Passes(forward, backward)


Layers = list[tuple[int, int, int]]
SIZE = st.integers(0, 60)


def chunks(plan: Schedule, hidden: int, layers: Layers) -> tuple[Passes, ...]:
    """Equal layers are the same object, where stages hand over the same tensors."""
    made: dict[object, Passes] = {}
    result = []
    for at in range(plan.chunks):
        saved, *spikes = layers[at % len(layers)]
        key = (plan.sends(at), plan.receives(at), at % len(layers))
        made.setdefault(key, chunk(plan, at, hidden, saved, (spikes[0], spikes[1])))
        result.append(made[key])
    return tuple(result)


@settings(max_examples=250, deadline=None)
@given(
    schedules(120),
    st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_fold_equals_composition(plan: Schedule, layers: Layers, hidden: int, small: int) -> None:
    sizes = Sizes(hidden, small, small)
    passes = chunks(plan, hidden, layers)
    assert fold_iteration(plan, passes, sizes) == composed(plan, passes, sizes)


@settings(max_examples=100, deadline=None)
@given(schedules(), SIZE, st.integers(1, 9))
def test_passes_that_leave_something_fold_too(plan: Schedule, left: int, hidden: int) -> None:
    passes = tuple(Passes(change(left, Category.ACTIVATIONS), ZERO) for _ in range(plan.chunks))
    sizes = Sizes(hidden)
    assert fold_iteration(plan, passes, sizes) == composed(plan, passes, sizes)


@settings(max_examples=100, deadline=None)
@given(schedules(), SIZE, st.integers(1, 9))
def test_an_iteration_leaves_only_reports(plan: Schedule, saved: int, hidden: int) -> None:
    folded = fold_iteration(plan, chunks(plan, hidden, [(saved, 1, 1)]), Sizes(hidden))
    reports = 512 * plan.microbatches * plan.last
    assert folded.net == folded.net_by[Category.BUFFERS] == reports


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_in_flight_of_a_reduced_schedule_is_that_of_the_whole(plan: Schedule) -> None:
    assert most_in_flight(plan) == in_flight(plan)


@settings(max_examples=100, deadline=None)
@given(schedules(120), st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=3), st.integers(1, 9))
def test_a_shortened_schedule_peaks_as_the_whole(plan: Schedule, layers: Layers, hidden: int) -> None:
    """What the allocator's replay runs reaches what the fold says of the whole iteration; reports apart."""
    sizes, passes = Sizes(hidden, 1, 0), chunks(plan, hidden, layers)
    order = MegatronOrder(plan, (), hidden)
    run = [action for action in order.shortened if action.microbatch >= 0 and action.what != "begin_all"]
    count = sum(action.what == "forward" for action in run) // plan.chunks
    short = replace(plan, microbatches=count)
    assert run == [action for action in trace(short) if action.what != "reduce"]
    assert composed(short, passes, sizes).peak == composed(plan, passes, sizes).peak


def test_in_flight() -> None:
    assert [most_in_flight(schedule(stage, 4, 16)) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert most_in_flight(schedule(0, 4, 16, 2)) == (8, 4)
    assert most_in_flight(schedule(3, 4, 16, 2)) == (5, 1)


def test_chunks_keep_their_last_input_and_its_gradient() -> None:
    """Each 1 KiB; the first stage's first chunk receives nothing."""
    kept = [
        MegatronOrder(plan, (), 1024).carried
        for plan in (schedule(0, 4, 16), schedule(3, 4, 16), schedule(0, 4, 16, 4))
    ]
    assert [one.net for one in kept] == [0, 2 * 1024, 2 * 3 * 1024]
    assert kept[1].net_by[Category.ACTIVATIONS] == kept[1].net_by[Category.TEMPORARIES] == 1024


def test_the_place_begins_with_the_microbatch() -> None:
    plan = schedule(0, 4, 64)
    folded = fold_iteration(plan, chunks(plan, 8, [(100, 0, 50)]), Sizes(8))
    assert folded.place == "0/backward/layer/spike"
    empty = Passes(Excursion(), Excursion())
    assert fold_iteration(schedule(0, 1, 3), (empty,), Sizes(8)).place == "2/forward/pipeline/loss_report"
