"""What trying something led to: for tests of the rule that any input gives a result or one line."""

from __future__ import annotations

from collections.abc import Callable

from memplan.plan.errors import PlanError


def error_of(attempt: Callable[[], object]) -> str:
    """The line of the plan error that ``attempt`` ends in, empty where it succeeds; other errors pass through."""
    try:
        attempt()
    except PlanError as error:
        return str(error)
    return ""
