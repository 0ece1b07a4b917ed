"""What a script itself writes: files made of here-documents, and what ``$(…)`` prints where nothing need be run."""

from __future__ import annotations

from collections.abc import Iterable

from .expansion import Expansion
from .printing import printed
from .reading import Reading
from .syntax import Body, Pipeline, Redirect, Simple
from .values import Piece, Value, text
from .variables import Variables


class Written:
    """Text of which a script says all; ``expansion`` knows it, too."""

    def __init__(self, variables: Variables, reading: Reading) -> None:
        self._reading = reading
        self.expansion = Expansion(variables, self.printed)

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
        content = printed(words, self.input_of(redirects), self._reading.files)
        for operator, name in outputs:
            if content is None:
                self._reading.files.pop(name, None)
            elif operator == ">>":
                self._reading.files[name] = self._reading.ledger.made((*self._reading.files.get(name, ()), *content))
            else:
                self._reading.files[name] = content

    def input_of(self, redirects: Iterable[Redirect]) -> Value | None:
        """What a command reads: a here-document, or a file that the script has written."""
        for redirect in redirects:
            if redirect.here:
                return self.expansion.one(redirect.target)
            if redirect.operator == "<":
                return self._reading.files.get(text(self.expansion.one(redirect.target)))
        return None

    def printed(self, body: Body) -> Value | None:
        """What ``$(body)`` stands for, where that needs nothing to be run."""
        if len(body) != 1:
            return None
        command = body[0]
        piped: Value | None = None
        if isinstance(command, Pipeline) and not command.negated:
            *firsts, command = command.commands
            if len(firsts) != 1:
                return None
            piped = self.printed((firsts[0],))
            if piped is None:
                return None
        if not isinstance(command, Simple) or command.assignments:
            return None
        words = [value for word in command.words for value in self.expansion.fields(word)]
        given = self.input_of(command.redirects) if piped is None else piped
        content = given if not words else printed(words, given, self._reading.files)
        return None if content is None else _without_last_newlines(content)


def _without_last_newlines(content: Value) -> Value:
    pieces = list(content)
    while pieces:
        last = pieces.pop()
        kept = last.text.rstrip("\n")
        if kept:
            return (*pieces, Piece(kept, last.origin))
    return ()
