"""What repeats in a sequence."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from memplan.allocator import requests as repeats


@given(
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(1, 12),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_parts_make_up_the_sequence(before: list[int], period: list[int], times: int, behind: list[int]) -> None:
    whole = before + period * times + behind
    with patch.object(repeats, "PROBE", 4):
        parts = repeats.repeats(whole)
    assert [one for start, end, often in parts for one in whole[start:end] * often] == whole


@pytest.mark.parametrize("layers", [8, 80])
def test_layers_are_found_between_what_is_around_them(layers: int) -> None:
    dense, experts = [("dense", at) for at in range(30)], [("experts", at) for at in range(50)]
    whole = [0, 1, 2, *dense * layers, 3, 4, *experts * layers, 5]
    found = [one for one in repeats.repeats(whole) if one.times > 1]
    assert [(one.end - one.start, one.times) for one in found] == [(30, layers), (50, layers)]
