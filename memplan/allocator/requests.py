"""What repeats in a sequence of requests, and whether free blocks serve it for certain, without looking for them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import eq, sub
from typing import Any

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


class Requests:
    """The requests of steps that give back all that they take: whether free blocks serve them for certain.

    Best fit serves a request from the smallest free block that is large enough. So while one of a size from u up to r
    is whole, a request of u makes no block of r or more smaller, unless it is put behind another one that did; and a
    request of r is served while one of r or more is whole. What counts is how many free blocks lie between the sizes
    of the requests: answers are remembered by these numbers.
    """

    __slots__ = ("known", "most", "order", "repeats", "sizes")

    def __init__(self, order: Sequence[int]) -> None:
        """``order``: where a request begins, the least code of a block that serves it; where one ends, its place among
        those that hold blocks, -1 of the latest."""
        self.sizes = sorted({code for code in order if code > 0})
        places = {size: place for place, size in enumerate(self.sizes)}
        self.order = [places.get(code, code) for code in order]
        """With places of sizes."""
        self.repeats = repeats(self.order)
        self.most = [0] * len(self.sizes)
        """So many blocks from each size on suffice for all that may lie in them."""
        live: list[int] = []
        for size in self._until_the_same(live):
            if size < 0:
                live.pop(size)
                continue
            live.append(size)
            for place in range(size, len(self.most)):
                held = sum([own <= place for own in live])
                self.most[place] = max(self.most[place], held)
        self.known: dict[tuple[int, ...], bool] = {}

    def _until_the_same(self, live: list[Any]) -> Iterator[int]:
        """The order, without what repeats once it begins with the same ``live`` as the time before."""
        for start, end, times in self.repeats:
            before = None
            for _ in range(times):
                if live == before:
                    break
                before = live[:]
                yield from self.order[start:end]

    def served(self, free: Sequence[int], changing: Collection[int] = ()) -> bool:
        """From the blocks ``free``, sorted, without those ``changing``: neighbours of blocks that are given back. What
        serves all requests serves the last ones of them."""
        sizes, enough = self.sizes, self.most[-1] + len(changing)
        if len(free) >= enough and free[-enough] >= sizes[-1]:
            return True  # as many serve every request as are held at once
        ends = [bisect_left(free, size) for size in sizes]
        ends.append(len(free))
        counts = [*map(sub, ends[1:], ends)]
        for code in changing:
            at = bisect_right(sizes, code) - 1
            if at >= 0:
                counts[at] -= 1
        key = (*map(min, counts, self.most),)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._suffice(key)
        return found

    def _suffice(self, counts: Sequence[int]) -> bool:
        """Whether so many free blocks from each size up to the next one do."""
        live: list[tuple[int, int]] = []
        """Of requests that hold blocks, the place of the size, and of one that the block was smaller than."""
        for size in self._until_the_same(live):
            if size < 0:
                reach = live.pop(size)[1]
                for other in range(len(live) + 1 + size, len(live)):
                    own, before = live[other]
                    if before < reach:  # it may lie behind the one that ends
                        live[other] = own, reach
                continue
            whole, below = counts[size], size + 1
            if whole <= len(live):
                behind = sorted([own for own, reach in live if reach > size])
                while whole <= bisect_left(behind, below):
                    if below == len(counts):
                        return False
                    whole += counts[below]
                    below += 1
            live.append((size, below))
        return True
