"""Some seconds of every target, and that the driver sees what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice

import pytest

from memplan.plan.errors import ABSENT, LackingError, PlanError

from . import driver
from .driver import Figures, Target, fuzz, table
from .targets import TARGETS

SEED = int(os.environ.get("MEMPLAN_FUZZ_SEED", "20261122"))
"""The same cases in every run; the variable, or ``python -m tests.fuzz``, tries others."""
CASES = 100
FEW = {"estimates": 25, "estimate-files": 25, "record-imports": 10, "record-databases": 10}
"""Cases of targets that take long each."""
PATIENT = 20.0
"""Seconds of the process's own time that a case may take here, on whatever machine; ``driver.SECONDS``, 2, is for a
quiet one. The longest, GPT-3's 96 layers and the changes that help, makes three reports of 4 to 6 seconds each on a
machine of a third of the usual speed."""


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_read_ends_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SECONDS", PATIENT)
    figures = Figures()
    for number, case in islice(driver.cases(TARGETS[name], SEED), FEW.get(name, CASES)):
        driver.try_one(TARGETS[name], SEED, number, case, figures)
    assert not figures.failures, f"seed {SEED}\n" + "\n".join(figures.failures)
    assert figures.refused < figures.cases, "every case is refused: none was read to its end"


def _forever(_: object) -> None:
    while True:
        pass


def _crash(_: object) -> None:
    raise IndexError("far out")


def _two_lines(_: object) -> None:
    raise LackingError("one\ntwo")


def _run(_: object) -> None:
    subprocess.run([sys.executable, "-c", ""], check=False)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (_forever, "does not end"),
        (_crash, "IndexError: far out"),
        (_two_lines, "in more than a line"),
        (_run, "runs something"),
    ],
)
def test_failures_are_seen(run: Callable[[object], None], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SECONDS", 0.05)
    figures = fuzz(Target("bad", lambda random: random.random(), run), 1, 60, most_failures=2)
    assert figures.cases == len(figures.failures) == 2
    assert says in figures.failures[0]
    assert "python -m tests.fuzz bad --seed 1 --case 0" in figures.failures[0]


def test_refusals_are_answers() -> None:
    def refuse(case: float) -> None:
        if case < 0.5:
            raise PlanError("", ABSENT, "no")

    figures = fuzz(Target("good", lambda random: random.random(), refuse), 1, 0.2)
    assert not figures.failures
    assert 0 < figures.refused < figures.cases
    assert str(figures.cases) in table({"good": figures})


def test_a_case_is_the_same_again() -> None:
    target = TARGETS["scripts"]
    again = [case for _, (_, case) in zip(range(3), driver.cases(target, 7), strict=False)]
    assert again == [next(driver.cases(target, 7, number))[1] for number in range(3)]
    assert Figures().cases == 0
