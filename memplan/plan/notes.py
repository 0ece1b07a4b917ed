"""What a user is told about a plan that is valid and might still not be what was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .environment import READ, is_followed, is_irrelevant
from .errors import nearest, one_line, shown
from .plan import Plan

LONGEST_IN_SILENCE = 8192
"""Tokens that a sequence may have by default without a word."""

FRAMEWORK_CHOSEN = "framework-chosen"
"""Code of the note on a plan that names no framework."""


class Note(NamedTuple):
    """A stable ``code`` for scripts, and a ``message`` that teaches."""

    code: str
    message: str


def notes_of(plan: Plan) -> tuple[Note, ...]:
    """Notes on ``plan`` as it was read, before defaults are filled in."""
    return (*_environment(plan), *_sequence(plan))


def _environment(plan: Plan) -> Iterator[Note]:
    """Variables that change nothing in the estimate."""
    for name in plan.environment:
        if is_followed(name, plan) or is_irrelevant(name):
            continue
        guess = nearest(name, READ, cutoff=0.85)
        problem = f"is not read by memplan; did you mean {guess}?" if guess else "is not modelled"
        yield Note("environment-ignored", one_line(f"{shown(name)} {problem}"))


def _sequence(plan: Plan) -> Iterator[Note]:
    """A default that makes the estimate far larger than a job usually is."""
    longest = plan.model.positions_max
    if plan.batch.seq is None and longest > LONGEST_IN_SILENCE:
        yield Note("seq-default", f"seq defaults to the model's longest, {longest} tokens")
