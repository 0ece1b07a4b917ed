"""Patterns matched in one pass over the text: what bash calls patterns (``*``, ``?``, ``[…]``), and simple expressions.

A matcher that tries one way after another can take time that grows with a power of the text, or doubles with every
character of it. Here the states that a pattern can be in are followed together, as bits of one number: the time is at
most that of reading the text once for every element of the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Test = Callable[[str], bool]

_CLASSES: dict[str, Test] = {
    "alpha": str.isalpha,
    "digit": lambda c: c in "0123456789",
    "alnum": str.isalnum,
    "upper": str.isupper,
    "lower": str.islower,
    "space": str.isspace,
    "blank": lambda c: c in " \t",
    "punct": lambda c: c.isascii() and c.isprintable() and not c.isalnum() and c != " ",
    "word": lambda c: c == "_" or c.isalnum(),
    "xdigit": lambda c: c in "0123456789abcdefABCDEF",
}


class Element(NamedTuple):
    """One character that passes ``test``: ``optional`` if it may be missing, ``repeated`` if more may follow."""

    test: Test
    optional: bool = False
    repeated: bool = False


def anything(_: str) -> bool:
    """Any character."""
    return True


ANY = Element(anything, optional=True, repeated=True)
"""``*`` of the shell, ``.*`` of an expression."""


def same(character: str) -> Test:
    """That character and no other."""
    return character.__eq__


class Matcher:
    """A sequence of elements. The state before element ``n`` is bit ``n``; the last bit says that all are matched."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self._elements = tuple(elements)
        self._steps: dict[tuple[int, str], int] = {}
        self._start = self._with_optional(1)
        self._done = 1 << len(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def matches(self, text: str) -> bool:
        """Whether the whole of ``text`` matches."""
        state = self._start
        for character in text:
            state = self._after(state, character)
            if not state:
                return False
        return bool(state & self._done)

    def ends(self, text: str, start: int = 0) -> list[int]:
        """Every position at which a match that begins at ``start`` ends, in order."""
        state, found = self._start, [start] if self._start & self._done else []
        for at in range(start, len(text)):
            state = self._after(state, text[at])
            if not state:
                break
            if state & self._done:
                found.append(at + 1)
        return found

    def backwards(self) -> Matcher:
        """What matches the reverse of every text that this matches."""
        return Matcher(self._elements[::-1])

    def starts(self, text: str) -> list[int]:
        """Every position at which some match begins, in order."""
        reverse = Matcher((ANY, *self._elements[::-1]))
        return [len(text) - end for end in reversed(reverse.ends(text[::-1]))]

    def _after(self, state: int, character: str) -> int:
        known = self._steps.get((state, character))
        if known is None:
            known = 0
            for n, element in enumerate(self._elements):
                if state >> n & 1 and element.test(character):
                    known |= (1 << n if element.repeated else 0) | 1 << n + 1
            known = self._steps[state, character] = self._with_optional(known)
        return known

    def _with_optional(self, state: int) -> int:
        for n, element in enumerate(self._elements):
            if element.optional and state >> n & 1:
                state |= 1 << n + 1
        return state


def shell_pattern(pattern: str) -> Matcher:
    """``*``, ``?`` and ``[…]`` as the shell means them; all else stands for itself."""
    elements: list[Element] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        match character:
            case "*":
                if not elements or elements[-1] is not ANY:
                    elements.append(ANY)
            case "?":
                elements.append(Element(anything))
            case "[" if (found := characters(pattern, at, "!^")) is not None:
                elements.append(Element(found[0]))
                at = found[1]
            case _:
                elements.append(Element(same(character)))
    return Matcher(elements)


def characters(pattern: str, at: int, negations: str, *, any_case: bool = False) -> tuple[Test, int] | None:
    """The test of ``[…]`` whose first character is at ``at``, and where it ends; nothing if it is not closed."""
    start = at
    negated = pattern[at : at + 1] != "" and pattern[at] in negations
    at += negated
    first, single, ranges, classes = at, set[str](), list[tuple[str, str]](), list[Test]()
    while at < len(pattern) and (pattern[at] != "]" or at == first):
        end = pattern.find(":]", at) if pattern.startswith("[:", at) else -1
        if end > 0 and pattern[at + 2 : end] in _CLASSES:
            classes.append(_CLASSES[pattern[at + 2 : end]])
            at = end + 2
        elif pattern[at + 1 : at + 2] == "-" and pattern[at + 2 : at + 3] not in ("]", ""):
            ranges.append((pattern[at], pattern[at + 2]))
            at += 3
        else:
            single.add(pattern[at])
            at += 1
    if at >= len(pattern) or at == start:
        return None

    def has(character: str) -> bool:
        return (
            character in single
            or any(low <= character <= high for low, high in ranges)
            or any(one(character) for one in classes)
        )

    return lambda one: (has(one) or (any_case and has(one.swapcase()))) is not negated, at + 1


_ESCAPES: dict[str, Test] = {
    "w": _CLASSES["word"],
    "d": _CLASSES["digit"],
    "s": _CLASSES["space"],
    "W": lambda c: not _CLASSES["word"](c),
    "D": lambda c: not _CLASSES["digit"](c),
    "S": lambda c: not _CLASSES["space"](c),
}


def simple_expression(text: str) -> Matcher:
    """What a regular expression of characters, ``.``, ``[…]``, ``*``, ``+``, ``?``, ``^`` and ``$`` finds anywhere in a
    text, whatever the case. ``ValueError`` says what is not read; groups and counts are not."""
    elements: list[Element] = [] if text.startswith("^") else [ANY]
    ends = text.endswith("$") and not text.endswith("\\$")
    at, end = int(text.startswith("^")), len(text) - ends
    while at < end:
        test, at = _atom(text, at)
        sign = text[at : at + 1] if at < end else ""
        if sign in ("*", "+", "?"):
            at += 1 + (text[at + 1 : at + 2] == "?")
        if sign == "+":
            elements.append(Element(test))
        elements.append(Element(test, optional=sign in ("*", "+", "?"), repeated=sign in ("*", "+")))
    return Matcher([*elements, *([] if ends else [ANY])])


def _atom(text: str, at: int) -> tuple[Test, int]:
    """The test of the character, ``.``, escape or ``[…]`` at ``at`` in either case, and where it ends."""
    character = text[at]
    if character in "(){}|*+?^$":
        raise ValueError(f"{character} at {at + 1} is not read")
    if character == ".":
        return anything, at + 1
    if character == "[":
        found = characters(text, at + 1, "^", any_case=True)
        if found is None:
            raise ValueError("a ] is missing")
        return found
    test = same(character)
    if character == "\\":
        at += 1
        escaped = text[at : at + 1]
        if escaped == "" or (escaped.isalnum() and escaped not in _ESCAPES):
            raise ValueError(f"\\{escaped} at {at} is not read")
        test, at = _ESCAPES.get(escaped, same(escaped)), at + 1
    else:
        at += 1
    return lambda one: test(one) or test(one.swapcase()), at
