"""Settings as values of their types, with where each was written: the arguments of a training command, taken apart as
argparse does it, and the keys of a mapping.

Tables of a format's arguments: rows that are read and written, and what every other argument means for memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from ..bash.values import Cause, Ledger, Piece, Unknown, Value, is_known, origin_of, text
from ..plan.errors import ABSENT, Node, Origin, PlanError, Scalar, nearest, shown
from ..plan.plan import Plan
from ..values import dataclass

# -- tables ----------------------------------------------------------------------------------------------

_FOLDER = Path(__file__).parent / "arguments"
_HEADING = re.compile(r"\[(modelled|irrelevant|refused|not-modelled)\](?: (.*))?")
_LINE = re.compile(r"((?:--\S+)(?: --\S+)*)(?: (int|float|str)([*+]|\d+)?)?(?: \{(.*)\})?(?: =(.*))?")


class Table(Enum):
    """Where an argument belongs."""

    MODELLED = "modelled"
    IRRELEVANT = "irrelevant"
    REFUSED = "refused"
    """Megatron stops, or what it starts is no training."""
    NOT_MODELLED = "not-modelled"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a parser. ``why`` is why it does not matter, or which way it pushes memory."""

    names: tuple[str, ...]
    type: str
    """``int``, ``float`` or ``str``; empty for a switch."""
    count: str
    """argparse's ``nargs``: empty for one value, else ``*``, ``+`` or a number."""
    choices: tuple[str, ...]
    default: str | None
    """Of an argument that is refused or not modelled: the value with which it does nothing."""
    table: Table
    why: str

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        return not self.type


@cache
def arguments_of(framework: str) -> Mapping[str, Argument]:
    """Every argument of ``framework``'s parser by each of its names."""
    found: dict[str, Argument] = {}
    table, why = Table.MODELLED, ""
    for line in (_FOLDER / f"{framework}.txt").read_text(encoding="utf-8").splitlines():
        heading = _HEADING.fullmatch(line)
        if heading is not None:
            table, why = Table(heading[1]), heading[2] or ""
        elif line and not line.startswith("#"):
            argument = parsed_line(line, table, why)
            for name in argument.names:
                if name in found:
                    raise ValueError(f"{name} is in two tables")
                found[name] = argument
    return MappingProxyType(found)


def parsed_line(line: str, table: Table, why: str) -> Argument:
    """The argument that ``line`` of a table describes."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"cannot be read as an argument: {line}")
    choices = tuple(match[4].split(",")) if match[4] else ()
    return Argument(tuple(match[1].split()), match[2] or "", match[3] or "", choices, match[5], table, why)


def nearest_argument(name: str, framework: str) -> str | None:
    """The argument that ``name`` was probably meant to be."""
    return nearest(name, arguments_of(framework), cutoff=0.75)


# -- rows ------------------------------------------------------------------------------------------------

Kind = Literal["switch", "integer", "number", "word", "any"]


class _Left:
    """No value: the field is left to its default, or what a row's function has put."""


LEFT: Final = _Left()
NEEDED: Final = _Left()
"""The framework itself stops where the setting is missing."""

ON: Mapping[Any, Any] = MappingProxyType({True: True, False: False})
OFF: Mapping[Any, Any] = MappingProxyType({True: False, False: True})
"""Words of a switch that turns a default off."""


def always(_: Plan) -> bool:
    """When most rows are written."""
    return True


def useful(_: Any) -> str:
    """Why most rows have no effect: no reason."""
    return ""


def later(reason: str) -> Callable[[Any], str]:
    """A row that is read once flags are known: ``reason`` says what it becomes."""
    return lambda _: reason


def elsewhere(_: Any) -> None:
    """Reads nothing: another row's function does."""


