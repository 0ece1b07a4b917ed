"""Tokens of a ``tokenizer.json`` or ``vocab.json``, counted in the bytes of the file.

Such a file has up to 40 MB, of which ``json`` makes a gigabyte of objects; only the names of tokens are kept here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ...bash.budget import MOST_STEPS, Budget
from ...plan.errors import Origin

_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*){0,1000}"'
_PLAIN = rb'[^"\[\]{}]*'
_FLAT = rb"[\[{]" + _PLAIN + rb"(?:" + _TEXT + _PLAIN + rb"){0,1000}[\]}]"
_STRING = re.compile(_TEXT, re.DOTALL)
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]+")
_BLANK = re.compile(rb"[ \t\r\n]*")
_UP_TO_BRACKET = re.compile(_PLAIN + rb"(?:(?:" + _TEXT + rb"|" + _FLAT + rb")" + _PLAIN + rb"){0,1000}", re.DOTALL)
"""Past text, and lists and mappings in which there are no others: most of a file is pairs of merged tokens."""
_NUMBERED = re.compile(rb"\s*(" + _TEXT + rb")\s*:\s*-?[0-9]{1,9}\s*(?:,|(?=}))", re.DOTALL)
"""A token of a vocabulary, and its number, up to the comma or the end: no part of a longer number is one."""
_STEPS = 15
"""Of a value that is read or a bracket that is passed."""


class NoTokenizerError(ValueError):
    """The file is not the JSON that it should be."""


def tokens_in(content: bytes, origin: Origin) -> int | None:
    """Tokens in ``content``: vocabulary and added tokens, or the keys of a plain mapping; nothing where it has none."""
    reader = _Reader(content, Budget(origin, most=2 * MOST_STEPS))
    if reader.next() != b"{":
        reader.skip()
        return None
    top: set[str] = set()
    vocabulary: set[str] | None = None
    added: set[str] = set()
    has_model = False
    for name in reader.members():
        top.add(name)
        if name == "model" and reader.next() == b"{":
            has_model = True
            for part in reader.members():
                if part == "vocab":
                    vocabulary = reader.names()
                else:
                    reader.skip()
        elif name == "added_tokens" and reader.next() == b"[":
            added.update(token for _ in reader.items() for token in reader.contents())
        else:
            reader.skip()
    tokens = top if not has_model else (vocabulary | added if vocabulary is not None else set())
    return len(tokens) or None


class _Reader:
    """One pass over ``content``."""

    def __init__(self, content: bytes, budget: Budget) -> None:
        self._content = content
        self._budget = budget
        self._at = 3 if content.startswith(b"\xef\xbb\xbf") else 0

    def next(self) -> bytes:
        """The first byte of what follows."""
        blank = _BLANK.match(self._content, self._at)
        self._at = blank.end() if blank is not None else self._at
        return self._content[self._at : self._at + 1]

    def members(self) -> Iterator[str]:
        """The keys of the mapping that begins here; whoever takes one reads or skips its value."""
        self._take(b"{")
        while self._goes_on(b"}"):
            name = self._string()
            self._take(b":")
            yield name

    def items(self) -> Iterator[None]:
        """The items of the list that begins here, each to be read or skipped."""
        self._take(b"[")
        while self._goes_on(b"]"):
            yield

    def names(self) -> set[str] | None:
        """The tokens of a vocabulary: keys of a mapping, or first items of lists; nothing if it is neither."""
        found: set[str] = set()
        if self.next() == b"{":
            self._take(b"{")
            while (entry := _NUMBERED.match(self._content, self._at)) is not None:
                self._at = entry.end()
                found.add(self._decoded(entry[1]))
            while self._goes_on(b"}"):
                found.add(self._string())
                self._take(b":")
                self.skip()
        elif self.next() == b"[":
            for _ in self.items():
                if self.next() != b"[":
                    self.skip()
                    continue
                for position, _ in enumerate(self.items()):
                    if not position and self.next() == b'"':
                        found.add(self._string())
                    else:
                        self.skip()
        else:
            self.skip()
            return None
        return found

    def contents(self) -> list[str]:
        """``content`` of the mapping that follows, where it is one and has text there."""
        found: list[str] = []
        if self.next() != b"{":
            self.skip()
            return found
        for name in self.members():
            if name == "content" and self.next() == b'"':
                found.append(self._string())
            else:
                self.skip()
        return found

    def skip(self) -> None:
        """Passes the value that follows, whatever it is."""
        first = self.next()
        if first == b'"':
            self._match(_STRING)
        elif first not in (b"[", b"{"):
            self._match(_SCALAR)
        else:
            depth = 0
            while True:
                at = self._at
                depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(self._content[at : at + 1], 0)
                self._at += 1
                if not depth:
                    return
                self._match(_UP_TO_BRACKET)
                if self._at >= len(self._content):
                    raise NoTokenizerError
                if self._content[self._at : self._at + 1] == b'"':
                    self._match(_STRING)

    def _goes_on(self, end: bytes) -> bool:
        """Whether another item follows; passes a comma before it, or the ``end``."""
        if self.next() == end:
            self._at += 1
            return False
        if self.next() == b",":
            self._at += 1
        return True

    def _string(self) -> str:
        self.next()
        return self._decoded(self._match(_STRING))

    def _decoded(self, written: bytes) -> str:
        self._budget.make(1, len(written), steps=_STEPS)
        try:
            return json.loads(written) if b"\\" in written else written[1:-1].decode()
        except ValueError:
            raise NoTokenizerError from None

    def _take(self, byte: bytes) -> None:
        if self.next() != byte:
            raise NoTokenizerError
        self._at += 1

    def _match(self, pattern: re.Pattern[bytes]) -> bytes:
        match = pattern.match(self._content, self._at)
        if match is None:
            raise NoTokenizerError
        self._budget.spend(_STEPS + len(match[0]) // 64)
        self._at = match.end()
        return match[0]
