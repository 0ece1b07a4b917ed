"""Both ways to deal out entries, against trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise, product
from math import inf
from random import Random

from hypothesis import given, settings, strategies as st

from memplan.search.cuts import Cost, Option, choose, contiguous


def bottleneck(bounds: Sequence[int], cost: Cost) -> float:
    """The largest ``cost`` of the stages that ``bounds`` cut."""
    return max(cost(stage, low, high) for stage, (low, high) in enumerate(pairwise(bounds)))


def cuts(stages: int, entries: int) -> list[tuple[int, ...]]:
    """Every cut, empty stages included."""
    return [(0, *edges, entries) for edges in combinations_with_replacement(range(entries + 1), stages - 1)]


sizes = st.one_of(st.integers(0, 6).map(float), st.just(inf))
"""Few values, so that ties are common."""


@st.composite
def contiguous_problems(draw: st.DrawFn) -> tuple[int, int, dict[tuple[int, int, int], float], dict]:
    """Costs come from a drawn seed: a draw for each of some 200 places takes longer than what is tested."""
    stages, entries = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    places = [(k, low, high) for k in range(stages) for low in range(entries + 1) for high in range(low, entries + 1)]
    values = Random(draw(st.integers(0, 1 << 32)))
    endless = draw(st.sampled_from((0, 1, 3, 6)))  # every cut is too large if most are
    some = [*map(float, range(7)), *[inf] * endless]
    costs, seconds = (dict(zip(places, values.choices(some, k=len(places)), strict=True)) for _ in range(2))
    return stages, entries, costs, {place: min(size, 9.0) for place, size in seconds.items()}


@settings(max_examples=400, deadline=None)
@given(contiguous_problems())
def test_a_cut_is_as_good_as_the_best_of_all(problem: tuple) -> None:
    """Arbitrary costs: no order among stages, no growth with the number of entries."""
    stages, entries, costs, seconds = problem

    def worst(bounds: tuple[int, ...], values: dict) -> float:
        return max(values[stage, low, high] for stage, (low, high) in enumerate(pairwise(bounds)))

    found = contiguous(stages, entries, lambda *place: costs[place], lambda *place: seconds[place])
    best = min((worst(bounds, costs), worst(bounds, seconds)) for bounds in cuts(stages, entries))
    if best[0] == inf:
        assert found is None
        return
    assert found is not None
    assert (worst(found, costs), worst(found, seconds)) == best
    assert bottleneck(found, lambda *place: costs[place]) == best[0]


option_lists = st.lists(
    st.lists(
        st.builds(Option, st.tuples(st.integers(0, 3), st.integers(0, 2)), sizes, st.integers(0, 4).map(float)),
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(option_lists, st.integers(0, 10))
def test_a_choice_is_as_good_as_the_best_of_all(stages: list[list[Option]], layers: int) -> None:
    choices = [
        (max(one.cost for one in chosen), max(one.second for one in chosen))
        for chosen in product(*stages)
        if sum(one.layers for one in chosen) == layers
    ]
    found = choose(stages, layers)
    best = min(choices, default=(inf, inf))
    if best[0] == inf:
        assert found is None
        return
    assert found is not None
    assert sum(one.layers for one in found) == layers
    assert all(one in options for one, options in zip(found, stages, strict=True))
    assert (max(one.cost for one in found), max(one.second for one in found)) == best


def test_ties_go_to_the_most_even_choice() -> None:
    options = [Option((count,), 1.0) for count in range(5)]
    found = choose([options] * 3, 7)
    assert found is not None
    assert [one.layers for one in found] == [2, 2, 3]


def test_ties_go_to_the_most_even_cut() -> None:
    assert contiguous(3, 7, lambda stage, low, high: 1.0) == (0, 2, 4, 7)
