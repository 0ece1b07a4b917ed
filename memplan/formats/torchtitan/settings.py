"""The keys of one torchtitan configuration as values of their types, those of ``--set`` over the file's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...plan.errors import Node, Origin, PlanError, Scalar, guessed, scalar, shown, wrong_at
from ...values import dataclass
from ..settings import Keys, Kind, Row, typed
from .keys import RELEASES, Era, Key, key_of, keys, nearest_key, sections

_OFF: tuple[object, ...] = (None, False, "", [], {})
"""Values with which a key that is not modelled does nothing, if its line has no other."""
LARGEST = 1 << 40
"""Whole numbers are below it."""
GPUS = ("NGPU", "WORLD_SIZE")
"""Names that ``--set`` has for the number of GPUs."""
VERSION = "torchtitan"
"""and for the code that is meant."""


@dataclass(slots=True)
class Settings(Keys):
    """Every key with its value, in the order of the file, and the code that the file is read for."""

    era: Era

    def name(self, *names: str) -> str:
        """The one of ``names`` that was given; if none was, the first that was a key on the day."""
        found = self.first(*names)
        if found is not None:
            return found[0]
        return next((name for name in names if (key := key_of(name)) and key.was(self.era.day)), names[0])

    def of(self, kind: Kind, names: Sequence[str], default: Scalar) -> Node:
        """The value under the first of ``names`` that was given, else ``default``."""
        found = self.first(*names)
        return typed(kind, *found) if found is not None else Node(default, self.origin)

    def value(self, row: Row) -> Node | None:
        if not self.has(*row.names):
            return None
        return self.integer(*row.names, default=1) if row.kind == "integer" else self.of(row.kind, row.names, None)

    def integer(self, *names: str, default: int, least: int = 1) -> Node:
        """A whole number of at least ``least``."""
        node = self.of("integer", names, default)
        if not isinstance(node.value, int) or not least <= node.value < LARGEST:
            raise node.wrong(self.name(*names), f"must be a whole number of at least {least}")
        return node

    def optional(self, *names: str) -> Node | None:
        """A whole number of at least 1, or nothing: absent, null or -1."""
        found = self.first(*names)
        return None if found is None or found[1].value in (None, -1) else self.integer(*names, default=1)

    def switch(self, *names: str, default: bool = False) -> Node:
        """True or false."""
        return self.of("switch", names, default)

    def word(self, *names: str, default: str, choices: Sequence[str] = ()) -> Node:
        """Text, one of ``choices`` if there are any."""
        node = self.of("word", names, default)
        if choices and node.value not in choices:
            raise node.wrong(self.name(*names), f"must be one of {', '.join(choices)}", known=choices)
        return node

    def number(self, *names: str, default: float) -> Node:
        """A number that is not negative."""
        node = self.of("number", names, default)
        if not isinstance(node.value, (int, float)) or not 0 <= node.value <= 1e6:
            raise node.wrong(self.name(*names), "must be a number from 0 to 1e6")
        return Node(float(node.value), node.origin)

    def words(self, name: str) -> list[str]:
        """A list of words: a list, or one text with commas."""
        node = self.given.get(name)
        if node is None or node.value is None:
            return []
        if isinstance(node.value, str):
            return [part.strip() for part in node.value.split(",") if part.strip()]
        items = node.plain()
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
        raise PlanError(name, items, "must be a list of names", origin=node.origin)

    def matters(self, name: str, key: Key) -> bool:
        """Whether ``name``, which is not modelled, is more than its default here."""
        node = self.given[name]
        if key.conditions and not any(_is_on(self.given[one].value) for one in key.conditions if one in self.given):
            return False
        plain = node.plain()
        if key.default:
            return shown(plain) not in (key.default, "null") and plain != key.default
        return plain not in _OFF


def _is_on(value: object) -> bool:
    """A switch is on, or ranks share what a degree is of."""
    return bool(value) and (value is True or value != 1)


def flat(configuration: Node) -> dict[str, Node]:
    """Keys by their dotted names: a mapping that is no section is a value."""
    return dict(_flat(configuration, ""))


def _flat(node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    for name, child in node.mapping.items():
        path = f"{prefix}{name}"
        if path in sections() and child.value is None and path not in keys():
            continue
        if path in sections() and isinstance(child.value, dict):
            yield from _flat(child, f"{path}.")
        else:
            yield path, child


def assigned(assignments: Sequence[str]) -> tuple[dict[str, Node], Node | None, str | None]:
    """Keys, number of GPUs and version that ``--set`` gives."""
    given: dict[str, Node] = {}
    gpus: Node | None = None
    version: str | None = None
    origin = Origin("--set")
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise wrong_at(origin, f"{assignment} must be NAME=value")
        node = scalar(value, origin)
        if name == VERSION:
            version = value
        elif name in GPUS:
            if isinstance(node.value, bool) or not isinstance(node.value, int) or not 0 < node.value < 10**9:
                raise PlanError(name, value, "must be a number of GPUs", origin=origin)
            gpus = node
        elif key_of(name) is None:
            raise wrong_at(origin, guessed(f"{name} is no key of torchtitan's", nearest_key(name, RELEASES["0.2.2"])))
        else:
            given[name] = node
    return given, gpus, version
