"""Layers of stages and chunks, and what is refused."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.plan.megatron_layout import Chunk, stages, virtual_stages


def layers_of(result: tuple[tuple[Chunk, ...], ...]) -> list[list[list[int]]]:
    return [[list(chunk.layers) for chunk in stage] for stage in result]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_even_stages_hold_every_layer_once_in_order(pp: int, vpp: int, each: int) -> None:
    if pp == 1:
        vpp = 1
    result = stages(pp * vpp * each, pp, vpp)
    along = [stage[chunk].layers for chunk in range(vpp) for stage in result]
    assert list(chain.from_iterable(along)) == list(range(pp * vpp * each))
    assert [entry.embedding for stage in result for entry in stage].count(True) == 1
    assert result[0][0].embedding
    assert result[-1][-1].head


def test_chunks_are_interleaved() -> None:
    assert layers_of(stages(8, 2, 2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_entries_are_in_order() -> None:
    assert stages(2, 1)[0][0].entries == ("embedding", 0, 1, "head")


def test_uneven_first_and_last_stage() -> None:
    assert layers_of(stages(10, 4, first_layers=1, last_layers=3)) == [[[0]], [[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]
    assert layers_of(stages(8, 3, 2, first_layers=2, last_layers=2)) == [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]]
    assert layers_of(stages(7, 2, last_layers=3)) == [[[0, 1, 2, 3]], [[4, 5, 6]]]


def test_embedding_and_loss_take_the_place_of_layers() -> None:
    assert layers_of(stages(6, 4, count_embedding=True, count_loss=True)) == [[[0]], [[1, 2]], [[3, 4]], [[5]]]
    assert layers_of(stages(6, 2, 2, count_embedding=True, count_loss=True)) == [[[0], [3, 4]], [[1, 2], [5]]]
    assert layers_of(stages(2, 2, 2, count_embedding=True, count_loss=True)) == [[[], [1]], [[0], []]]


def test_layout_strings() -> None:
    assert layers_of(stages(4, 2, layout="Ett|ttL")) == [[[0, 1]], [[2, 3]]]
    assert layers_of(stages(6, 2, layout="E|(tt|)*2,ttL")) == [[[], [2, 3]], [[0, 1], [4, 5]]]
    assert layers_of(stages(5, 2, layout="Et*3||tt|L")) == [[[0, 1, 2], [3, 4]], [[], []]]
    assert layers_of(stages(3, 2, layout="Ettt|L")) == [[[0, 1, 2]], [[]]]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"layers": 7, "pp": 2}, "layout.pp"),
        ({"layers": 8, "pp": 2, "vpp": 3}, "layout.vpp"),
        ({"layers": 8, "pp": 1, "vpp": 2}, "layout.vpp"),
        ({"layers": 8, "pp": 2, "vpp": 0}, "layout.vpp"),
        ({"layers": 8, "pp": 2, "first_layers": 0}, "pipeline.first_layers"),
        ({"layers": 8, "pp": 2, "first_layers": 9}, "pipeline.first_layers"),
        ({"layers": 8, "pp": 4, "first_layers": 1}, "pipeline.first_layers"),
        ({"layers": 8, "pp": 4, "vpp": 2, "first_layers": 5}, "pipeline.first_layers"),
        ({"layers": 8, "pp": 2, "first_layers": 3, "last_layers": 3}, "pipeline.last_layers"),
        ({"layers": 8, "pp": 1, "first_layers": 3, "last_layers": 5}, "pipeline.last_layers"),
        ({"layers": 8, "pp": 2, "vpp": 2, "first_layers": 4, "last_layers": 4}, "layout.vpp"),
        ({"layers": 10, "pp": 3, "vpp": 2, "first_layers": 2, "last_layers": 2}, None),
        ({"layers": 9, "pp": 3, "vpp": 2, "first_layers": 2, "last_layers": 2}, "layout.vpp"),
        ({"layers": 8, "pp": 2, "count_embedding": True}, "pipeline.count_embedding"),
        ({"layers": 8, "pp": 2, "count_loss": True}, "pipeline.count_loss"),
        ({"layers": 8, "pp": 2, "count_loss": True, "last_layers": 3}, "pipeline.count_loss"),
        ({"layers": 0, "pp": 1, "count_loss": True, "count_embedding": True}, None),
        ({"layers": 4, "pp": 2, "layout": "Ett|ttLm"}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": "Ett|tt"}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": "tt|ttL"}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": "Ett|tL"}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": "Ett|ttL|"}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": "Ett ttL"}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": ""}, "pipeline.layout"),
        ({"layers": 4, "pp": 1, "layout": "Ett|ttL"}, "layout.vpp"),
        ({"layers": 4, "pp": 2, "vpp": 2, "layout": "Ett|ttL"}, "layout.vpp"),
        ({"layers": 4, "pp": 2, "layout": "Ett|ttL", "first_layers": 2}, "pipeline.layout"),
        ({"layers": 4, "pp": 2, "layout": "Et*99999999999999|ttL"}, "pipeline.layout"),
    ],
)
def test_what_megatron_refuses_is_refused_by_field(arguments: dict[str, int], field: str | None) -> None:
    if field is None:
        stages(**arguments)
        return
    with pytest.raises(PlanError) as caught:
        stages(**arguments)
    assert caught.value.field == field


def test_virtual_stages_from_layers_per_chunk() -> None:
    assert virtual_stages(32, 4, 2) == 4
    assert virtual_stages(30, 4, 2, True, True) == 4
    with pytest.raises(PlanError):
        virtual_stages(32, 4, 3)
    with pytest.raises(PlanError):
        virtual_stages(30, 4, 2)
