"""Polynomials are recovered exactly, and only where there is one."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, strategies as st

from memplan.trace.fit import NotPolynomialError, Polynomial, fitted

COEFFICIENTS = st.tuples(*[st.integers(-(10**15), 10**15)] * 6)
LENGTHS = st.lists(st.integers(1, 2**20), min_size=3, max_size=3, unique=True)
BATCHES = st.lists(st.integers(1, 2**16), min_size=2, max_size=2, unique=True)
POINTS = st.tuples(st.integers(0, 2**20), st.integers(0, 2**24))


def by_definition(coefficients: tuple[int, ...], b: int, s: int) -> int:
    letters = (1, s, s**2, b, b * s, b * s**2)
    return sum(n * letter for n, letter in zip(coefficients, letters, strict=True))


@given(COEFFICIENTS, POINTS)
def test_value(coefficients: tuple[int, ...], point: tuple[int, int]) -> None:
    assert Polynomial(coefficients)(*point) == by_definition(coefficients, *point)  # type: ignore[arg-type]


@given(COEFFICIENTS, BATCHES, LENGTHS)
def test_a_grid_determines_the_polynomial(coefficients: tuple[int, ...], bs: list[int], ss: list[int]) -> None:
    values = {(b, s): by_definition(coefficients, b, s) for b, s in product(bs, ss)}
    assert fitted(values).coefficients == coefficients


@given(st.tuples(*[st.integers(-(10**15), 10**15)] * 3), st.integers(1, 100), LENGTHS)
def test_of_one_batch_size_in_s_alone(coefficients: tuple[int, ...], b: int, ss: list[int]) -> None:
    values = {(b, s): by_definition((*coefficients, 0, 0, 0), b, s) for s in ss}
    assert fitted(values).coefficients == (*coefficients, 0, 0, 0)


@given(BATCHES, LENGTHS, st.lists(st.integers(0, 10**12), min_size=6, max_size=6))
def test_through_every_value_or_refused(bs: list[int], ss: list[int], sizes: list[int]) -> None:
    """Whatever the values, a polynomial that is given back goes through all of them."""
    values = dict(zip(product(bs, ss), sizes, strict=True))
    try:
        found = fitted(values)
    except NotPolynomialError:
        return
    assert {point: found(*point) for point in values} == values


def test_a_triangle_has_no_whole_coefficients() -> None:
    with pytest.raises(NotPolynomialError, match=r"a coefficient is 1/2, not a whole number"):
        fitted({(b, s): b * s * (s + 1) // 2 for b in (2, 3) for s in (1, 2, 3)})


def test_rounded_sizes_are_none() -> None:
    with pytest.raises(NotPolynomialError):
        fitted({(b, s): -(-4 * b * s // 512) * 512 for b in (2, 3) for s in (33, 100, 250)})


@pytest.mark.parametrize("points", [[(1, 1)], [(1, 1), (1, 2), (2, 1), (2, 2)], [(1, 1), (2, 2), (3, 3)]])
def test_other_points_than_a_grid(points: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="no grid"):
        fitted(dict.fromkeys(points, 1))


def test_in_words() -> None:
    assert str(Polynomial((8, 0, 0, 0, 1024, 4))) == "8 + 1,024 bs + 4 bs²"
    assert str(Polynomial((0,) * 6)) == "0"
    assert Fraction(Polynomial((1, 2, 3, 4, 5, 6))(1, 1)) == 21
