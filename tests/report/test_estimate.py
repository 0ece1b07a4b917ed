"""What ``memplan estimate`` prints (``memplan/report/estimate.py`` and ``stages.py``)."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from memplan.report.estimate import print_estimate, verdict
from memplan.report.printing import BEYOND_COLOURS, COLOURS, FILLED, LIMIT, Share, bar, shares
from memplan.result import Estimate
from memplan.tape.events import Category

from .fabricated import GIB, MIB, bigscience, fitting, judged_by_size, single
from .printing import ANSI, printed, widest
from .strategies import estimates


def shown(estimate: Estimate, width: int = 80, *, colour: bool = False, verbose: bool = False) -> str:
    return printed(lambda console: print_estimate(estimate, console, verbose=verbose), width, colour=colour)


# The verdict ------------------------------------------------------------------------------------


def test_the_verdict_names_stage_need_capacity_and_cause() -> None:
    assert verdict(bigscience()).plain == (
        "Does not fit: stage 31 needs 33.09 GiB of 31.75 GiB on v100-32gb, 1.34 GiB too much — "
        "logits_fp32 in float16_to_fp32, forward"
    )


def test_what_fits_says_what_is_left() -> None:
    text = verdict(fitting()).plain
    assert text == "Fits: stage 31 needs most, 21.10 GiB of 31.75 GiB on v100-32gb; 10.64 GiB free"


def test_without_a_gpu_there_is_no_verdict_but_a_need() -> None:
    text = verdict(single()).plain
    assert text == "No GPU named: the GPU needs at least 448 MiB (requested) — optimizer, step"


def test_headroom_is_named_and_every_failing_stage_counted() -> None:
    text = verdict(judged_by_size(replace(bigscience(), headroom=14 * GIB))).plain
    assert "of 31.75 GiB less 14.00 GiB headroom on v100-32gb" in text
    assert text.endswith("; 2 of 32 stages are over")


def test_quiet_prints_the_verdict_alone() -> None:
    text = printed(lambda console: print_estimate(bigscience(), console, quiet=True), 60)
    assert text.splitlines() == [verdict(bigscience()).plain]


# The whole report -------------------------------------------------------------------------------


def test_at_80_columns_every_figure_of_the_table_is_there() -> None:
    text = shown(bigscience())
    assert text.startswith("Does not fit: stage 31 needs 33.09 GiB of 31.75 GiB on v100-32gb")
    for figure in ("1.13 B", "808 M", "16.84", "20.71", "11.04", "16.81", "15.54", "33.09", "−1.34", "124–127", "1–30"):
        assert figure in text
    assert "…" not in text
    assert widest(text) <= 80


def test_at_160_columns_a_row_takes_one_line() -> None:
    row = next(line for line in shown(bigscience(), 160).splitlines() if line.startswith(" 1–30"))
    for cell in ("4–123", "layers 1–60, 2 each", "808 M", "12.04", "15.54–16.81", "14.94–16.21", "scores in layer.*"):
        assert cell in row


def test_the_ledger_adds_up_from_categories_to_the_device() -> None:
    lines = shown(bigscience()).splitlines()
    start = next(index for index, line in enumerate(lines) if line.split()[:1] == ["for"])
    totals: dict[str, float] = {}
    added = 0.0
    for line in lines[start + 1 : lines.index("", start)]:
        *name, figure, _ = line.split()
        if name[0] == "=":
            totals[name[1]] = float(figure)
            assert added == pytest.approx(float(figure), abs=0.005 * 13)
        else:
            added += float(figure)
    assert list(totals) == ["allocated", "reserved", "device"]
    assert totals["device"] == 33.09


def test_readings_moments_warnings_and_assumptions_are_shown() -> None:
    text = shown(bigscience())
    assert "readings  requested  allocated  reserved  device" in text
    assert "moments   initialisation  steady  evaluation  checkpoint" in text
    assert "padded-vocabulary" in text
    assert "Assumed (2 more with -v)" in text
    assert "apex FusedAdam" not in text


def test_verbose_shows_every_stage_reading_and_assumption() -> None:
    text = shown(bigscience(), verbose=True)
    assert "apex FusedAdam" in text
    assert "in flight" in text
    assert all(any(line.split()[:1] == [str(stage)] for line in text.splitlines()) for stage in range(32))


def test_what_is_not_known_is_a_question_mark() -> None:
    assert "MiB           448.4          ?         ?       ?" in shown(single())


def test_a_pipe_gets_no_colours_bars_or_blanks_at_the_end() -> None:
    text = shown(bigscience())
    assert "\x1b" not in text
    assert FILLED not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_colour_terminal_gets_bars_at_every_width() -> None:
    for width in (80, 120, 160, 200):
        text = shown(bigscience(), width, colour=True)
        assert ANSI.sub("", text).count(FILLED) > 40
        assert widest(text) <= width
    assert shown(bigscience(), 160, colour=True).count(LIMIT) == 3


def test_colours_change_nothing_but_colours() -> None:
    coloured = ANSI.sub("", shown(bigscience(), 100, colour=True))
    for line in shown(bigscience(), 100).splitlines():
        assert line in coloured or line.strip() in coloured


def test_an_ascii_pipe_gets_ascii() -> None:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii", write_through=True)
    print_estimate(bigscience(), Console(file=file, width=80, _environ={}))
    text = buffer.getvalue().decode("ascii")
    assert "1-30" in text
    assert "-1.34" in text
    assert widest(text) <= 80


@settings(deadline=None, max_examples=60)
@given(estimates(), st.integers(60, 200), st.booleans(), st.booleans())
def test_any_estimate_renders_within_any_width(estimate: Estimate, width: int, colour: bool, verbose: bool) -> None:
    text = shown(estimate, width, colour=colour, verbose=verbose)
    assert widest(text) <= width
    assert ("\x1b" in text) <= colour


# Bars and colours -------------------------------------------------------------------------------


def test_every_category_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(Category)
    assert len({*COLOURS.values(), *BEYOND_COLOURS.values()}) == len(COLOURS) + len(BEYOND_COLOURS)


@given(estimates())
def test_the_parts_of_a_stage_sum_to_its_headline(estimate: Estimate) -> None:
    for stage in estimate.stages:
        assert sum(share.size for share in shares(stage)) == stage.headline


@given(st.lists(st.integers(1, 2**36), max_size=8), st.integers(1, 2**38), st.integers(1, 80))
def test_a_bar_is_as_long_as_its_bytes(sizes: list[int], limit: int, width: int) -> None:
    parts = [Share(Category(index).key, size) for index, size in enumerate(sizes)]
    scale = max(limit, sum(sizes))
    text = bar(parts, scale, width, limit).plain
    assert len(text) == width
    assert text.count(LIMIT) == 1
    assert abs(text.count(FILLED) - sum(sizes) * width / scale) <= 1.5


def test_a_bar_shows_each_part_in_its_colour() -> None:
    text = bar([Share("parameters", 20 * MIB), Share("logits", 30 * MIB)], 100 * MIB, 10)
    assert text.plain == FILLED * 5 + " " * 5
    colours = [str(span.style) for span in text.spans]
    assert colours[:5] == [COLOURS[Category.PARAMETERS]] * 2 + [COLOURS[Category.LOGITS]] * 3
