"""Partitions as DeepSpeed computes them."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.schedules.partition import Entry, balanced, balanced_2023, partition, type_weights, uniform


def gpt(layers: int, h: int = 11600, t: int = 4, v: int = 250_368, s: int = 2048) -> list[Entry]:
    """DeepSpeed's layer list for a GPT of BigScience's fork, with a rank's parameters."""
    layer = (12 * h * h + 7 * h) // t + 6 * h
    embedding = v // t * h + s * h
    return [
        Entry("_to_float16", "to_float16", 0),
        Entry("EmbeddingPipe", "embedding", embedding),
        Entry("<lambda>", "transpose_in", 0),
        *(Entry("ParallelTransformerLayerPipe", f"layer.{i}", layer) for i in range(layers)),
        Entry("<lambda>", "transpose_out", 0),
        Entry("MixedFusedLayerNorm", "final_norm", 2 * h),
        Entry("EmbeddingPipe", "head", embedding),
        Entry("float16_to_fp32", "to_fp32", 0),
    ]


STORY = [0, *range(4, 65, 2), 69]
"""As the thread prints it: stage 0 = 0–3, two layers in each of stages 1–30, stage 31 = 64–68."""


@pytest.mark.parametrize("method", ["type:embed|transformer", "parameters"])
def test_the_story_splits_as_the_thread_prints_it(method: str) -> None:
    entries = gpt(62)
    assert len(entries) == 69
    assert partition(method, entries, 32) == STORY


def test_both_algorithms_agree_on_the_story() -> None:
    entries = gpt(62)
    for weights in (type_weights("embed|transformer", entries), [float(e.parameters) for e in entries]):
        assert balanced(weights, 32) == balanced_2023(weights, 32) == STORY


def test_weighted_types_give_the_embeddings_a_stage_of_their_own() -> None:
    """60 layers, ``type:embed:2|transformer:1``: 64 weights over 32 stages, 2 each."""
    entries = gpt(60)
    bounds = partition("type:embed:2|transformer:1", entries, 32)
    for low, high in pairwise(bounds):
        kinds = {entry.name.split(".")[0] for entry in entries[low:high]}
        assert not ({"embedding", "head"} & kinds and "layer" in kinds)
        assert sum("layer" in entry.name for entry in entries[low:high]) in (0, 2)


def test_uniform_of_2021_gives_the_rest_to_the_last_stage() -> None:
    assert uniform(10, 4) == [0, 2, 4, 6, 10]
    assert uniform(3, 4) == [0, 1, 2, 3, 3]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9), st.integers(2, 5))
def test_the_cut_of_2021_has_a_bottleneck_that_no_other_cut_beats(weights: list[int], stages: int) -> None:
    """Brute force over all cuts; the bisection stops within its epsilon of 1e-3, weights are whole."""
    if len(weights) <= stages or not any(weights):
        return
    parts = balanced(weights, stages)
    assert parts[0] == 0
    assert parts[-1] == len(weights)
    assert parts == sorted(parts)
    assert len(parts) == stages + 1
    best = min(
        max(sum(weights[low:high]) for low, high in pairwise((0, *cut, len(weights))))
        for cut in combinations(range(1, len(weights)), stages - 1)
    )
    assert max(sum(weights[low:high]) for low, high in pairwise(parts)) >= best


@given(st.lists(st.integers(1, 20), min_size=3, max_size=9), st.integers(2, 4))
def test_the_cut_of_2023_has_the_least_spread(weights: list[int], stages: int) -> None:
    if len(weights) < stages:
        return
    spreads = []
    for cut in combinations(range(1, len(weights)), stages - 1):
        sums = [sum(weights[low:high]) for low, high in pairwise((0, *cut, len(weights)))]
        spreads.append(max(sums) - min(sums))
    sums = [sum(weights[low:high]) for low, high in pairwise(balanced_2023(weights, stages))]
    assert max(sums) - min(sums) >= min(spreads)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("types", "must be uniform, parameters, type:REGEX"),
        ("type:moe", "matches no entry"),
        ("type:embed:heavy|transformer", "'heavy' is not a weight"),
        ("type:(", "is not a regular expression"),
        ([0, 4, 8], "3 boundaries; 4 stages need 5"),
        ([1, 4, 8, 9, 11], "forgets entries 0 to 0"),
        ([0, 4, 8, 9, 10], "ends at 10; the layer list has 11 entries"),
        ([0, 6, 4, 9, 11], "repeats entries 4 to 5"),
    ],
)
def test_what_cannot_be_cut_is_said_in_one_line(method: str | list[int], says: str) -> None:
    with pytest.raises(PlanError, match=r"pipeline\.partition") as caught:
        partition(method, gpt(4), 4)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
