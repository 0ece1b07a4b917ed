"""The terms of ``pipeline.partition: type:EXPRESSION:WEIGHT|…``, which entries of a layer list match by their kinds.

DeepSpeed gives the expression to Python's ``re``, whose time can double with every character. What is written there is
part of a class's name, so the expressions are those of one pass: no groups, no counts.
"""

from __future__ import annotations

from functools import lru_cache

from ..bash.patterns import Matcher, simple_expression
from .errors import PlanError

FIELD = "pipeline.partition"
HEAVIEST = 1e6
"""The largest weight."""


@lru_cache(maxsize=64)
def type_terms(pattern: str) -> tuple[tuple[Matcher, float], ...]:
    """What each term of ``pattern`` finds, and its weight: 1 where it names none."""
    terms: list[tuple[Matcher, float]] = []
    for term in pattern.split("|"):
        expression, colon, weight = term.rpartition(":")
        if not colon:
            expression, weight = term, "1"
        try:
            matcher = simple_expression(expression)
        except ValueError as error:
            problem = f"{expression!r} is not a regular expression of characters, . [] * + ? ^ and $: {error}"
            raise PlanError(FIELD, f"type:{pattern}", problem) from None
        try:
            number = float(weight)
        except ValueError:
            number = -1.0
        if not 0 <= number <= HEAVIEST:
            problem = f"{weight!r} is not a weight from 0 to {HEAVIEST:,.0f}; write type:embed:2|transformer:1"
            raise PlanError(FIELD, f"type:{pattern}", problem)
        terms.append((matcher, number))
    return tuple(terms)
