"""Python's own parser, which is given no text that would take gigabytes."""

from __future__ import annotations

import ast
import re
import warnings

from ..values import pattern

MOST_PARTS = 200
"""Dots of a line with an import. The parser keeps every beginning of a dotted name (``_PyPegen_join_names_with_dot``,
``Parser/pegen.c``), so that one of n characters takes some n² / 4 bytes."""

_CONTINUED = pattern(r"\\(?:\r\n|\r|\n)")
_IMPORT = pattern(r"\b(?:from|import)\b")


def parsed_python(text: str) -> ast.Module:
    """The module in ``text``; ``SyntaxError`` where there is none, and for what memplan does not give the parser."""
    try:
        for line in re.split(r"[\r\n]", _CONTINUED.sub("", text)):
            if line.count(".") > MOST_PARTS and _IMPORT.search(line):
                raise SyntaxError(f"an import with more than {MOST_PARTS} dots")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "nested too deeply") from None
