"""Steps in a row as stretches: those together that give back all they take, which free blocks may serve unrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise

from .blocks import SHIFT, Brief, Given, Step, Stretch
from .requests import Requests

NEVER = -1 << SHIFT
"""Fewer units than any peak."""
MOST_TOGETHER = 8
"""Blocks of a stretch that gives back what it takes: of more there are seldom enough free ones that serve."""
WORTHWHILE = 8
"""Steps that such a stretch must save: looking whether free blocks serve it takes as long as so many."""
FIRST_PART = 64
"""Steps of such a stretch that are run before looking again, at least, and half as many as it gives back blocks that
were there before, since each of those is looked at; then as many as were run so far, and so many more."""
LONGEST = 256
"""Steps from a request on among which the end of such a stretch is looked for."""
NONE = Given((), 0)


def stretches(steps: Sequence[Step], *, small: bool = False) -> tuple[Stretch, ...]:
    """``steps`` with those in a row together that give back all they take; ``small``: they are steps of small blocks,
    for whose peaks nobody looks, so that a few may become one."""
    if not steps:
        return ()
    whole = _stretch(steps)  # as backward is, for the most part
    if whole is not None:
        return (whole,)
    parts: list[list[int]] = []
    """Places where steps begin that belong together,"""
    closed: list[bool] = []
    """and whether they give back what they take."""
    ends, stays = _ends(steps)
    at = 0
    while at < len(steps):
        units = steps[at][1]
        end = _closed(steps, ends, stays[at], at) if units > 0 else None
        if not parts or (units >= 0 and closed[-1] is not (end is not None)):
            parts.append([])
            closed.append(end is not None)
        parts[-1].append(at)
        at = (at if end is None else end) + 1
    joined: list[Stretch | list[Step]] = []
    behind = [*(own[0] for own in parts[1:]), len(steps)]
    for own, last, together in zip(parts, behind, closed, strict=True):
        part = brief = [*steps[own[0] : last]]
        if together and small and len(own) < WORTHWHILE:
            brief = [*chain.from_iterable(_brief(steps[start:end]) for start, end in pairwise([*own, last]))]
        made = _stretch(part) if together and len(brief) >= WORTHWHILE else None
        if made is not None:
            joined.append(made)
        elif joined and isinstance(joined[-1], list):
            joined[-1] += brief
        else:
            joined.append(brief)
    return tuple([Stretch(((NONE, tuple(one)),)) if isinstance(one, list) else one for one in joined])


def _brief(steps: Sequence[Step]) -> Sequence[Step]:
    """Steps that give back what they take as one; as they are where they give back another block before their last
    request, which it may serve.

    A free block that is as large as all their requests together serves each of them: what lies behind those that it
    has served is as large as those to come.
    """
    taken: set[int] = set()
    others: list[int] = []
    for slot, units, _, _, _ in steps:
        if units > 0:
            if others:
                return steps
            taken.add(slot)
        elif units < 0 and slot not in taken:
            others.append(slot)
    order = order_of(steps)
    total = sum([code for code in order if code > 0])
    return [(0, 0, total, NEVER, Brief(tuple(steps), requests_of(order), tuple(others)))] if total else steps


def order_of(steps: Sequence[Step]) -> tuple[int, ...]:
    """As of ``Requests``: of the blocks that ``steps`` take and give back."""
    held: list[int] = []
    order: list[int] = []
    for slot, units, code, _, _ in steps:
        if units > 0:
            held.append(slot)
            order.append(code)
        elif slot in held:
            place = held.index(slot)
            order.append(place - len(held))
            del held[place]
    return tuple(order)


def _stretch(steps: Sequence[Step]) -> Stretch | None:
    """Of steps that give back what they take; ``None`` of others, and where it saves too little."""
    live: dict[int, int] = {}
    """Places where blocks were taken, by slot,"""
    held: list[int] = []
    """and in order."""
    order: list[int] = []
    given: list[tuple[int, int]] = []
    """Places where a block was taken, -1 before the first step, and is given back."""
    together = 0
    for at, (slot, units, code, _, _) in enumerate(steps):
        if units > 0:
            live[slot] = at
            held.append(at)
            order.append(code)
            if len(held) > together:
                together = len(held)
                if together > MOST_TOGETHER:
                    return None
        elif units:
            taken = live.pop(slot, -1)
            given.append((taken, at))
            if taken >= 0:
                place = held.index(taken)
                order.append(place - len(held))
                del held[place]
    if live or len(order) < WORTHWHILE:
        return None
    places, first = [0], max(FIRST_PART, (2 * len(given) - len(order)) // 2)
    while 2 * places[-1] + first < len(steps):
        places.append(2 * places[-1] + first)
    last, across = 0, list[tuple[int, int]]()
    """``given`` that were taken before one of ``places`` and end behind it."""
    for taken, at in given:
        while last + 1 < len(places) and places[last + 1] <= at:
            last += 1
        if taken < places[last]:
            across.append((taken, at))
    ended = [[steps[at] for taken, at in across if taken < place <= at] for place in places]
    left = [Given(tuple([step[0] for step in own]), -sum([step[1] for step in own])) for own in ended]
    ends = [*places[1:], len(steps)]
    parts = tuple([(one, tuple(steps[start:end])) for one, start, end in zip(left, places, ends, strict=True)])
    return Stretch(parts, together, requests_of(tuple(order)), max([step[3] for step in steps]))


requests_of = lru_cache(maxsize=1 << 10)(Requests)


def _ends(steps: Sequence[Step]) -> tuple[dict[int, int], list[int]]:
    """By the place of each step that takes a block which is given back later, the place where that happens; and for
    each place that of the next step, itself included, whose block stays."""
    found: dict[int, int] = {}
    given: dict[int, int] = {}
    last = len(steps)
    stays = [last] * last
    for at in reversed(range(len(steps))):
        slot, units, _, _, _ = steps[at]
        if units < 0:
            given[slot] = at
        elif units > 0 and slot in given:
            found[at] = given.pop(slot)
        else:
            last = at
        stays[at] = last
    return found, stays


def _closed(steps: Sequence[Step], ends: Mapping[int, int], stays: int, start: int) -> int | None:
    """Where the shortest stretch from ``start`` on ends that gives back what it takes; ``None`` where there is none:
    the first block that is taken and ``stays`` is taken at that place."""
    before = min(stays, start + LONGEST)
    at = end = start
    live: set[int] = set()
    while at <= end < before:
        slot, units, _, _, _ = steps[at]
        if units > 0:
            live.add(slot)
            if len(live) > MOST_TOGETHER:
                return None
            end = max(end, ends[at])
        else:
            live.discard(slot)
        at += 1
    return end if end < before else None