@dataclass(frozen=True, slots=True)
class Row:
    """``name`` is how the framework calls the setting today, ``path`` the plan's field."""

    name: str
    path: str
    group: str = ""
    """The section or group of arguments in which it is written; empty for one that is only read."""
    kind: Kind = "integer"
    default: Any = LEFT
    """The plan's value where nothing is said, or a function of the reader that derives it."""
    words: Mapping[Any, Any] = field(default_factory=dict)
    """The framework's values to the plan's; other values are the same in both."""
    older: tuple[str, ...] = ()
    """Other names by which it is read."""
    least: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    """The framework's values that are not modelled, and what to say of each."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Settings that are refused beside it, and what to say of each."""
    read: Callable[[Any], None] | None = None
    """In place of this table's own reading."""
    without_effect: Callable[[Any], str] = useful
    """Why a reader does not look at it, where it does not."""
    when: Callable[[Plan], bool] = always
    """When it is written."""
    value: Callable[[Plan], Any] | None = None
    """The plan's value to write, where it is not that of the field."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.older)

    def written(self, plan: Plan) -> Any:
        """The framework's value for ``plan``; ``None`` where the row is not written."""
        if not self.group or not self.when(plan):
            return None
        value = self.value(plan) if self.value is not None else plan.at(self.path)
        return next((theirs for theirs, ours in self.words.items() if ours == value), value)


def switch(name: str, path: str, group: str = "", words: Mapping[Any, Any] = ON, **more: Any) -> Row:
    """A switch: ``words`` are the plan's values where it is given (``True``) and where it is not."""
    return Row(name, path, group, "switch", words=words, **{"default": words[False], **more})


class Values(Protocol):
    """The settings of one file by name."""

    origin: Origin

    def has(self, name: str, /) -> bool:
        """Whether the file says anything of ``name``."""

    def wrong(self, name: str, problem: str, /) -> PlanError:
        """What is wrong with the setting ``name``."""

    def value(self, row: Row) -> Node | None:
        """The value of ``row`` in the file, in the framework's own words; ``None`` where the file has none."""


@dataclass(slots=True)
class Building:
    """A plan put together field by field: ``items`` is the plan so far by dotted path, ``became`` what was made of
    each setting."""

    origin: Origin
    items: dict[str, Node] = field(default_factory=dict)
    became: dict[str, list[str]] = field(default_factory=dict)
    said: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the settings that each path is made of."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Code and message of what the reader should be told."""

    def put(self, path: str, node: Node | Scalar, *names: str) -> None:
        """Sets ``path`` of the plan; the settings ``names`` became it."""
        self.said[path] = names
        self.items[path] = node = node if isinstance(node, Node) else Node(node, self.origin)
        self.because(names, f"{path} = {shown(node.plain())}")

    def put_said(self, path: str, node: Node | None, *names: str) -> None:
        """``put``, where anybody says it."""
        if node is not None:
            self.put(path, node, *names)

    def because(self, names: str | Iterable[str], text: str) -> None:
        """Says what became of a setting, or of each of several."""
        for name in (names,) if isinstance(names, str) else names:
            self.became.setdefault(name, []).append(text)

    def note(self, code: str, message: str) -> None:
        """Tells the reader something that is no error."""
        self.notes.append((code, message))

    def size(self, path: str) -> int:
        """The whole number that stands at ``path``."""
        return self.items[path].whole

    def plan(self) -> Node:
        """The plan as a mapping of sections."""
        plan = Node({}, self.origin)
        for path, node in self.items.items():
            plan = plan.put(path, node)
        return plan


@dataclass(slots=True)
class Reader:
    """Settings to read from and a plan to put into, for the functions of rows."""

    settings: Any
    """``Values`` of the format."""
    building: Building
    context: Any = None
    """Facts beside the file: names, and values that flags or launchers give."""


def read_rows(rows: Iterable[Row], reader: Reader) -> None:
    """Puts what the settings say of every row."""
    for row in rows:
        reason = row.without_effect(reader)
        if reason:
            reader.building.because(row.names, reason)
        elif row.read is not None:
            row.read(reader)
        elif (node := _read(row, reader)) is not None:
            reader.building.put(row.path, node, next(filter(reader.settings.has, row.names), row.name))


def _read(row: Row, reader: Reader) -> Node | None:
    settings: Values = reader.settings
    node = settings.value(row)
    if node is not None:
        if (problem := row.refused.get(str(node.value))) is not None:
            raise node.wrong(row.name, problem)
        for other, problem in row.without.items():
            if settings.has(other):
                raise settings.wrong(other, problem)
        if row.least is not None and isinstance(node.value, int) and node.value < row.least:
            raise node.wrong(row.name, f"must be at least {row.least}")
        known = isinstance(node.value, (str, bool)) and node.value in row.words
        if row.words and not known:
            raise node.wrong(row.name, f"must be one of {', '.join(map(str, row.words))}")
        return Node(row.words[node.value], node.origin) if known else node
    if row.default is NEEDED:
        raise PlanError(row.name, ABSENT, "is missing: the training cannot start without it", origin=settings.origin)
    if row.default is LEFT:
        return None
    found = row.default(reader) if callable(row.default) else row.default
    return found if isinstance(found, Node) else Node(found, settings.origin)


