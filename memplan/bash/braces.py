"""Brace expansion: ``a{b,c}`` is two words, ``{0..7}`` eight, before anything else in them is expanded.

Its rules are those of the section "Brace Expansion" of bash's manual: a brace counts where it is not quoted, and has a
comma of its own or two ends of a range, both numbers or both letters; any other stays as it is. One difference: bash
joins texts, so that ``$V{1,2}`` is ``$V1 $V2`` there; here it is ``${V}1 ${V}2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

from .budget import Budget
from .origin import ScriptError
from .syntax import Literal, Part, Word

_RANGE = re.compile(r"(?:(-?\d{1,9})\.\.(-?\d{1,9})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d{1,9}))?", re.ASCII)
_LONGEST = 40
"""Characters of a range."""
_DEEPEST = 50
_Sign: TypeAlias = "Part"
"""A character that is not quoted, as a literal of its own, or another part, whole."""


def braces_expanded(word: Word, budget: Budget, depth: int = 0) -> list[Word]:
    """The words that ``word`` is; ``ScriptError`` where braces stand in more than 50 others, or are too much work."""
    if not any(isinstance(part, Literal) and not part.quoted and "{" in part.text for part in word):
        return [word]
    if depth > _DEEPEST:
        raise ScriptError(f"has braces in more than {_DEEPEST} others", word[0].origin)
    signs = [*_signs(word)]
    budget.make(len(signs))
    closings, commas = _pairs(signs)
    found: list[list[Part]] = [[]]
    at = 0
    while at < len(signs):
        end = closings.get(at)
        several = [] if end is None else _alternatives(signs, at, end, commas[at], budget, depth)
        if several:
            budget.make(len(several) * sum(map(len, found)) + len(found) * sum(map(len, several)))
            found = [[*before, *one] for before in found for one in several]
            at = end or 0
        else:
            budget.make(len(found))
            for one in found:
                one.append(signs[at])
        at += 1
    return [*map(_joined, found)]


def _signs(word: Word) -> Iterator[_Sign]:
    for part in word:
        if isinstance(part, Literal) and not part.quoted:
            yield from (Literal(character, False, part.origin) for character in part.text)
        else:
            yield part


def _plain(sign: _Sign) -> str:
    return sign.text if isinstance(sign, Literal) and not sign.quoted else ""


def _pairs(signs: Sequence[_Sign]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Where the braces at each position close, and the commas that are theirs."""
    closings: dict[int, int] = {}
    commas: dict[int, list[int]] = {}
    opened: list[int] = []
    for at, sign in enumerate(signs):
        plain = _plain(sign)
        match plain:
            case "{":
                opened.append(at)
                commas[at] = []
            case "}" if opened:
                closings[opened.pop()] = at
            case "," if opened:
                commas[opened[-1]].append(at)
    return closings, commas


def _alternatives(
    signs: Sequence[_Sign], start: int, end: int, commas: Sequence[int], budget: Budget, depth: int
) -> list[Word]:
    """What stands between the braces at ``start`` and ``end``; nothing where they are no such braces."""
    if commas:
        ends = [start, *commas, end]
        several = (tuple(signs[a + 1 : b]) for a, b in pairwise(ends))
        return [one for part in several for one in braces_expanded(part, budget, depth + 1)]
    between = signs[start + 1 : end] if end - start < _LONGEST else []
    match = _RANGE.fullmatch("".join(map(_plain, between))) if all(map(_plain, between)) else None
    if match is None:
        return []
    origin = signs[start].origin
    first, last = (int(one) for one in match.group(1, 2)) if match[1] else (ord(one) for one in match.group(3, 4))
    step = abs(int(match[5] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    budget.make(len(numbers), origin=origin)
    if match[1] is None:
        return [(Literal(chr(number), False, origin),) for number in numbers]
    padded = any(re.match(r"-?0\d", one) for one in match.group(1, 2))
    width = max(map(len, match.group(1, 2))) if padded else 0
    return [(Literal(f"{number:0{width}d}" if width else str(number), False, origin),) for number in numbers]


def _joined(signs: Sequence[Part]) -> Word:
    """``signs`` with characters that follow each other in one literal."""
    parts: list[Part] = []
    for is_plain, group in groupby(signs, key=lambda sign: bool(_plain(sign))):
        same = [*group]
        parts += [Literal("".join(map(_plain, same)), False, same[0].origin)] if is_plain else same
    return tuple(parts)
