from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from memplan.schedules.megatron_schedule import schedule
from memplan.schedules.torch_schedules import Place, passes
from memplan.search.time import StageWork, assemble, entry_times, work_of
from memplan.search.time.step import Stage, seconds

from ...schedules.megatron_events import calls
from .plans import megatron_22b

seconds_of_a_pass = st.floats(0.1, 3.0)
one_stage = st.builds(Stage, seconds_of_a_pass, seconds_of_a_pass)


class Pass(NamedTuple):
    """One pass of a stage, as a schedule orders it."""

    forward: bool
    chunk: int
    microbatch: int


def simulated(stages: Sequence[Sequence[Stage]], orders: Sequence[Sequence[Pass]]) -> float:
    """The same by running every stage's passes in order, each as soon as its stage is free and what it needs is there.

    ``orders`` holds each stage's passes. Hidden states go to the next stage, from the last stage to the first stage's
    next chunk; gradients the other way.
    """
    count, chunks = len(stages), len(stages[0])
    ended: dict[tuple[bool, int, int], float] = {}
    free, at = [0.0] * count, [0] * count
    waiting = sum(map(len, orders))
    while waiting:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                one = order[at[stage]]
                place = one.chunk * count + stage
                needed = _needed(one, place, count * chunks)
                if needed is not None and needed not in ended:
                    break
                start = max(free[stage], 0.0 if needed is None else ended[needed])
                times = stages[stage][one.chunk]
                free[stage] = start + (times.forward if one.forward else times.backward)
                ended[(one.forward, place, one.microbatch)] = free[stage]
                at[stage] += 1
                waiting -= 1
                moved = True
        if not moved:
            raise ValueError("the order of passes deadlocks")
    return max(free)


def _needed(one: Pass, place: int, places: int) -> tuple[bool, int, int] | None:
    """The pass whose result ``one`` takes in: ``(forward, place in the model, micro-batch)``."""
    if one.forward:
        return None if place == 0 else (True, place - 1, one.microbatch)
    return (True, place, one.microbatch) if place == places - 1 else (False, place + 1, one.microbatch)


def one_chunk_orders(count: int, microbatches: int, schedule: str = "1f1b") -> list[list[Pass]]:
    """1F1B or GPipe, a chunk a stage."""
    orders = []
    for stage in range(count):
        warm_up = microbatches if schedule == "gpipe" else min(count - stage - 1, microbatches)
        order = [Pass(True, 0, number) for number in range(warm_up)]
        for number in range(microbatches - warm_up):
            order += [Pass(True, 0, warm_up + number), Pass(False, 0, number)]
        order += [Pass(False, 0, number) for number in range(microbatches - warm_up, microbatches)]
        orders.append(order)
    return orders


def megatron_orders(count: int, microbatches: int, chunks: int) -> list[list[Pass]]:
    """The order in which Megatron-Core's interleaved schedule calls its passes."""
    return [
        [
            Pass(call.what == "forward", call.chunk, call.microbatch)
            for call in calls(schedule(at, count, microbatches, chunks))
        ]
        for at in range(count)
    ]


@given(stages=st.lists(one_stage, min_size=1, max_size=8), microbatches=st.integers(1, 24))
def test_gpipe_is_exact(stages: list[Stage], microbatches: int) -> None:
    wrapped = [[stage] for stage in stages]
    orders = one_chunk_orders(len(stages), microbatches, "gpipe")
    assert seconds(wrapped, microbatches, "gpipe") == pytest.approx(simulated(wrapped, orders))


@given(
    forwards=st.lists(seconds_of_a_pass, min_size=1, max_size=8),
    ratio=st.floats(1.0, 4.0),
    microbatches=st.integers(1, 24),
)
def test_1f1b_is_never_slower_than_the_fold(forwards: list[float], ratio: float, microbatches: int) -> None:
    """Of stages whose backward passes take so many times as long as their forward passes; and by no more than a pass
    through the pipeline."""
    stages = [[Stage(forward, ratio * forward)] for forward in forwards]
    run = simulated(stages, one_chunk_orders(len(stages), microbatches))
    folded = seconds(stages, microbatches)
    assert run <= folded * (1 + 1e-9)
    assert folded <= run + sum(sum(stage[0]) for stage in stages)


@given(stages=st.lists(one_stage, min_size=1, max_size=8), microbatches=st.integers(1, 24))
def test_1f1b_is_never_slower_than_gpipe(stages: list[Stage], microbatches: int) -> None:
    wrapped = [[stage] for stage in stages]
    run = simulated(wrapped, one_chunk_orders(len(stages), microbatches))
    assert run <= seconds(wrapped, microbatches, "gpipe") * (1 + 1e-9)
    assert run >= seconds(wrapped, microbatches) / 2


