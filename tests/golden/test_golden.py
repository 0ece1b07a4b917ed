"""The part of the safety net that runs with every test run; ``make golden`` checks all of it."""

from __future__ import annotations

import pytest

from .answers import answer
from .cases import commands, fast, smoke
from .comparing import differences, recorded

KNOWN = recorded()


@pytest.mark.parametrize("command", fast())
def test_answer_is_the_recorded_one(command: str) -> None:
    assert not differences(KNOWN[command], answer(command))


def test_every_case_is_recorded() -> None:
    assert list(KNOWN) == commands()
    assert set(smoke()) | set(fast()) <= set(KNOWN)
