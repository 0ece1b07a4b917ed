"""Text that remembers where it was written and which parts only a running script knows; variables, and what is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from .origin import Origin, ScriptError

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
            for character in piece.text
            if character in self._by_character
        ]

    def shown(self, value: Value) -> str:
        """``value`` as a reader can recognise it: unknown parts as they were written."""
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
            raise ScriptError("makes more text than a launch script does", origin)
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

    def scalar(self, name: str) -> Value | None:
        """The value of ``name``, of its first item if it is an array, nothing if it is not set."""
        if name in self.given:
            return self.given[name]
        if name.isdigit():
            position = int(name)
            return self.positional[position - 1] if 0 < position <= len(self.positional) else None
        value = self.values.get(name)
        return next(iter(value.values()), None) if isinstance(value, dict) else value

    def items(self, name: str) -> Array | None:
        """All items of ``name``."""
        if name in ("@", "*"):
            count = max([len(self.positional), *(int(given) for given in self.given if given.isdigit())])
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


@dataclass(slots=True)
class Reading:
    """The result of following a script: commands that run a Python file, files written, conditions left open."""

    started: list[Started] = field(default_factory=list)
    files: dict[str, Value] = field(default_factory=dict)
    undecided: list[Unknown] = field(default_factory=list)
    sourced: list[tuple[str, Origin]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    job: Mapping[str, Value] = field(default_factory=dict)
    """Variables of the job that the script's ``#SBATCH`` lines ask for."""


class ExitError(Exception):
    """``exit``: what follows in the script is not run."""


class LeaveError(Exception):
    """``return``, ``break`` or ``continue``: what follows in the function or loop is not run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_OPTION = re.compile(
    r"(--nodes|-N|--ntasks-per-node|--ntasks|-n|--gpus-per-node|--gres)[= \t]*(?:gpu:)?(?:[a-z]\w*:)?(\d+)\b"
)
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "-n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
}


def slurm_variables(script: str, source: str) -> dict[str, Value]:
    """Variables of the job that the directives of ``script`` ask for."""
    found: dict[str, Value] = {}
    for directive in _DIRECTIVE.finditer(script):
        origin = Origin(source, script.count("\n", 0, directive.start()) + 1)
        for option in _OPTION.finditer(directive[1].partition("#")[0]):
            found.update(dict.fromkeys(_VARIABLES[option[1]], (Piece(option[2], origin),)))
    return found
