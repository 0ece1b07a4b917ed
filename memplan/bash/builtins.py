"""The shell's own commands that change what is read, and the text that a script writes by itself.

Files made of here-documents, and what ``$(…)`` prints where nothing need be run: ``cat``, ``echo``, ``printf``,
``expr`` and ``bc``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from .arithmetic import ArithmeticTextError, evaluate
from .conditions import Decision, tested
from .expansion import Expansion
from .origin import Budget
from .syntax import Body, Chain, Command, Evaluation, Group, Literal, Pipeline, Redirect, Simple
from .values import (
    Cause,
    ExitError,
    LeaveError,
    Piece,
    Reading,
    Unknown,
    Value,
    Variables,
    is_known,
    is_position,
    joined,
    text,
)

if TYPE_CHECKING:
    from .shell import Shell


def _eval(shell: Shell, words: list[Value], command: Simple) -> Decision:
    return shell.follow(joined(words[1:], " ", command.origin), command.origin)


def _exec(shell: Shell, words: list[Value], command: Simple) -> Decision:
    if len(words) > 1:
        shell.starting.start(words[1:], command)
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
    shell.variables.positional = shell.variables.positional[int(count) if is_position(count) else 1 :]
    return left > 0


def _unset(shell: Shell, words: list[Value], command: Simple) -> Decision:
    for word in words[1:]:
        shell.variables.values.pop(text(word), None)
    return True


def _test(shell: Shell, words: list[Value], command: Simple) -> Decision:
    arguments = words[1:-1] if text(words[0]) == "[" else words[1:]
    return tested(shell.expansion, arguments, command.origin)


def _read(shell: Shell, words: list[Value], command: Simple) -> Decision:
    """``read -r -d '' NAME <<EOF`` takes the whole here-document, ``IFS=, read -r TP PP <<< "$SIZES"`` a line's words;
    anything else is unknown."""
    names = [text(word) for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", text(word))]
    content = shell.written.input_of(command.redirects)
    whole = any(text(word).startswith("-") and "d" in text(word) for word in words[1:])
    plain = text(words[0]) == "read" and [text(word) for word in words[1:]] in (names, ["-r", *names])
    if plain and names and content and is_known(content):
        between = next((shell.expansion.one(one.value) for one in command.assignments if one.name == "IFS"), None)
        between = between if between is not None else shell.variables.scalar("IFS")
        line = text(content).partition("\n")[0]
        fields = _words_of_line(line, text(between) if between is not None else " \t", len(names))
        for name, field in zip(names, fields, strict=True):
            shell.variables.assign(name, (content[0]._replace(text=field),))
        return True
    for name in names:
        known = content is not None and whole and len(names) == 1
        shown = f"{text(words[0])} {name}"
        unknown = shell.reading.ledger.value(Unknown(shown, name, Cause.COMMAND, command.origin))
        shell.variables.assign(name, _stripped(content) if known and content is not None else unknown)
    return True


def _words_of_line(line: str, between: str, count: int) -> list[str]:
    """``count`` fields of ``line``, the last with all that is left."""
    blank = not between.strip(" \t\n")
    fields = line.split(None, count - 1) if blank else re.split(f"[{re.escape(between)}]", line, maxsplit=count - 1)
    return [one.strip(" \t") if blank else one for one in fields] + [""] * (count - len(fields))


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
    if len(words) > 1 and not shell.source(words[1:]):
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
"""Functions by command name; each gets the words of the command, its own name first."""


class Written:
    """Files and outputs that the script itself writes; ``expansion`` reads them, too."""

    def __init__(self, variables: Variables, reading: Reading) -> None:
        self._reading, self._variables = reading, variables
        self.expansion = Expansion(variables, self.printed)
        self.functions: Mapping[str, Body] = {}
        """The script's own, which print what their commands do."""
        self._calls = 0

    def write(self, words: list[Value], redirects: Iterable[Redirect]) -> None:
        """Remembers what ``cat``, ``echo``, ``printf`` and ``tee`` write into a file."""
        redirects = list(redirects)
        targets = [(redirect.operator, self.expansion.one(redirect.target)) for redirect in redirects]
        outputs = [(operator, text(target)) for operator, target in targets if operator in (">", ">>", ">|")]
        if text(words[0]) == "tee":
            append = any(text(word) == "-a" for word in words[1:])
            outputs.extend((">>" if append else ">", text(w)) for w in words[1:] if not text(w).startswith("-"))
        if not outputs:
            return
        content = printed(words, self.input_of(redirects), self._reading.files, self._reading.ledger.budget)
        for operator, name in outputs:
            if content is None:
                self._reading.files.pop(name, None)
            elif operator == ">>":
                self._reading.files[name] = self._reading.ledger.made((*self._reading.files.get(name, ()), *content))
            else:
                self._reading.files[name] = content

    def input_of(self, redirects: Iterable[Redirect]) -> Value | None:
        """Standard input of a command: a here-document, or a file that the script has written."""
        for redirect in redirects:
            if redirect.here:
                return self.expansion.one(redirect.target)
            if redirect.operator == "<":
                return self._reading.files.get(text(self.expansion.one(redirect.target)))
        return None

    def printed(self, body: Body) -> Value | None:
        """The text of ``$(body)``, where nothing need be run for it."""
        if len(body) != 1:
            return None
        command = body[0]
        piped: Value | None = None
        if isinstance(command, Pipeline) and not command.negated:
            *firsts, command = command.commands
            if not firsts or self._calls >= DEEPEST_PRINT:
                return None
            self._calls += 1
            piped = self.printed((firsts[0] if len(firsts) == 1 else Pipeline((*firsts,), False, command.origin),))
            self._calls -= 1
            if piped is None:
                return None
        if isinstance(command, Chain):
            chosen = self._chosen(command)
            return self.printed((chosen,)) if chosen is not None else None
        if not isinstance(command, Simple) or command.assignments:
            return None
        words = [value for word in command.words for value in self.expansion.fields(word)]
        given = self.input_of(command.redirects) if piped is None else piped
        budget = self._reading.ledger.budget
        if words and (own := self.functions.get(text(words[0]))) is not None:
            return self._by_function(own, words[1:])
        content = given if not words else printed(words, given, self._reading.files, budget)
        return None if content is None else _without_last_newlines(content)

    def _chosen(self, chain: Chain) -> Command | None:
        """The one command that prints of ``[ … ] && echo a || echo b``, where the test can be decided."""
        first = chain.first
        if not isinstance(first, Simple) or first.assignments:
            return None
        words = [value for word in first.words for value in self.expansion.fields(word)]
        if not words or text(words[0]) != "[" or text(words[-1]) != "]":
            return None
        decision = tested(self.expansion, words[1:-1], first.origin)
        operators = [operator for operator, _ in chain.rest]
        if isinstance(decision, Unknown) or operators not in (["&&", "||"], ["&&"], ["||"]):
            return None
        return next((command for operator, command in chain.rest if decision == (operator == "&&")), None)

    def _by_function(self, body: Body, arguments: list[Value]) -> Value | None:
        """What a function prints, each of whose commands does nothing else."""
        if len(body) == 1 and isinstance(body[0], Group):
            body = body[0].body
        if self._calls >= DEEPEST_PRINT:
            return None
        self._calls += 1
        before, self._variables.positional = self._variables.positional, arguments
        try:
            parts = [self.printed((command,)) for command in body]
        finally:
            self._calls -= 1
            self._variables.positional = before
        if any(part is None for part in parts):
            return None
        lines = [(*part, Piece("\n", part[-1].origin)) for part in parts if part]
        return _without_last_newlines(tuple(piece for line in lines for piece in line))


