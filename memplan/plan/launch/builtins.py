"""The shell's own commands that change what is read from a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from .conditions import Decision, tested
from .reading import ExitError, LeaveError
from .syntax import Evaluation, Literal, Simple
from .values import Cause, Unknown, Value, joined, text

if TYPE_CHECKING:
    from .shell import Shell


def _eval(shell: Shell, words: list[Value], command: Simple) -> Decision:
    return shell.follow(joined(words[1:], " ", command.origin), command.origin)


def _exec(shell: Shell, words: list[Value], command: Simple) -> Decision:
    if len(words) > 1:
        shell.start(words[1:], command)
    return True


def _set(shell: Shell, words: list[Value], command: Simple) -> Decision:
    for position, word in enumerate(words[1:], 1):
        if text(word) == "--":
            shell.variables.positional = words[position + 1 :]
            break
    return True


def _shift(shell: Shell, words: list[Value], command: Simple) -> Decision:
    count = text(words[1]) if len(words) > 1 else "1"
    left = len(shell.variables.positional)
    shell.variables.positional = shell.variables.positional[int(count) if count.isdigit() and len(count) < 9 else 1 :]
    return left > 0


def _unset(shell: Shell, words: list[Value], command: Simple) -> Decision:
    for word in words[1:]:
        shell.variables.values.pop(text(word), None)
    return True


def _test(shell: Shell, words: list[Value], command: Simple) -> Decision:
    arguments = words[1:-1] if text(words[0]) == "[" else words[1:]
    return tested(shell.expansion, arguments, command.origin)


def _read(shell: Shell, words: list[Value], command: Simple) -> Decision:
    """``read -r -d '' NAME <<EOF`` takes the whole here-document; anything else is unknown."""
    names = [text(word) for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", text(word))]
    content = shell.written.input_of(command.redirects)
    whole = any(text(word).startswith("-") and "d" in text(word) for word in words[1:])
    for name in names:
        known = content is not None and whole and len(names) == 1
        shown = f"{text(words[0])} {name}"
        unknown = shell.reading.ledger.value(Unknown(shown, name, Cause.COMMAND, command.origin))
        shell.variables.assign(name, _stripped(content) if known and content is not None else unknown)
    return True


def _stripped(content: Value) -> Value:
    """``content`` without blanks at its ends, as ``read`` leaves it."""
    pieces = list(content)
    while pieces and not (kept := pieces[0].text.lstrip(" \t\n")):
        pieces.pop(0)
    if pieces:
        pieces[0] = pieces[0]._replace(text=kept)
    while pieces and not (kept := pieces[-1].text.rstrip(" \t\n")):
        pieces.pop()
    if pieces:
        pieces[-1] = pieces[-1]._replace(text=kept)
    return tuple(pieces)


def _leave(shell: Shell, words: list[Value], command: Simple) -> Decision:
    name = text(words[0])
    raise ExitError if name == "exit" else LeaveError(name)


def _source(shell: Shell, words: list[Value], command: Simple) -> Decision:
    if len(words) > 1:
        shell.reading.sourced.append((shell.reading.ledger.shown(words[1]), command.origin))
    return True


def _let(shell: Shell, words: list[Value], command: Simple) -> Decision:
    decision: Decision = True
    for word in words[1:]:
        decision = shell.evaluate(Evaluation((Literal(text(word), True, command.origin),), command.origin))
    return decision


Builtin = Callable[["Shell", "list[Value]", Simple], Decision]

BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "eval": _eval,
        "exec": _exec,
        "set": _set,
        "shift": _shift,
        "unset": _unset,
        "[": _test,
        "test": _test,
        "read": _read,
        "mapfile": _read,
        "readarray": _read,
        "exit": _leave,
        "return": _leave,
        "break": _leave,
        "continue": _leave,
        "source": _source,
        ".": _source,
        "let": _let,
        "true": lambda shell, words, command: True,
        ":": lambda shell, words, command: True,
        "false": lambda shell, words, command: False,
        "getopts": lambda shell, words, command: False,
    }
)
"""What each does, by name; it gets the words of the command, its own first."""
