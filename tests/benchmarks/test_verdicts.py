"""Verdicts beside what became of runs."""

from __future__ import annotations

from benchmarks.measured import READERS as MEASURED, plan_of
from benchmarks.verdicts import DIED, FAILED, OTHERS, RAN, READERS, Case, judged, page
from memplan.plan.plan import Plan


def gpt2(mbs: int) -> Plan:
    return plan_of(None, model="gpt2", layers=2, seq=512, framework="single", gpu="v100-16gb", mbs=mbs, gbs=mbs)


def test_every_verdict_is_held_against_what_became_of_the_run() -> None:
    small, large = (lambda: gpt2(1)), (lambda: gpt2(512))
    outcomes = [
        judged(Case("runs", identifier, became, plan))
        for identifier, became, plan in [
            ("a", RAN, small), ("b", DIED, large), ("c", RAN, large), ("d", FAILED, large), ("e", RAN, None)
        ]
    ]  # fmt: skip
    assert [one.right for one in outcomes] == [True, True, False, None, None]
    text = page(outcomes)
    assert "| runs | 5 | 4 | 2 | 1 | 3 does-not-fit, 1 fits |" in text
    assert "| c | ran | does-not-fit |" in text
    assert "not explained" in text
    assert "| a |" not in text


def test_a_plan_that_is_refused_is_not_judged() -> None:
    outcome = judged(Case("runs", "a", RAN, lambda: plan_of(None, model="gpt2", ep=2, framework="single")))
    assert (outcome.estimate, outcome.right, outcome.verdict) == (None, None, "not modelled")
    assert "ep" in page([outcome])


def test_every_file_of_measured_runs_is_read_or_named() -> None:
    assert MEASURED.keys() <= READERS.keys() | OTHERS.keys()
    assert not READERS.keys() & OTHERS.keys()
