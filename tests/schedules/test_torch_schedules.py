"""The order of passes against ``torch.distributed.pipelining``'s own, and lifetimes that always close."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed.pipelining import schedules

from memplan.schedules import torch_schedules
from memplan.schedules.torch_schedules import Action, Place, folded, rounds, schedule, shortened

LETTERS = {"forward": "F", "backward": "B", "unshard": "UNSHARD", "reshard": "RESHARD", "reduce": "REDUCE_GRAD"}
SIZES = {"output": 7, "input_gradient": 11, "loss": 1, "loss_gradient": 3}


def ordered(actions: tuple[Action, ...], place: Place) -> list[tuple[int, str, int | None]]:
    """Stage, what, and micro-batch, as PyTorch names them."""
    return [
        (place.stage(one.chunk), LETTERS[one.what], one.microbatch if one.what in ("forward", "backward") else None)
        for one in actions
        if one.what in LETTERS
    ]


@lru_cache(maxsize=64)
def theirs(ranks: int, chunks: int, microbatches: int, name: str) -> dict[int, list[Any]]:
    """PyTorch's order, by rank; stages are only looked at for their numbers."""

    def stage(rank: int) -> Any:
        return SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=rank, stage_index=rank)

    if chunks > 1:
        made = schedules.ScheduleInterleaved1F1B([stage(0)] * chunks, microbatches)  # type: ignore[list-item]
        return made.pipeline_order_with_comms
    single = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]
    order = single(stage(0), microbatches).pipeline_order
    assert order is not None
    return order


def expected(ranks: int, chunks: int, microbatches: int, name: str, rank: int) -> list[tuple[int, str, int | None]]:
    found = theirs(ranks, chunks, microbatches, name)[rank]
    named = [(one.stage_index, one.computation_type.value, one.microbatch_index) for one in found if one is not None]
    return [one for one in named if one[1] in LETTERS.values()]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Place, int, str]:
    ranks, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    name = draw(st.sampled_from(["1f1b", "gpipe"])) if chunks == 1 else "1f1b"
    least = ranks if chunks == 1 and name == "1f1b" else 1
    microbatches = draw(st.integers(least, 6 * ranks))
    if chunks > 1:
        microbatches -= microbatches % rounds(ranks, microbatches)
    return Place(draw(st.integers(0, ranks - 1)), ranks, chunks), microbatches, name


@given(pipelines())
def test_passes_run_in_the_order_of_the_real_schedule(pipeline: tuple[Place, int, str]) -> None:
    place, microbatches, name = pipeline
    ours = ordered(tuple(schedule(place, microbatches, name)), place)
    real = expected(place.ranks, place.chunks, microbatches, name, place.rank)
    real = [one for at, one in enumerate(real) if one[1] != "RESHARD" or _comes(one[0], real[at:])]
    if place.chunks == 1:  # the order that 1F1B prints numbers its forward passes from 1
        ours, real = ([(stage, what, None) for stage, what, _ in order] for order in (ours, real))
    assert ours == real


def _comes(stage: int, order: list[tuple[int, str, int | None]]) -> bool:
    """A stage that has been reduced has nothing left to reshard."""
    return any(other == stage and what == "B" for other, what, _ in order)


@given(pipelines(), st.booleans())
def test_what_outlives_a_pass_ends_once_and_after_it(pipeline: tuple[Place, int, str], outputs: bool) -> None:
    place, microbatches, name = pipeline
    kept = {("output", place.chunks - 1, number) for number in range(microbatches)}
    kept = kept if outputs and place.rank == place.ranks - 1 else set()
    alive: set[tuple[str | None, int, int]] = {*kept}
    for what, chunk, microbatch, tensor in schedule(place, microbatches, name, outputs):
        stage = place.stage(chunk)
        if what == "forward":
            alive.add(("output", chunk, microbatch))
        elif what == "loss":
            alive.add(("loss", chunk, microbatch))
        elif what == "backward":
            assert ("output", chunk, microbatch) in alive
            alive |= {("input_gradient", chunk, microbatch)} if stage else set()
            alive |= {("loss_gradient", chunk, microbatch)} if stage == place.stages - 1 else set()
        elif what == "end":
            alive.remove((tensor, chunk, microbatch))
    assert alive == kept


@given(pipelines(), st.booleans(), st.integers(0, 200), st.integers(0, 200))
def test_the_shortened_schedule_peaks_alike(
    pipeline: tuple[Place, int, str], outputs: bool, saved: int, working: int
) -> None:
    place, microbatches, name = pipeline

    def peak(actions: tuple[Action, ...]) -> tuple[int, int]:
        level = most = 0
        for what, chunk, number, tensor in actions:
            stage = place.stage(chunk)
            level += {"forward": saved + SIZES["output"], "loss": SIZES["loss"], "backward": working}.get(what, 0)
            most = max(most, level)
            if what == "backward":
                level += (SIZES["input_gradient"] if stage else 0) - saved - working
                level += SIZES["loss_gradient"] if stage == place.stages - 1 else 0
            if what in ("begin", "end"):
                level += SIZES[tensor or ""] if what == "begin" else -SIZES[tensor]
            if what in ("begin_all", "end_all"):
                level += number * (SIZES[tensor or ""] if what == "begin_all" else -SIZES[tensor])
            most = max(most, level)
        return level, most

    short, whole = (run(place, microbatches, name, outputs) for run in (shortened, schedule))
    assert peak(tuple(short)) == peak(tuple(whole))
    assert len(short) <= len(whole)


@given(pipelines(), st.booleans())
def test_the_folded_schedule_has_the_numbers_of_the_whole_one(pipeline: tuple[Place, int, str], outputs: bool) -> None:
    """Its first passes and its last are the schedule's."""
    place, microbatches, name = pipeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_schedules, "MOST_WHOLE", 0)
        short = [one for one in folded(place, microbatches, name, outputs) if one.tensor is None]
    whole = [one for one in schedule(place, microbatches, name, outputs) if one.tensor is None]
    same = next((at for at, (one, other) in enumerate(zip(short, whole, strict=False)) if one != other), len(short))
    behind = len(short) - same
    assert short[:same] == whole[:same]
    assert not behind or short[-behind:] == whole[-behind:]


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_replay_of_many_micro_batches_is_that_of_few(chunks: int) -> None:
    few, many = (shortened(Place(1, 4, chunks), count, "1f1b") for count in (64, 256))
    passes = [sum(one.what in ("forward", "backward") for one in actions) for actions in (few, many)]
    assert passes[0] == passes[1]


def test_the_last_stage_has_the_logits_of_two_micro_batches() -> None:
    """``output`` still refers to the one before while a forward runs."""
    actions = schedule(Place(1, 2), 2, "1f1b")
    assert [(one.what, one.microbatch, one.tensor) for one in actions[:7]] == [
        ("forward", 0, None),
        ("loss", 0, None),
        ("backward", 0, None),
        ("end", 0, "loss_gradient"),
        ("forward", 1, None),
        ("end", 0, "output"),
        ("loss", 1, None),
    ]


def test_works_of_sends_keep_what_was_sent() -> None:
    """GPipe waits for them in the end, so outputs and gradients of inputs outlive their backward."""
    actions = schedule(Place(1, 3), 4, "gpipe")
    last = max(at for at, one in enumerate(actions) if one.what == "reduce")
    ended = Counter(one.tensor for one in actions[last:] if one.what == "end")
    assert ended == {"output": 4, "input_gradient": 4}
