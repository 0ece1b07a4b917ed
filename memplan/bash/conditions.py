"""``[ … ]`` and ``[[ … ]]``: true, false or undecided, and what the branches of an undecided one would change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from .arithmetic import ArithmeticTextError, evaluate
from .expansion import Expansion
from .origin import Origin
from .syntax import (
    Assignment,
    Body,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Literal,
    Loop,
    Pipeline,
    Simple,
    Test,
    Word,
)
from .values import Cause, Unknown, Value, is_known, text

Decision: TypeAlias = "bool | Unknown"

_FILE_TESTS = frozenset("abcdefghkprstuwxGLNOS")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_DEEPEST = 40
_LONGEST_PATTERN = 200


def negated(decision: Decision) -> Decision:
    """The opposite, where there is one."""
    return decision if isinstance(decision, Unknown) else not decision


def tested(expansion: Expansion, values: list[Value], origin: Origin) -> Decision:
    """``test`` over the ``values`` of its arguments."""
    return _Reader(expansion, [(value, None) for value in values], origin, double=False).whole()


def tested_twice(expansion: Expansion, test: Test) -> Decision:
    """``[[ … ]]``, where the right-hand side of ``==`` is a pattern."""
    operands: list[tuple[Value, Word | None]] = [(expansion.one(word), word) for word in test.words]
    return _Reader(expansion, operands, test.origin, double=True).whole()


class _Reader:
    """Recursive descent over operands; a condition that cannot be read is one that cannot be decided."""

    def __init__(
        self, expansion: Expansion, operands: list[tuple[Value, Word | None]], origin: Origin, *, double: bool
    ) -> None:
        self._expansion = expansion
        self._operands = operands
        self._words = [text(value) if is_known(value) else None for value, _ in operands]
        self._at = 0
        self._depth = 0
        self._double = double
        shown = " ".join(expansion.variables.ledger.shown(value) for value, _ in operands)
        brackets = ("[[ ", " ]]") if double else ("[ ", " ]")
        shown = shown if len(shown) <= 50 else shown[:49] + "…"
        self._undecided = Unknown(f"{brackets[0]}{shown}{brackets[1]}", "", Cause.CONDITION, origin)

    def whole(self) -> Decision:
        if not self._operands:
            return False
        decision = self._either()
        return decision if self._at == len(self._operands) else self._cannot()

    def _cannot(self, *values: Value) -> Unknown:
        asks = [unknown.ask for value in values for unknown in self._expansion.variables.ledger.unknowns(value)]
        ask = next(filter(None, asks), "")
        return Unknown(self._undecided.shown, ask, Cause.CONDITION, self._undecided.origin)

    def _either(self) -> Decision:
        return self._joined("||" if self._double else "-o", self._both, True)

    def _both(self) -> Decision:
        return self._joined("&&" if self._double else "-a", self._negation, False)

    def _joined(self, operator: str, part: Callable[[], Decision], settles: bool) -> Decision:
        """Parts between ``operator``; one part that equals ``settles`` decides the whole."""
        decision = part()
        while self._takes(operator):
            other = part()
            if decision is settles or other is settles:
                decision = settles
            elif not isinstance(decision, Unknown):
                decision = other
        return decision

    def _negation(self) -> Decision:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._at = len(self._operands)
            return self._cannot()
        if self._takes("!"):
            return negated(self._negation())
        if self._takes("("):
            decision = self._either()
            self._takes(")")
            return decision
        decision = self._primary()
        self._depth -= 1
        return decision

    def _primary(self) -> Decision:
        left = self._operands[self._at :]
        if not left:
            return self._cannot()
        operator = self._words[self._at + 1] if len(left) > 2 else None
        if operator is not None and (operator in _NUMBERS or operator in ("=", "==", "!=", "<", ">", "=~")):
            self._at += 3
            return self._binary(left[0][0], operator, left[2])
        first = self._words[self._at]
        if first is not None and re.fullmatch(r"-[a-zA-Z]", first) and len(left) > 1:
            self._at += 2
            return self._unary(first[1], left[1][0])
        self._at += 1
        return self._filled(left[0][0])

    def _filled(self, value: Value) -> Decision:
        if self._expansion.is_empty(value):
            return False
        known = [piece for piece in value if piece.text and is_known((piece,))]
        return True if known or is_known(value) else self._cannot(value)

    def _unary(self, letter: str, value: Value) -> Decision:
        if letter == "n":
            return self._filled(value)
        if letter == "z":
            return negated(self._filled(value))
        if letter == "v" and is_known(value):
            return self._expansion.variables.items(text(value)) is not None
        return self._cannot(value) if letter not in _FILE_TESTS else self._cannot()

    def _binary(self, left: Value, operator: str, right: tuple[Value, Word | None]) -> Decision:
        value, word = right
        if operator in _NUMBERS:
            return self._numbers(left, operator, value)
        if operator in ("<", ">", "=~"):
            if is_known(left) and is_known(value) and operator != "=~":
                return (text(left) < text(value)) == (operator == "<")
            return self._cannot(left, value)
        if not (is_known(left) and is_known(value)):
            both_empty = self._expansion.is_empty(left) and self._expansion.is_empty(value)
            return operator != "!=" if both_empty else self._cannot(left, value)
        pattern = self._expansion.pattern(word) if self._double and word is not None else None
        if pattern is not None and any(sign in pattern for sign in "*?["):
            if len(pattern) > _LONGEST_PATTERN or len(text(left)) > 10_000:
                return self._cannot(left, value)
            equal = fnmatchcase(text(left), pattern)
        else:
            equal = text(left) == text(value)
        return equal == (operator != "!=")

    def _numbers(self, left: Value, operator: str, right: Value) -> Decision:
        if not (is_known(left) and is_known(right)):
            return self._cannot(left, right)
        try:
            values = [evaluate(text(value), lambda _: None) for value in (left, right)]
        except ArithmeticTextError:
            return self._cannot()
        if values[0] is None or values[1] is None:
            return self._cannot()
        return _NUMBERS[operator](values[0], values[1])

    def _takes(self, word: str) -> bool:
        if self._at >= len(self._words) or self._words[self._at] != word:
            return False
        operand = self._operands[self._at][1]
        if operand is not None and not (len(operand) == 1 and isinstance(operand[0], Literal)):
            return False
        self._at += 1
        return True


_OPTION = re.compile(r"--[A-Za-z][\w-]*")


def assigned_in(bodies: Iterable[Body], functions: Mapping[str, Body]) -> dict[str, bool]:
    """Names that ``bodies`` may set, and whether all they do is to append."""
    found: dict[str, bool] = {}
    for name, appends in _assigned(bodies, dict(functions)):
        found[name] = found.get(name, True) and appends
    return found


def options_in(bodies: Iterable[Body], name: str) -> tuple[str, ...]:
    """Arguments (``--…``) in the values that ``bodies`` may give to ``name``."""
    found: dict[str, None] = {}
    for assignment in _assignments(bodies):
        if assignment.name == name:
            words = [assignment.value, *(word for _, word in assignment.items or ())]
            for word in words:
                for part in word:
                    if isinstance(part, Literal):
                        found.update(dict.fromkeys(_OPTION.findall(part.text)))
    return tuple(found)


def _assigned(bodies: Iterable[Body], functions: dict[str, Body]) -> Iterator[tuple[str, bool]]:
    for command in _commands(bodies):
        if isinstance(command, For):
            yield command.name, False
        if isinstance(command, Simple):
            for assignment in command.assignments:
                yield assignment.name, assignment.append
            called = command.words[0] if command.words else ()
            if len(called) == 1 and isinstance(called[0], Literal):
                if called[0].text in functions:
                    yield from _assigned([functions.pop(called[0].text)], functions)
                if called[0].text == "read":
                    last = command.words[-1][-1] if command.words[-1] else None
                    if isinstance(last, Literal):
                        yield last.text, False


def _assignments(bodies: Iterable[Body]) -> Iterator[Assignment]:
    for command in _commands(bodies):
        if isinstance(command, Simple):
            yield from command.assignments


def _commands(bodies: Iterable[Body]) -> Iterator[Command]:
    """Every command in ``bodies`` and below."""
    for body in bodies:
        for command in body:
            yield command
            yield from _commands(_inside(command))


def _inside(command: Command) -> list[Body]:
    match command:
        case If():
            return [body for arm in command.arms for body in arm]
        case Loop():
            return [command.condition, command.body]
        case For() | Group() | Function():
            return [command.body]
        case Case():
            return [body for _, body in command.arms]
        case Pipeline():
            return [command.commands]
        case Chain():
            return [(command.first, *(other for _, other in command.rest))]
    return []
