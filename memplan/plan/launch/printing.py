"""What a few commands print that only repeat text: ``cat``, ``echo``, ``printf``, ``expr``, ``bc``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .arithmetic import ArithmeticTextError, evaluate
from .values import Piece, Value, is_known, joined, text


def printed(words: Sequence[Value], given: Value | None, files: Mapping[str, Value]) -> Value | None:
    """Standard output of the command ``words``, ``given`` on standard input; nothing if that cannot be said."""
    name, arguments = text(words[0]), words[1:]
    origin = words[0][0].origin
    if name in ("cat", "tee"):
        paths = [text(word) for word in arguments if not text(word).startswith("-")] if name == "cat" else []
        contents = [files.get(path) for path in paths] if paths else [given]
        if any(content is None for content in contents):
            return None
        return tuple(piece for content in contents for piece in content or ())
    if name == "echo":
        shown = list(arguments)
        while shown and re.fullmatch("-[neE]+", text(shown[0])):
            shown.pop(0)
        return (*joined(shown, " ", origin), Piece("\n", origin))
    if name == "printf":
        if len(arguments) == 1 and "%" not in text(arguments[0]):
            return arguments[0]
        if len(arguments) == 2 and text(arguments[0]) in ("%s", "%s\\n", "%d", "%d\\n"):
            return arguments[1]
        return None
    if name in ("expr", "bc"):
        expression = joined(arguments, " ", origin) if name == "expr" else given or ()
        return _calculated(expression, name)
    return None


def _calculated(expression: Value, name: str) -> Value | None:
    if not expression or not is_known(expression) or "scale" in text(expression):
        return None
    try:
        number = evaluate(text(expression).strip(), lambda _: None)
    except ArithmeticTextError:
        return None
    return None if number is None else (Piece(str(number), expression[0].origin),)
