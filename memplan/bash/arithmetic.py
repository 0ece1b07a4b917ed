"""The whole numbers of ``$((…))``: bash's operators on 64 bits."""

from __future__ import annotations

import operator as operators
import re
from collections.abc import Callable

from .origin import Budget

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^!~?:(),])", re.ASCII
)
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_DEEPEST = 40
_LONGEST = 10_000
_STEPS = 80
"""Of a token."""

Lookup = Callable[[str], "int | None"]


class ArithmeticTextError(ValueError):
    """The text is not arithmetic, or divides by zero."""


def evaluate(text: str, lookup: Lookup, budget: Budget) -> int | None:
    """The value of ``text``; nothing if it needs a variable that ``lookup`` does not know."""
    if len(text) > _LONGEST:
        raise ArithmeticTextError("is too long")
    tokens: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        budget.spend(_STEPS)
        match = _TOKEN.match(text, at)
        if match is None:
            raise ArithmeticTextError("has a sign that is not arithmetic's")
        tokens.append(match[1])
        at = match.end()
    if not tokens:
        return 0
    reader = _Reader(tokens, lookup)
    value = reader.comma()
    if reader.at < len(tokens):
        raise ArithmeticTextError(f"has an unexpected {tokens[reader.at]}")
    return value


class _Reader:
    """Precedence climbing over ``tokens``; an operand that is not known makes the result not known."""

    def __init__(self, tokens: list[str], lookup: Lookup) -> None:
        self.tokens = tokens
        self.at = 0
        self._lookup = lookup
        self._depth = 0

    def comma(self) -> int | None:
        value = self._choice()
        while self._take(","):
            value = self._choice()
        return value

    def _choice(self) -> int | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ArithmeticTextError("is nested too deeply")
        condition = self._binary(0)
        if self._take("?"):
            yes = self._choice()
            if not self._take(":"):
                raise ArithmeticTextError("lacks a :")
            no = self._choice()
            condition = None if condition is None else yes if condition else no
        self._depth -= 1
        return condition

    def _binary(self, level: int) -> int | None:
        if level == len(_BINARY):
            return self._power()
        left = self._binary(level + 1)
        while self.at < len(self.tokens) and self.tokens[self.at] in _BINARY[level]:
            operator = self.tokens[self.at]
            self.at += 1
            left = _applied(operator, left, self._binary(level + 1))
        return left

    def _power(self) -> int | None:
        base = self._unary()
        if not self._take("**"):
            return base
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ArithmeticTextError("is nested too deeply")
        exponent = self._power()
        self._depth -= 1
        if base is None or exponent is None:
            return None
        if exponent < 0:
            raise ArithmeticTextError("has a negative exponent")
        return _wrapped(pow(base, exponent, 1 << 64))

    def _unary(self) -> int | None:
        signs = []
        while self.at < len(self.tokens) and self.tokens[self.at] in "+-!~":
            signs.append(self.tokens[self.at])
            self.at += 1
        value = self._operand()
        for sign in reversed(signs):
            if value is not None:
                value = {"+": value, "-": -value, "!": int(not value), "~": ~value}[sign]
        return value

    def _operand(self) -> int | None:
        if self.at >= len(self.tokens):
            raise ArithmeticTextError("ends where a number should be")
        token = self.tokens[self.at]
        self.at += 1
        if token == "(":
            value = self.comma()
            if not self._take(")"):
                raise ArithmeticTextError("lacks a )")
            return value
        if token[0].isdigit():
            return number(token)
        if token[0].isalpha() or token[0] == "_":
            return self._lookup(token)
        raise ArithmeticTextError(f"has an unexpected {token}")

    def _take(self, token: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at += 1
            return True
        return False


def number(token: str) -> int:
    """A number as bash reads it: ``0x…`` is hexadecimal, a leading zero octal."""
    try:
        if token[:2] in ("0x", "0X"):
            return _wrapped(int(token, 16))
        return _wrapped(int(token, 8 if token.startswith("0") and len(token) > 1 else 10))
    except ValueError:
        raise ArithmeticTextError(f"has {token[:20]}, which is not a number") from None


def _applied(operator: str, left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return None
    if operator in ("/", "%"):
        if right == 0:
            raise ArithmeticTextError("divides by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return _wrapped(quotient if operator == "/" else left - quotient * right)
    return _wrapped(int(_APPLIED[operator](left, right)))


_APPLIED: dict[str, Callable[[int, int], int]] = {
    "||": lambda left, right: bool(left or right),
    "&&": lambda left, right: bool(left and right),
    "|": operators.or_,
    "^": operators.xor,
    "&": operators.and_,
    "==": operators.eq,
    "!=": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
    "<<": lambda left, right: left << right % 64,
    ">>": lambda left, right: left >> right % 64,
    "+": operators.add,
    "-": operators.sub,
    "*": operators.mul,
}


def _wrapped(value: int) -> int:
    """``value`` on 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
