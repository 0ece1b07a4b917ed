"""The line of a report beside the timeline, which knows every tensor by name."""

from __future__ import annotations

import pytest

from memplan.allocator.timeline import Level
from memplan.estimate import estimate, lines, timelines
from memplan.plan.read import read_plan
from tests.allocator.test_timeline import PLANS, SMALL


@pytest.mark.parametrize("case", PLANS)
def test_a_line_has_the_timeline_s_sums(case: str) -> None:
    """Of every stage the same moments, each the sum of what is live then by category."""
    found = estimate(read_plan(None, {**SMALL, **PLANS[case]}).plan)
    stages = range(len(found.stages))
    for line, whole in zip(lines(found, stages), timelines(found, contents=False), strict=True):
        assert list(line.points) == [Level(one.event, sum(one.by), one.phase) for one in whole.points]
        assert (line.stage, line.events) == (whole.stage, whole.events)
        assert (line.shown, line.microbatches) == (whole.shown, whole.microbatches)
