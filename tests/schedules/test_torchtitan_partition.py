"""torchtitan's own splits; the figures are those of its functions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.schedules.partition import of_entries, split_points, weighted


@pytest.mark.parametrize(
    ("layers", "stages", "december_2024", "later"),
    [
        (32, 2, [0, 16, 32], [0, 16, 32]),
        (32, 6, [0, 5, 11, 17, 22, 27, 32], [0, 5, 11, 17, 23, 28, 32]),
        (10, 4, [0, 2, 5, 8, 10], [0, 2, 5, 8, 10]),
        (7, 3, [0, 2, 5, 7], [0, 2, 5, 7]),
    ],
)
def test_layers_are_split_as_torchtitan_does(
    layers: int, stages: int, december_2024: list[int], later: list[int]
) -> None:
    assert split_points(layers, stages) == december_2024
    assert weighted(layers, stages) == later


@given(st.integers(2, 200), st.data())
def test_every_layer_is_in_one_stage(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, layers))
    for edges, fewest in ((weighted(layers, stages), 0), (split_points(layers, stages), 1)):
        sizes = [high - low for low, high in pairwise(edges)]
        assert len(sizes) == stages
        assert sum(sizes) == layers
        assert min(sizes) >= fewest
        assert min(sizes[1:-1], default=1) >= 1


def test_boundaries_by_hand_count_embedding_norm_and_head() -> None:
    assert of_entries([0, 3, 7], 4, 2) == [0, 2, 4]
    assert of_entries([0, 1, 5, 7], 4, 3) == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("edges", "says"),
    [
        ([0, 0, 7], "leave the embedding to the first stage"),
        ([0, 6, 7], "norm and head to the last"),
        ([0, 2, 2, 7], "every stage a layer"),
        ([0, 2, 6], "must be 7"),
        ([0, 2, 4, 7], "2 stages need 3"),
    ],
)
def test_boundaries_that_cannot_be(edges: list[int], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        of_entries(edges, 4, 3 if len(edges) == 4 and "every" in says else 2)
