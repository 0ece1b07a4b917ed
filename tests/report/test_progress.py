"""How long the rest of long work takes."""

from __future__ import annotations

import pytest

from memplan.report import progress
from memplan.report.progress import time_left


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "about 1 s"), (4, "about 5 s"), (42, "about 40 s"), (100, "about 2 min"), (7200, "about 2.0 h")],
)
def test_as_precise_as_it_is_known(seconds: float, said: str) -> None:
    assert time_left(seconds) == said


def test_the_rest_is_as_quick_as_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 of 100 layouts in 10 s: 80 more take 40; nothing is said in the first seconds, or of other work before."""
    shown = progress._Shown("searching")
    said = []
    for now, what, done in ((0.0, "layouts", 0), (1.0, "layouts", 10), (10.0, "layouts", 20), (11.0, "cuts", 50)):
        monkeypatch.setattr(progress, "monotonic", lambda now=now: now)
        shown.report(what, done, 100)
        said.append(shown.text)
    assert said == ["layouts: 0 of 100", "layouts: 10 of 100", "layouts: 20 of 100, about 40 s left", "cuts: 50 of 100"]


def test_work_that_may_end_at_any_moment_foresees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of 107,076 layouts that ends after 250 in half a minute is not "about 3.8 h" from its end."""
    shown = progress._Shown("searching")
    for now, done in ((0.0, 1), (10.0, 250)):
        monkeypatch.setattr(progress, "monotonic", lambda now=now: now)
        shown.report("layouts tried (at most 107,076)", done, 0)
    assert shown.text == "layouts tried (at most 107,076): 250"
