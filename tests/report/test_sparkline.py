"""A stage over one iteration in a line of the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from memplan.estimate import estimate, lines
from memplan.plan.read import read_plan
from memplan.report.estimate import print_estimate
from memplan.report.names import size
from memplan.report.printing import put
from memplan.report.stages import LEVELS, drawn_lines
from tests.report.printing import printed

GPT2 = {"model": "gpt2", "framework": "single", "seq": "256", "gbs": "2"}


def lines_of(width: int, **flags: str) -> tuple[Any, list[str]]:
    found = estimate(read_plan(None, {**GPT2, **flags}).plan)
    (line,) = lines(found, (found.peak_stage,))
    text = printed(lambda console: put(console, *drawn_lines(found, (line,), console)), width)
    return line, text.splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_line_is_as_long_as_there_is_room_and_reaches_the_top_once(width: int) -> None:
    line, shown = lines_of(width)
    bars, phases = shown[-2:]
    assert set(bars) <= set(LEVELS)
    assert cell_len(bars) == min(width, 100)
    assert LEVELS[-1] in bars
    # The fullest moment of all is where the bars are highest.
    top = max(line.points, key=lambda level: level.bytes)
    assert bars[(top.event - 1) * len(bars) // line.events] == LEVELS[-1]
    assert width < 80 or phases.split() == ["forward", "backward", "forward", "backward", "step"]


def test_it_says_what_the_least_and_the_most_are() -> None:
    line, shown = lines_of(120)
    totals = [level.bytes for level in line.points]
    assert shown[0] == f"Over one iteration: live tensors, {size(min(totals))} to {size(max(totals))}"
    _, of_many = lines_of(120, gbs="64")
    assert of_many[0].endswith("3 of 64 micro-batches, which the others repeat")


def test_the_report_has_it_and_quiet_has_not() -> None:
    found = estimate(read_plan(None, GPT2).plan)
    drawn = tuple(lines(found, (found.peak_stage,)))
    assert "Over one iteration" in printed(lambda console: print_estimate(found, console, lines=drawn), 80)
    quiet = printed(lambda console: print_estimate(found, console, quiet=True, lines=drawn), 80)
    assert len(quiet.splitlines()) == 1
