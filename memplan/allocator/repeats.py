"""What repeats in a sequence, as the layers of a model do in a pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import takewhile
from operator import eq

from ..values import NamedTuple

PROBE = 24
"""Elements by whose next occurrence a period is found."""
LEAST = 4
"""Periods in a row that are worth telling."""


class Repeat(NamedTuple):
    """A part of a sequence."""

    start: int
    end: int
    times: int
    """So often it comes in a row."""


def repeats(sequence: Iterable[Hashable]) -> tuple[Repeat, ...]:
    """The parts that ``sequence`` consists of, in order."""
    known: dict[Hashable, str] = {}
    text = "".join([known.get(one) or known.setdefault(one, chr(len(known))) for one in sequence])
    return tuple(_repeats(text, 0, len(text)))


def _repeats(text: str, start: int, end: int) -> Iterator[Repeat]:
    middle = (start + end) // 2
    again = text.find(text[middle : middle + PROBE], middle + 1, end) if end - start > LEAST * PROBE else -1
    if again < 0:
        if end > start:
            yield Repeat(start, end, 1)
        return
    period = again - middle
    before = _equal(text[start:middle][::-1], text[start : middle + period][::-1])
    behind = _equal(text[middle:end], text[middle + period : end])
    first, times = middle - before, (before + behind) // period + 1
    if times < LEAST:
        yield from _repeats(text, start, middle)
        yield from _repeats(text, middle, end)
        return
    last = first + times * period
    yield from _repeats(text, start, first)
    yield Repeat(first, first + period, times)
    yield from _repeats(text, last, end)


def _equal(one: str, other: str) -> int:
    """How many characters are equal from the first on."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))
