"""Layers of several kinds in turn are learnt with few of them; every model that ships so is traced whole by
``test_built_in.py``."""

from __future__ import annotations

import pytest

from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Drop, Hold
from memplan.trace.fit import LAYER
from memplan.trace.learned import fit_of
from memplan.trace.periods import _period, _repeating
from memplan.trace.rows import laid_out
from memplan.trace.tapes import FIRST, FORWARD, Row

POINT = (2, 512)


@pytest.mark.parametrize(
    ("row", "found"),
    [("sssfsssfs", (4, 0)), ("dsssss", (1, 1)), ("aaaa", (1, 0)), ("dsfsfsf", (2, 1)), ("", (1, 0))],
)
def test_period_and_what_comes_before_it(row: str, found: tuple[int, int]) -> None:
    assert _period(row) == found


def test_one_period_more() -> None:
    """Entries before it and behind it stay what they are, and forward leaves behind what its layers leave."""
    piece = fit_of(resolve(read_plan(None, {"model": "phi-2"}, traced=True).plan)).pieces[0]
    count = sum(len(one.names) for one in piece.row)
    first = next(
        at for at, name in enumerate(name for one in piece.row for name in one.names) if name.startswith(LAYER)
    )
    cut = first + 3
    grown = _repeating(piece, count + 2, 3, 2)
    before, after = list(laid_out(piece, piece.row, *POINT)), list(laid_out(grown, grown.row, *POINT))
    assert [one[0] for one in after if str(one[0]).startswith(LAYER)] == [f"{LAYER}{at}" for at in range(7)]
    assert [one[2:] for one in after[:cut]] == [one[2:] for one in before[:cut]]
    assert [one[2:] for one in after[cut + 2 :]] == [one[2:] for one in before[cut:]]

    def held(row: Row, known: int, places: range) -> int:
        events = [event for at in places for event in row.of(at, known)]
        ended = sum(event.bytes for event in events if isinstance(event, Drop))
        return sum(event.bytes for event in events if isinstance(event, Hold)) - ended

    old, new = Row(piece, piece.row, *POINT, False), Row(grown, grown.row, *POINT, False)
    for known in (FORWARD, FIRST):
        more = held(new, known, range(count + 2)) - held(old, known, range(count))
        assert more == held(old, known, range(cut - 2, cut))