def positive(name: str, node: Node) -> int:
    """``node`` as a number that can be a size."""
    if node.whole < 1:
        raise node.wrong(name, "must be at least 1")
    return node.whole


# -- settings ------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_INTEGER = re.compile(r"\s*[-+]?\d+(?:_\d+)*\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Given:
    """One argument as it was given; ``argument`` is nothing where the parser does not have it."""

    name: str
    argument: Argument | None
    values: tuple[Value, ...]
    origin: Origin

    @property
    def canonical(self) -> str:
        return self.argument.name if self.argument is not None else self.name


def taken_apart(
    words: Sequence[Value], arguments: Mapping[str, Argument], origin: Origin
) -> tuple[list[Given], list[Value]]:
    """``words`` as arguments with their values, and the words that belong to none."""
    given: list[Given] = []
    loose: list[Value] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        plain = text(word)
        if not plain.startswith("--") or plain == "--":
            loose.append(word)
            continue
        name, equals, _ = plain.partition("=")
        argument = arguments.get(name)  # Megatron's parsers take no abbreviations (``allow_abbrev=False``)
        values: list[Value] = [_after_equals(word)] if equals else []
        most = 0 if equals else _most(argument)
        while len(values) < most and at < len(words) and not _is_option(words[at]):
            values.append(words[at])
            at += 1
        given.append(Given(name, argument, tuple(values), origin_of(word, origin)))
    return given, loose


def _most(argument: Argument | None) -> int:
    """How many words may follow; an argument of a fork takes whatever follows."""
    if argument is None or argument.count in ("*", "+"):
        return 1 << 30
    if argument.is_switch:
        return 0
    return int(argument.count or 1)


def _is_option(word: Value) -> bool:
    plain = text(word)
    return plain.startswith("-") and len(plain) > 1 and not _NUMBER.fullmatch(plain) and " " not in plain


def _after_equals(word: Value) -> Value:
    for position, piece in enumerate(word):
        _, equals, after = piece.text.partition("=")
        if equals:
            return (
                Piece(after, word[position + 1].origin if not after and position + 1 < len(word) else piece.origin),
                *word[position + 1 :],
            )
    return ()


