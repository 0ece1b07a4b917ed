"""Order of passes, lives of tensors between stages, and what is refused."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.schedules.megatron_fold import Sizes
from memplan.schedules.megatron_interleaved import FINALIZE
from memplan.schedules.megatron_schedule import Schedule, schedule, trace

from .megatron_events import (
    STANDALONE,
    calls,
    configurations,
    fingerprint,
    in_flight,
    is_further,
    recorded,
    standalone,
)


def short(plan: Schedule) -> str:
    return " ".join(f"{call.what[0].upper()}{call.chunk}.{call.microbatch}" for call in calls(plan))


def test_one_forward_one_backward() -> None:
    assert short(schedule(0, 3, 4)) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert short(schedule(2, 3, 2)) == "F0.0 B0.0 F0.1 B0.1"
    assert short(schedule(0, 1, 2)) == "F0.0 B0.0 F0.1 B0.1"


def test_interleaved() -> None:
    assert short(schedule(1, 2, 2, 2)) == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1"
    assert short(schedule(0, 2, 2, 2)) == "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"


@pytest.mark.parametrize("plan", configurations(), ids=str)
def test_events_are_those_recorded_from_megatron_core(plan: Schedule) -> None:
    assert fingerprint(trace(plan)) == recorded()[str(plan)]


@pytest.mark.parametrize("plan", standalone(), ids=str)
def test_hidden_states_of_all_depths_go_where_megatron_core_sends_them(plan: Schedule) -> None:
    """The chunk before the last sends twice what others do; all ranks of Megatron-Core ran, exchanging shapes."""
    last, chunks = plan.chunks - 1, range(plan.chunks)
    edges = tuple((1 + (plan.last and at == last), 1 + is_further(plan, at)) for at in chunks)
    sizes = Sizes(1, edges=edges)
    sized = [
        event._replace(chunk=sizes.of(event.tensor, event.chunk)) if event.tensor is not None else event
        for event in trace(plan)
    ]
    assert fingerprint(sized, sized=True) == recorded()[f"{plan} {STANDALONE}"]


@given(st.sampled_from(configurations()))
def test_every_tensor_begins_and_ends_once(plan: Schedule) -> None:
    changes = Counter((one.tensor, one.microbatch, one.what) for one in trace(plan) if one.tensor is not None)
    assert set(changes.values()) == {1}
    born = {key[:2] for key in changes if key[2] == "begin"}
    died = {key[:2] for key in changes if key[2] == "end"}
    received = sum(plan.receives(chunk) for chunk in range(plan.chunks))
    assert Counter(kind for kind, _ in died - born) == Counter({"input": received, "input_grad": received})
    left = Counter({"input": received, "input_grad": received, "report": plan.microbatches * plan.last})
    assert Counter(kind for kind, _ in born - died) == +left


@given(st.sampled_from(configurations()))
def test_every_pass_runs_once_and_backward_behind_forward(plan: Schedule) -> None:
    order = {call: at for at, call in enumerate(calls(plan))}
    assert len(order) == len(calls(plan)) == 2 * plan.chunks * plan.microbatches
    for call, at in order.items():
        assert call.what == "forward" or order[call._replace(what="forward")] < at


@given(st.sampled_from(configurations()))
def test_an_output_is_deallocated_before_the_next_one_is_made(plan: Schedule) -> None:
    outputs = [event for event in trace(plan) if event.tensor == "output"]
    assert all(now.what != then.what for now, then in pairwise(outputs))


def test_what_is_bound_when_gradients_are_finalized() -> None:
    """1F1B: the last input with its gradient, the last gradient received, and a stub, besides what the chunk keeps."""
    plan = schedule(1, 4, 8)
    held: Counter[str] = Counter({"input": 1, "input_grad": 1})
    for event in trace(plan):
        if event == FINALIZE:
            break
        if event.tensor is not None:
            held[event.tensor] += 1 if event.what == "begin" else -1
    assert +held == Counter({"input": 1, "input_grad": 1, "output_grad": 1, "stub": 1})


def test_in_flight() -> None:
    assert [in_flight(schedule(stage, 4, 16)) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert in_flight(schedule(0, 4, 2)) == (2,)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 1, 4, 2), "layout.vpp"),
        ((0, 2, 4, 2, None, False), "layout.vpp"),
        ((0, 4, 3, 2), "layout.vpp"),
        ((0, 4, 6, 2), "layout.vpp"),
        ((0, 4, 16, 2, 3), "pipeline.group"),
        ((0, 4, 16, 2, 17), "pipeline.group"),
        ((0, 4, 16, 2, 7), "pipeline.group"),
        ((0, 4, 16, 1, None, True, True), "pipeline.overlap_p2p_warmup"),
        ((0, 4, 16, 2, None, False, True), "pipeline.overlap_p2p_warmup"),
    ],
)
def test_what_megatron_refuses_is_refused_by_field(arguments: tuple[int, ...], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        schedule(*arguments)
    assert caught.value.field == field


def test_without_interleaving_nothing_overlaps() -> None:
    assert not schedule(0, 4, 16, overlap=True).overlap
