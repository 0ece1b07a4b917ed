"""Tables of a format's arguments: rows that are read and written, and what every other argument means for memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

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
            used = next(filter(reader.settings.has, row.names), row.name)
            reader.building.put(row.path, node, used)


def _read(row: Row, reader: Reader) -> Node | None:
    settings: Values = reader.settings
    node = settings.value(row)
    if node is not None:
        if (problem := row.refused.get(str(node.value))) is not None:
            raise node.wrong(row.name, problem)
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
