"""Figures for people (``memplan/report/names.py``)."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.report.names import GIB, KIB, MIB, elements, exact, percent, size, unit_for


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (1023 * KIB, "1023.0 KiB"),
        (MIB - 1, "1.0 MiB"),
        (3 * MIB + MIB // 2, "3.5 MiB"),
        (10 * MIB - 1, "10.0 MiB"),
        (612 * MIB, "612 MiB"),
        (GIB - 1, "1.00 GiB"),
        (4_102_029_312, "3.82 GiB"),
        (5_000 * GIB, "5,000.00 GiB"),
        (-512 * MIB, "−512 MiB"),
    ],
)
def test_sizes_carry_the_unit_that_suits_them(count: int, text: str) -> None:
    assert size(count) == text


@given(st.integers(0, 2**45))
def test_no_figure_rounds_up_to_the_next_unit(count: int) -> None:
    figure, unit = size(count).split()
    assert unit == "GiB" or float(figure.replace(",", "")) < 1024


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512"), (80_400, "80.4 K"), (362_000_000, "362 M"), (1_454_000_000, "1.45 B"), (999_950, "1.00 M")],
)
def test_parameter_counts_have_three_digits(count: int, text: str) -> None:
    assert elements(count) == text


def test_a_table_has_one_unit() -> None:
    gib, mib = unit_for(33 * GIB), unit_for(448 * MIB)
    assert (gib.name, gib.figure(33 * GIB + GIB // 10), gib.figure(MIB)) == ("GiB", "33.10", "0.00")
    assert (mib.name, mib.figure(448 * MIB), mib.figure(None)) == ("MiB", "448.0", "?")


def test_changes_are_signed_and_nothing_is_zero() -> None:
    unit = unit_for(33 * GIB)
    assert [unit.change(change) for change in (GIB, -GIB, 0)] == ["+1.00", "−1.00", "0"]
    assert unit.figure(-1) == "0.00"


def test_shares_and_exact_bytes() -> None:
    assert percent(1, 8) == "12.5"
    assert percent(0, 0) == "0.0"
    assert exact(4_102_029_312) == "4,102,029,312"
    assert exact(-512) == "−512"
