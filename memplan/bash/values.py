"""Text that remembers where it was written and which parts only a running script knows; variables, and what is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from .origin import Budget, Origin, ScriptError

LARGEST = 1 << 20
"""Characters that one value may have."""
LONGEST_POSITION = 9
"""Digits that the number of an argument or of an item may have."""

_VALUE = 8
"""Steps of a value that is made."""
_FIRST, _LAST = 0xF0000, 0xFFFFD
_STANDING_IN = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
_RESERVED = re.compile(f"[{chr(_FIRST)}-{chr(0x10FFFF)}]")


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
    RANGE = "is a range, from which Slurm chooses"
    LATE = "stands behind a command, where sbatch reads no more"
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
    """Every unknown of one script by the character that stands for it, and what reading the script may still cost."""

    budget: Budget = field(default_factory=Budget)
    _known: dict[Unknown, str] = field(default_factory=dict)
    _by_character: dict[str, Unknown] = field(default_factory=dict)

    def value(self, unknown: Unknown) -> Value:
        """A value that is this unknown; the same unknown is always the same character."""
        key = unknown if unknown.cause is not Cause.UNSET else Unknown(unknown.shown, unknown.ask, unknown.cause, _ANY)
        if key not in self._known:
            code = _FIRST + len(self._known)
            if code > _LAST:
                raise ScriptError("has too many values that are not known", unknown.origin)
            self._known[key] = chr(code)
            self._by_character[chr(code)] = unknown
        return (Piece(self._known[key], unknown.origin),)

    def unknowns(self, value: Value) -> list[Unknown]:
        """The unknowns in ``value``, in order."""
        return [
            self._by_character[character]
            for piece in value
            if not piece.text.isascii()
            for character in _STANDING_IN.findall(piece.text)
            if character in self._by_character
        ]

    def shown(self, value: Value) -> str:
        """``value`` as a reader can recognise it: unknown parts as they were written."""
        plain = text(value)
        if plain.isascii():
            return plain
        return _STANDING_IN.sub(
            lambda found: self._by_character[found[0]].shown if found[0] in self._by_character else found[0], plain
        )

    def made(self, value: Value) -> Value:
        """``value``, after checking that the script does not make text without end."""
        size = sum([len(piece.text) for piece in value])
        origin = value[-1].origin if value else None
        if size > LARGEST:
            raise ScriptError(f"makes more text than a file should: a value over {LARGEST:,} characters", origin)
        self.budget.make(1 + len(value), size, origin, steps=_VALUE)
        return value


_ANY = Origin("")


def cleaned(written: str) -> str:
    """``written`` without the characters that stand for unknowns here."""
    if written.isascii():
        return written
    return _RESERVED.sub("\ufffd", written)


def text(value: Value) -> str:
    """The characters of ``value``."""
    return value[0].text if len(value) == 1 else "".join(piece.text for piece in value)


def is_known(value: Value) -> bool:
    """Whether all of ``value`` is known."""
    return all(piece.text.isascii() or _RESERVED.search(piece.text) is None for piece in value)


def is_position(name: str) -> bool:
    """Whether ``name`` is the number of an argument, and not so long that it cannot be one."""
    return name.isascii() and name.isdigit() and len(name) <= LONGEST_POSITION


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


Array: TypeAlias = "dict[str, Value]"
"""Items by key; of a plain array by ``"0"``, ``"1"`` and so on."""


@dataclass(slots=True)
class Variables:
    """The variables of a script. ``given`` (``--set``) stand over whatever the script says."""

    given: Mapping[str, Value]
    ledger: Ledger
    values: dict[str, Value | Array] = field(default_factory=dict)
    positional: list[Value] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)

    def assign(self, name: str, value: Value | Array) -> None:
        """Sets ``name``; unknown parts of its value can from now on be given by this name."""
        if isinstance(value, dict):
            self.values[name] = {key: self.ledger.made(self._named(item, name)) for key, item in value.items()}
        else:
            self.values[name] = self.ledger.made(self._named(value, name))

    def append(self, name: str, items: Array) -> None:
        """Adds ``items`` to the array ``name``, or puts them in the place of those with the same keys."""
        old = self.values.get(name)
        array = old if isinstance(old, dict) else {} if old is None else {"0": old}
        for key, item in items.items():
            array[key] = self.ledger.made(self._named(item, name))
        self.values[name] = array

    def scalar(self, name: str) -> Value | None:
        """The value of ``name``, of its first item if it is an array, nothing if it is not set."""
        if name in self.given:
            return self.given[name]
        if is_position(name):
            position = int(name)
            return self.positional[position - 1] if 0 < position <= len(self.positional) else None
        value = self.values.get(name)
        return next(iter(value.values()), None) if isinstance(value, dict) else value

    def items(self, name: str) -> Array | None:
        """All items of ``name``."""
        if name in ("@", "*"):
            count = max([len(self.positional), *(int(given) for given in self.given if is_position(given))])
            self.ledger.budget.spend(count)
            return {str(n): value for n in range(1, count + 1) if (value := self.scalar(str(n))) is not None}
        found: Value | Array | None = self.given[name] if name in self.given else self.values.get(name)
        return found if isinstance(found, dict) or found is None else {"0": found}

    def _named(self, value: Value, name: str) -> Value:
        if is_known(value):
            return value
        pieces: list[Piece] = []
        for piece in value:
            for unknown in self.ledger.unknowns((piece,)):
                if not unknown.ask and unknown.cause is not Cause.CONDITION:
                    new = self.ledger.value(Unknown(unknown.shown, name, unknown.cause, unknown.origin))[0].text
                    old = self.ledger.value(unknown)[0].text
                    piece = Piece(piece.text.replace(old, new), piece.origin)
            pieces.append(piece)
        return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Started:
    """A command that the script starts: its words, launchers first, and the variables that it exports to it."""

    words: tuple[Value, ...]
    environment: Mapping[str, Value]
    origin: Origin
    job: Mapping[str, Value] = field(default_factory=dict)
    """Variables of the job of Slurm that it is part of."""
    loops: tuple[str, ...] = ()
    """Variables of the loops around it, outermost first, that take several values."""


@dataclass(slots=True)
class Reading:
    """The result of following a script: commands that run a Python file, files written, conditions left open."""

    started: list[Started] = field(default_factory=list)
    files: dict[str, Value] = field(default_factory=dict)
    undecided: list[Unknown] = field(default_factory=list)
    perhaps: list[Unknown] = field(default_factory=list)
    """Open conditions under which another script runs, or a launcher of words that are put together."""
    sourced: list[tuple[str, Origin]] = field(default_factory=list)
    missing: list[tuple[str, Origin]] = field(default_factory=list)
    """Scripts that the script runs as processes of their own, and that are not there."""
    ledger: Ledger = field(default_factory=Ledger)


class ExitError(Exception):
    """``exit``: what follows in the script is not run."""


class LeaveError(Exception):
    """``return``, ``break`` or ``continue``: what follows in the function or loop is not run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
