"""Settings as values of their types, with where each was written: the arguments of a training command, taken apart as
argparse does it, and the keys of a mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field

from ..bash.values import Cause, Ledger, Piece, Unknown, Value, is_known, origin_of, text
from ..plan.errors import ABSENT, Node, Origin, PlanError
from ..values import dataclass
from .rows import Argument, Kind, Row, Table

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
