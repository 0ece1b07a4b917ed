"""Texts from random numbers: changed ones, and ones that repeat something many times."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from collections.abc import Sequence
from random import Random

NUMBERS = ("0", "-1", "1", "2", "1e400", "-0.0", "NaN", "Infinity", "²", "٣", "1_000", "0x10", "010", "1e308", "99999999999",
           str(1 << 63), str(1 << 31), "9" * 400, "9" * 5000, "0-99999", "1.5", "true", "null", "", "~", "auto")  # fmt: skip
"""What stands where a number should be."""

BRACKETS = ("(", ")", "[", "]", "{", "}", "<", ">", "'", '"', "`", "$(", "$((", "${", "<(", "((", "[[", "]]", "))")
SIGNS = (
    *BRACKETS, "\\", "\\\\", "\n", "\r\n", "\t", " ", "  ", "#", "&", "*", "!", "|", "%", "@", ",", ":", "=", ".", "-", "--",
    "- ", "? ", "a", "a ", "a.", "a=", "a[", "a[ ", ";", ";;", "&&", "||", "~", "^", "+", "1", "1+", "1 && ", "\\a", "x\n",
    "x ", "\"\",", "[],", "{},", "\0", "\x1b", "\ufeff", "\u2028", "é", "😀", "\U000f0000", "<<A\n", "<<<", "---\n", "%TAG ! !x\n",
    "&a ", "*a ", "!!str ", "<<: ", "/", "../", "::", "$1", "$@", "${a[@]}", "0-9", ",0", "a*b", ".*", "(.*)*", "[a-z]*",
)  # fmt: skip
MOST_REPEATED = 300_000
"""Characters."""


def text(random: Random, signs: Sequence[str] = SIGNS, most: int = 30) -> str:
    """Some of ``signs`` one after the other."""
    return "".join(random.choice(signs) for _ in range(random.randrange(most)))


def repeated(random: Random, signs: Sequence[str] = SIGNS) -> str:
    """A few signs, thousands of times: what reading must not take the square of."""
    unit = "".join(random.choice(signs) for _ in range(random.choice((1, 1, 1, 2, 3)))) or "a"
    return unit * (int(MOST_REPEATED ** random.random()) // len(unit) + 1)


def mutated(random: Random, seed: str, signs: Sequence[str] = SIGNS, others: Sequence[str] = ()) -> str:
    """``seed`` changed in a few places."""
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        seed = _changed(random, seed, signs, others)
    return seed


def _changed(random: Random, seed: str, signs: Sequence[str], others: Sequence[str]) -> str:
    start, end = _span(random, seed)
    match random.randrange(11):
        case 0:
            return seed[:start] + seed[end:]
        case 1:
            return seed[:end] + seed[start:]
        case 2:
            return seed[:start] + random.choice(signs) + seed[start:]
        case 3:
            return seed[:start] + random.choice(signs) + seed[end:]
        case 4:
            return seed[:start] + repeated(random, signs) + seed[start:]
        case 5 | 6:
            return _with_another_number(random, seed, start)
        case 7:
            lines = seed.splitlines(keepends=True)
            random.shuffle(lines)
            return "".join(lines)
        case 8:
            return seed[:end] + (seed[start:end] * random.choice((2, 9, 99)))[:MOST_REPEATED] + seed[end:]
        case 9 if others:
            other = random.choice(others)
            first, last = _span(random, other)
            return seed[:start] + other[first:last] + seed[start:]
        case _:
            return seed[:start]


def _span(random: Random, seed: str) -> tuple[int, int]:
    start = random.randrange(len(seed) + 1)
    return start, min(len(seed), start + int(80 ** random.random()))


def _with_another_number(random: Random, seed: str, start: int) -> str:
    """The first number behind ``start`` replaced."""
    while start < len(seed) and not seed[start].isdigit():
        start += 1
    end = start
    while end < len(seed) and seed[end].isdigit():
        end += 1
    return seed[:start] + random.choice(NUMBERS) + seed[end:]
