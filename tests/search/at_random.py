"""Candidates of a search, of which tests try some."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from memplan.search.search import Candidate, Search


def at_random(search: Search, random: Random) -> Iterator[Candidate]:
    """Each of them once. One of every group is first: who asks for few waits for few cuts."""
    rest: list[Candidate] = []
    for group in random.sample(search._groups, len(search._groups)):
        alike = list(search._with_cuts(group))
        if alike:
            yield alike.pop(random.randrange(len(alike)))
            rest += alike
    random.shuffle(rest)
    yield from rest