@given(
    middle=one_stage,
    ends=st.tuples(st.floats(1.0, 2.0), st.floats(1.0, 2.0)),
    count=st.integers(2, 10),
    m=st.integers(1, 40),
)
def test_1f1b_is_exact_where_only_the_ends_are_slower(
    middle: Stage, ends: tuple[float, float], count: int, m: int
) -> None:
    """Embedding and head make the first and the last stage slower, in forward and backward alike."""
    stages = [[middle] for _ in range(count)]
    stages[0] = [Stage(*(ends[0] * part for part in middle))]
    stages[-1] = [Stage(*(max(ends) * part for part in middle))]
    assert seconds(stages, m) == pytest.approx(simulated(stages, one_chunk_orders(count, m)))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_interleaved_is_exact_for_equal_chunks(count: int, chunks: int) -> None:
    """And is the formula of arXiv 2104.04473, section 2.2: the bubble is one chunk's way through p - 1 stages."""
    stages = [[Stage(1.0, 2.0)] * chunks for _ in range(count)]
    for rounds in (1, 2, 5):
        m = rounds * count
        run = simulated(stages, megatron_orders(count, m, chunks))
        assert seconds(stages, m) == pytest.approx(run)
        assert run == pytest.approx(3.0 * (m * chunks + count - 1))


@settings(deadline=None, max_examples=50)
@given(
    count=st.integers(2, 6),
    chunks=st.integers(2, 3),
    rounds=st.integers(1, 4),
    embedding=st.floats(1.0, 1.2),
    head=st.floats(1.0, 1.6),
)
def test_interleaved_with_slower_ends_is_close_and_never_slower_than_the_fold(
    count: int, chunks: int, rounds: int, embedding: float, head: float
) -> None:
    stages = [[Stage(1.0, 2.0)] * chunks for _ in range(count)]
    stages[0] = [Stage(embedding, 2 * embedding), *stages[0][1:]]
    stages[-1] = [*stages[-1][:-1], Stage(head, 2 * head)]
    m = rounds * count
    run = simulated(stages, megatron_orders(count, m, chunks))
    assert run <= seconds(stages, m) * (1 + 1e-9)
    assert seconds(stages, m) == pytest.approx(run, rel=0.06)


def test_torchs_interleaved_order_takes_as_long() -> None:
    stages = [[Stage(1.0, 2.0)] * 2 for _ in range(4)]
    orders = [
        [Pass(one.what == "forward", one.chunk, one.microbatch) for one in passes(Place(rank, 4, 2), 8)]
        for rank in range(4)
    ]
    assert seconds(stages, 8) == pytest.approx(simulated(stages, orders), rel=0.03)


def test_an_order_that_waits_for_itself_is_reported() -> None:
    orders = [[Pass(False, 0, 0), Pass(True, 0, 0)]]
    with pytest.raises(ValueError, match="deadlocks"):
        simulated([[Stage(1.0, 1.0)]], orders)


@pytest.mark.parametrize("microbatches", [8, 24])
@pytest.mark.parametrize("flags", [{}, {"recompute": "full"}, {"vpp": 3}, {"vpp": 6, "recompute": "full"}])
def test_the_fold_is_exact_for_stages_of_real_layers(flags: dict[str, object], microbatches: int) -> None:
    """A vocabulary of 250,000 makes the last stage much slower than the others, and the first a little."""
    given = megatron_22b(gpus=64, pp=8, layers=144, vocab=250000, gbs=microbatches, mbs=1, **flags)
    times, work = entry_times(given), work_of(given)
    count, chunks = len(work), len(work[0])

    def stage(one: StageWork, at: tuple[int, int]) -> Stage:
        sends = (at != (count - 1, chunks - 1)) * times.send, (at != (0, 0)) * times.send
        parts = [times.layer] * one.layers + [times.embedding] * one.embedding
        parts += [times.final_norm] * one.final_norm + [times.head] * one.head
        forward, backward = sum(part.forward for part in parts), sum(part.backward for part in parts)
        return Stage(forward + sends[0], backward + one.recomputed * times.layer.recompute + sends[1])

    stages = [[stage(one, (at, number)) for number, one in enumerate(held)] for at, held in enumerate(work)]
    interleaved = chunks > 1
    orders = megatron_orders(count, microbatches, chunks) if interleaved else one_chunk_orders(count, microbatches)
    run = simulated(stages, orders)
    assert seconds(stages, microbatches) == pytest.approx(run)
    assert assemble(times, work, microbatches).total == pytest.approx(run)
