"""Variants beside the first plan (``memplan/report/stages.py``)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from memplan.report.stages import by_category, by_stage, print_comparison
from memplan.result import Estimate
from memplan.tape.events import Category

from .fabricated import GIB, bigscience, lighter, single
from .printing import printed, widest
from .strategies import estimates

BASE = bigscience()
EIGHT_BIT = lighter(BASE, of=Category.OPTIMIZER_STATES, by=6 * GIB)
ADAPTIVE = lighter(BASE, of=Category.LOGITS, by=11 * GIB)


def compared(names: list[str], variants: list[Estimate], width: int = 80) -> str:
    return printed(lambda console: print_comparison(names, variants, console), width)


def test_each_variant_says_what_it_saves_and_where() -> None:
    text = compared(["adam", "adam8bit", "adaptive"], [BASE, EIGHT_BIT, ADAPTIVE])
    lines = [line.split() for line in text.splitlines()]
    assert ["adam", "does", "not", "fit", "31", "33.09", "device", "−1.34"] in lines
    assert ["adam8bit", "fits", "31", "27.09", "device", "4.66", "−6.00"] in lines
    assert "adam8bit: saves 6.00 GiB at the peak" in text
    assert "  stage 31  optimizer states −6.00" in text
    assert "  by stage  0–31: −6.00" in text
    assert "  by stage  0–30: 0, 31: −11.00" in text
    assert widest(text) <= 80


def test_a_warning_is_told_once() -> None:
    text = compared(["adam", "adam8bit"], [BASE, EIGHT_BIT])
    assert text.count("tied-head-far") == 1


def test_a_variant_that_needs_more_says_so() -> None:
    text = compared(["adam8bit", "adam"], [EIGHT_BIT, BASE])
    assert "adam: needs 6.00 GiB more at the peak" in text


def test_where_the_peak_moves_both_stages_are_explained() -> None:
    text = compared(["base", "lighter"], [BASE, lighter(BASE, of=Category.LOGITS, by=13 * GIB)])
    assert "  stage 31  logits −13.00" in text
    moved = replace(BASE, stages=(replace(BASE.stages[0], device=40 * GIB), *BASE.stages[1:]))
    text = compared(["base", "moved"], [BASE, moved])
    assert "  stage 31  no change" in text
    assert "  stage 0 " in text


def test_pipelines_of_different_lengths_compare_their_peaks() -> None:
    text = compared(["pp=32", "single"], [BASE, single()])
    assert "stage 31 → 0" in text
    assert "by stage" not in text


@settings(deadline=None, max_examples=40)
@given(st.lists(estimates(), min_size=1, max_size=4), st.integers(60, 200))
def test_any_variants_render_within_any_width(variants: list[Estimate], width: int) -> None:
    """The table's figures take up to 80 columns, and are not cut where a terminal has fewer."""
    names = [f"optimizer=adam8bit,variant={index}" for index in range(len(variants))]
    assert widest(compared(names, variants, width)) <= max(width, 80)


@given(estimates(), estimates())
def test_the_categories_differences_sum_to_the_headlines(before: Estimate, after: Estimate) -> None:
    old, new = before.stages[0], after.stages[0]
    assert sum(change.size for change in by_category(old, new)) == new.headline - old.headline


@given(estimates())
def test_an_estimate_does_not_differ_from_itself(estimate: Estimate) -> None:
    assert {change.size for change in by_stage(estimate, estimate)} == {0}
    assert all(change.size == 0 for change in by_category(estimate.stages[0], estimate.stages[0]))
