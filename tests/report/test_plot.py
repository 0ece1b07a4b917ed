"""The picture of memory against time (``memplan/report/plot.py``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memplan.plan.errors import PlanError
from memplan.report.plot import KEYED, format_of, front_picture

from .test_suggestion import answer

pytest.importorskip("matplotlib")


def test_the_svg_names_what_it_shows_and_is_the_same_each_time() -> None:
    found = answer("megatron").found
    svg = front_picture(found, "svg")
    assert svg == front_picture(found, "svg")
    text = svg.decode()
    for part in (
        "h100-80gb: 77.5 GiB less headroom",
        "recommended",
        "as given",
        "llama-3-8b · megatron · 2 × h100-80gb",
        "step (ms)",
    ):
        assert part in text
    assert text.count("GiB</text>") >= min(KEYED, len(found.front))


def test_the_png_is_one() -> None:
    assert front_picture(answer("deepspeed").found, "png").startswith(b"\x89PNG\r\n")


def test_what_does_not_fit_is_drawn_as_such() -> None:
    found = answer("does not fit").found
    assert b"too large" in front_picture(replace(found, given=found.given or found.closest), "svg")


def test_other_endings_are_refused() -> None:
    assert format_of(Path("a/b.SVG")) == "svg"
    with pytest.raises(PlanError, match=r"must end in \.svg or \.png"):
        format_of(Path("front.pdf"))