DEEPEST_PRINT = 16
"""Functions that print what others print."""


def _without_last_newlines(content: Value) -> Value:
    pieces = list(content)
    while pieces:
        last = pieces.pop()
        kept = last.text.rstrip("\n")
        if kept:
            return (*pieces, Piece(kept, last.origin))
    return ()


def printed(words: Sequence[Value], given: Value | None, files: Mapping[str, Value], budget: Budget) -> Value | None:
    """Standard output of the command ``words``, ``given`` on standard input; nothing if that cannot be said."""
    budget.spend(len(words))
    name, arguments = text(words[0]), words[1:]
    origin = words[0][0].origin
    match name:
        case "cat" | "tee":
            paths = [text(word) for word in arguments if not text(word).startswith("-")] if name == "cat" else []
            contents = [files.get(path) for path in paths] if paths else [given]
            if any(content is None for content in contents):
                return None
            return tuple(piece for content in contents for piece in content or ())
        case "echo":
            shown = list(arguments)
            while shown and re.fullmatch("-[neE]+", text(shown[0])):
                shown.pop(0)
            return (*joined(shown, " ", origin), Piece("\n", origin))
        case "printf":
            if len(arguments) == 1 and "%" not in text(arguments[0]):
                return tuple(piece._replace(text=piece.text.replace("\\n", "\n")) for piece in arguments[0])
            if len(arguments) == 2 and text(arguments[0]) in ("%s", "%s\\n", "%d", "%d\\n"):
                return arguments[1]
            return None
        case "tr" | "sed" if given is not None and all(map(is_known, arguments)):
            return _in_one_line(name, [text(word) for word in arguments], given)
        case "expr" | "bc":
            expression = joined(arguments, " ", origin) if name == "expr" else given or ()
            return _calculated(expression, name, budget)
    return None


def _in_one_line(name: str, arguments: list[str], given: Value) -> Value | None:
    """``given`` as ``tr '\\n' ' '`` or ``sed 's/  */ /g'`` has it, with which scripts make one line of
    several; each stretch from one place by itself, as words are split later."""
    if name == "tr" and arguments == ["\\n", " "]:
        return tuple(piece._replace(text=piece.text.replace("\n", " ")) for piece in given)
    if (name == "tr" and arguments == ["-s", " "]) or (name == "sed" and arguments in ([r"s/  \+/ /g"], ["s/  */ /g"])):
        return tuple(piece._replace(text=re.sub(" +", " ", piece.text)) for piece in given)
    return None


def _calculated(expression: Value, name: str, budget: Budget) -> Value | None:
    if not expression or not is_known(expression) or "scale" in text(expression):
        return None
    try:
        number = evaluate(text(expression).strip(), lambda _: None, budget)
    except ArithmeticTextError:
        return None
    return None if number is None else (Piece(str(number), expression[0].origin),)
