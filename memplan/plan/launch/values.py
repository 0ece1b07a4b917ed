"""Text that remembers where each part of it was written, and which parts nobody can know without running the script."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from ..errors import ABSENT, Origin, PlanError

LARGEST = 1 << 20
"""Characters that one value may have."""
MOST = 1 << 25
"""Characters that all values of a script may have together."""

_FIRST, _LAST = 0xF0000, 0xFFFFD


class Piece(NamedTuple):
    """A stretch of text from one place. A character of a private plane stands for something unknown."""

    text: str
    origin: Origin


Value: TypeAlias = "tuple[Piece, ...]"


class Cause(Enum):
    """Why something is not known."""

    UNSET = "is not set in the script"
    COMMAND = "is the output of a command, which is not run"
    CONDITION = "depends on a condition that cannot be decided"
    PLACEHOLDER = "is still to be filled in"
    OTHER = "cannot be followed"


@dataclass(frozen=True, slots=True)
class Unknown:
    """``shown`` is how it was written; ``ask`` the variable that would settle it, empty if none would."""

    shown: str
    ask: str
    cause: Cause
    origin: Origin
    options: tuple[str, ...] = ()
    """Of a condition: the arguments that its branches may add."""

    @property
    def why(self) -> str:
        """Cause and remedy, to stand after the name of an argument."""
        if self.cause is Cause.UNSET and self.shown == f"${self.ask}":
            text = f"{self.shown} is not set in the script"
        elif self.cause is Cause.CONDITION:
            text = f"depends on {self.shown} ({self.origin}), which cannot be decided"
        else:
            text = f"{self.shown} {self.cause.value}"
        return f"{text}; give it as --set {self.ask}=value" if self.ask else text


@dataclass(slots=True)
class Ledger:
    """Every unknown of one script by the character that stands for it, and how much text was made."""

    _known: dict[Unknown, str] = field(default_factory=dict)
    _by_character: dict[str, Unknown] = field(default_factory=dict)
    _spent: int = 0

    def value(self, unknown: Unknown) -> Value:
        """A value that is this unknown; the same unknown is always the same character."""
        key = unknown if unknown.cause is not Cause.UNSET else Unknown(unknown.shown, unknown.ask, unknown.cause, _ANY)
        if key not in self._known:
            code = _FIRST + len(self._known)
            if code > _LAST:
                raise PlanError("", ABSENT, "has too many values that are not known", origin=unknown.origin)
            self._known[key] = chr(code)
            self._by_character[chr(code)] = unknown
        return (Piece(self._known[key], unknown.origin),)

    def unknowns(self, value: Value) -> list[Unknown]:
        """What in ``value`` is not known, in order."""
        return [
            self._by_character[character]
            for piece in value
            if not piece.text.isascii()
            for character in piece.text
            if character in self._by_character
        ]

    def shown(self, value: Value) -> str:
        """``value`` as a reader can recognise it: what is unknown as it was written."""
        plain = text(value)
        if plain.isascii():
            return plain
        return "".join(self._by_character[c].shown if c in self._by_character else c for c in plain)

    def made(self, value: Value) -> Value:
        """``value``, after checking that the script does not make text without end."""
        size = sum(len(piece.text) + 8 for piece in value)
        self._spent += size
        if size > LARGEST or self._spent > MOST:
            origin = value[-1].origin if value else None
            raise PlanError("", ABSENT, "makes more text than a launch script does", origin=origin)
        return value


_ANY = Origin("")


def cleaned(written: str) -> str:
    """``written`` without the characters that stand for unknowns here."""
    if written.isascii():
        return written
    return "".join("\ufffd" if ord(c) >= _FIRST else c for c in written)


def text(value: Value) -> str:
    """The characters of ``value``."""
    return value[0].text if len(value) == 1 else "".join(piece.text for piece in value)


def is_known(value: Value) -> bool:
    """Whether all of ``value`` is known."""
    return all(piece.text.isascii() or not any(ord(c) >= _FIRST for c in piece.text) for piece in value)


def joined(values: Iterable[Value], between: str, origin: Origin) -> Value:
    """All ``values`` as one, separated by ``between``."""
    result: list[Piece] = []
    for value in values:
        if result and between:
            result.append(Piece(between, origin))
        result.extend(value or (Piece("", origin),))
    return tuple(result)


def origin_of(value: Value, otherwise: Origin) -> Origin:
    """Where the first character of ``value`` was written."""
    return next((piece.origin for piece in value if piece.text), otherwise)
