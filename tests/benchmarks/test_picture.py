"""The picture of a run (``benchmarks.picture.py``)."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.picture import picture
from memplan.report.estimate import print_estimate

from ..report.fabricated import bigscience
from ..report.printing import printed


def drawn() -> str:
    text = printed(lambda console: print_estimate(bigscience(), console), 100, colour=True)
    return picture(text, "memplan estimate bigscience-104b-250k")


def test_the_picture_is_well_formed_and_holds_the_run() -> None:
    root = ElementTree.fromstring(drawn())
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert "memplan estimate bigscience-104b-250k" in text
    assert "Does not fit" in text
    assert "33.09" in text


def test_the_same_run_gives_the_same_picture() -> None:
    assert drawn() == drawn()


def test_nothing_is_fetched_to_draw_it() -> None:
    assert "@font-face" not in drawn()
    assert "url(http" not in drawn()
