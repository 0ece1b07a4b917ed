"""Patterns in one pass, beside Python's own matchers, which try one way after the other."""

from __future__ import annotations

import re
import time
from fnmatch import fnmatchcase, translate

import pytest
from hypothesis import given, settings, strategies as st

from memplan.bash.patterns import shell_pattern, simple_expression

GLOBS = st.lists(st.sampled_from(["a", "b", "?", "*", "[ab]", "[!a]", "[b-c]", "[", "]", "-", "!"]), max_size=7).map(
    "".join
)
ATOMS = ["a", "b", ".", "a*", "b+", "a?", "[ab]", "[^a]", "[b-c]+", ".*", ".*?", r"\.", r"\w", r"\d*"]
EXPRESSIONS = st.tuples(
    st.sampled_from(["", "^"]), st.lists(st.sampled_from(ATOMS), max_size=6).map("".join), st.sampled_from(["", "$"])
).map("".join)


@settings(max_examples=300, deadline=None)
@given(GLOBS, st.text("abc-[]!", max_size=8))
def test_shell_patterns(pattern: str, text: str) -> None:
    matcher = shell_pattern(pattern)
    assert matcher.matches(text) == fnmatchcase(text, pattern)
    whole = re.compile(translate(pattern))
    assert matcher.ends(text) == [end for end in range(len(text) + 1) if whole.match(text[:end])]
    starts = [
        start for start in range(len(text) + 1) if any(whole.match(text[start:e]) for e in range(start, len(text) + 1))
    ]
    assert matcher.starts(text) == starts
    assert matcher.backwards().matches(text[::-1]) == matcher.matches(text)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.text("abcAB.1", max_size=8))
def test_simple_expressions(expression: str, text: str) -> None:
    assert simple_expression(expression).matches(text) == bool(re.search(expression, text, re.IGNORECASE | re.ASCII))


@pytest.mark.parametrize("expression", ["(a)", "a{2}", "*a", "a**", "[a", "a\\", r"\b", "a^", "$a", "(.*)*x"])
def test_what_one_pass_cannot_read(expression: str) -> None:
    with pytest.raises(ValueError, match=r"is not read|is missing"):
        simple_expression(expression)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["a*", ".*", "a+", "[ab]*", "a?", "."]), max_size=60).map("".join))
def test_no_expression_takes_long(expression: str) -> None:
    began = time.process_time()
    simple_expression(f"{expression}x").matches("a" * 60)
    shell_pattern("*a" * 90 + "b").ends("a" * 2000)
    assert time.process_time() - began < 1