@dataclass(slots=True)
class Settings:
    """Arguments by name, the last of several winning, as values of their types.

    What is read here must be known: an argument that needs a variable that nobody set asks for it.
    """

    given: Sequence[Given]
    ledger: Ledger
    origin: Origin
    _last: dict[str, Given] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last = {given.canonical: given for given in self.given}

    def value(self, row: Row) -> Node | None:
        """The value of ``row``, under the first of its names that was given."""
        name = next(filter(self.has, row.names), None)
        found: Node | None = getattr(self, row.kind)(name) if name is not None else None
        return found

    def has(self, name: str) -> bool:
        """Whether ``name`` was given at all: what a switch means."""
        return name in self._last

    def where(self, *names: str) -> Origin:
        """Where the first of ``names`` that was given was written; else where the command is."""
        return next((self._value_origin(self._last[name]) for name in names if name in self._last), self.origin)

    def wrong(self, name: str, problem: str) -> PlanError:
        """What is wrong with ``name``, of which there is no value to repeat."""
        return PlanError(name, ABSENT, problem, origin=self.where(name))

    def switch(self, name: str) -> Node:
        """``name`` as true or false."""
        return Node(name in self._last, self.where(name))

    def integer(self, name: str) -> Node | None:
        """The whole number of ``name``."""
        node = self.word(name)
        if node is None:
            return None
        plain = str(node.value)
        if not _INTEGER.fullmatch(plain) or len(plain) > 18:
            raise PlanError(name, plain, "must be a whole number", origin=node.origin)
        return Node(int(plain), node.origin)

    def number(self, name: str) -> Node | None:
        """The number of ``name``."""
        node = self.word(name)
        if node is None:
            return None
        try:
            value = float(str(node.value))
        except ValueError:
            raise node.wrong(name, "must be a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise node.wrong(name, "must be a finite number")
        return Node(value, node.origin)

    def word(self, name: str) -> Node | None:
        """The text of ``name``, one of its choices if it has some."""
        words = self.words(name)
        if words is None:
            return None
        if len(words) != 1:
            raise self.wrong(name, "needs a value" if not words else "takes one value")
        return words[0]

    def words(self, name: str) -> list[Node] | None:
        """All values of ``name``."""
        given = self._last.get(name)
        if given is None:
            return None
        nodes = [Node(self._known(given, value), origin_of(value, given.origin)) for value in given.values]
        choices = given.argument.choices if given.argument is not None else ()
        for node in nodes:
            if choices and node.value not in choices:
                raise node.wrong(name, f"must be one of {', '.join(choices)}", known=choices)
        return nodes

    def loose_word(self, name: str) -> str | None:
        """The one value of ``name`` if it is known: for paths, which may be anything."""
        given = self._last.get(name)
        if given is None or len(given.values) != 1 or not is_known(given.values[0]):
            return None
        return text(given.values[0])

    def raw(self, name: str) -> Value | None:
        """The one value of ``name`` with its unknowns."""
        given = self._last.get(name)
        return given.values[0] if given is not None and len(given.values) == 1 else None

    def all_needed(self) -> list[PlanError]:
        """Of each variable that nobody set, the first number of a plan that needs it."""
        found: dict[str, PlanError] = {}
        for given in self._last.values():
            if given.argument is None or given.argument.table is not Table.MODELLED or given.argument.type == "str":
                continue
            for value in given.values:
                for unknown in self.ledger.unknowns(value)[:1]:
                    error = needed(given.name, self.ledger.shown(value), unknown, origin_of(value, given.origin))
                    found.setdefault(unknown.ask or unknown.shown, error)
        return list(found.values())

    def _known(self, given: Given, value: Value) -> str:
        unknowns = self.ledger.unknowns(value)
        if unknowns:
            shown = self.ledger.shown(value)
            raise needed(given.name, shown, unknowns[0], origin_of(value, given.origin))
        return text(value)

    def _value_origin(self, given: Given) -> Origin:
        return origin_of(given.values[0], given.origin) if given.values else given.origin


class NeededError(PlanError):
    """A setting is needed and its value is not known."""


def needed(name: str, shown: str, unknown: Unknown, origin: Origin) -> NeededError:
    """That ``name`` is needed, which ``unknown`` is in the value of."""
    subject = ABSENT if unknown.shown == shown else shown
    return NeededError(name, subject, f"is needed, and {unknown.why}", origin=origin)


def asks(unknown: Unknown, arguments: Mapping[str, Argument]) -> bool:
    """Whether words that are not known may hold arguments that matter."""
    if unknown.cause is not Cause.CONDITION:
        return False
    found = (arguments.get(option) for option in unknown.options)
    return not unknown.options or any(
        argument is not None and argument.table is not Table.IRRELEVANT for argument in found
    )


@dataclass(slots=True)
class Keys:
    """The keys of a mapping by their dotted names; ``given`` holds all of them, ``origin`` is the file."""

    given: Mapping[str, Node]
    origin: Origin

    def node(self, name: str) -> Node | None:
        """The value that the file has at ``name``."""
        return self.given.get(name)

    def first(self, *names: str) -> tuple[str, Node] | None:
        """The first of ``names`` that was given: a key, then its older names."""
        return next(((name, node) for name in names if (node := self.node(name)) is not None), None)

    def has(self, *names: str) -> bool:
        return self.first(*names) is not None

    def where(self, *names: str) -> Origin:
        """Where the first of ``names`` that was given was written; else the file."""
        found = self.first(*names)
        return found[1].origin if found is not None else self.origin

    def value(self, row: Row) -> Node | None:
        """The value of ``row``, under the first of its names that was given."""
        found = self.first(*row.names)
        return typed(row.kind, *found) if found is not None else None


def typed(kind: Kind, name: str, node: Node) -> Node:
    """``node`` as a value of ``kind``; a whole number may be written as 5e8."""
    value = node.value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return Node(int(value), node.origin)
    if kind == "word" and isinstance(node.text, str) and not isinstance(value, str):
        return Node(node.text, node.origin)
    types, what = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise node.wrong(name, f"must be {what}")
    return node


_TYPES: Mapping[Kind, tuple[tuple[type, ...], str]] = {
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "switch": ((bool,), "true or false"),
    "word": ((str,), "text"),
    "any": ((object, bool), ""),
}
