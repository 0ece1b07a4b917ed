"""Sizes and headroom as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.plan.sizes import headroom_bytes, parse_size

from .outcomes import error_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 << 20),
        ("31.749KiB", 32510),
        ("", None),
        ("-1", None),
        ("2 gallons", None),
        ("5%", None),
        ("1e9", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_headroom_is_bytes_a_size_or_a_share_of_the_capacity() -> None:
    assert headroom_bytes("0", None) == 0
    assert headroom_bytes("2GiB", 10) == 2 << 30
    assert headroom_bytes("5%", 1000) == 50
    assert headroom_bytes("5%", None) == 0


@pytest.mark.parametrize("text", ["", "100%", "many", "-5%", "5 %%", "99999999999999 GiB"])
def test_other_headroom_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="headroom"):
        headroom_bytes(text, 1000)


@given(st.text(max_size=30), st.none() | st.integers(1, 2**50))
def test_any_text_gives_bytes_or_one_line(text: str, capacity: int | None) -> None:
    assert len(error_of(lambda: headroom_bytes(text, capacity)).splitlines()) <= 1
