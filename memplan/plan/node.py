"""Values that remember where they were written, so that an error can say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from ..values import dataclass
from .errors import Origin

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Node] | dict[str, Node]"


_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_LONGEST_NUMBER = 400
VALUE = 80
"""Steps of reading a value: what becomes of it later is among them."""


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, list or mapping with the origin of its first character.

    ``text`` is what was written for an unquoted scalar: ``010``, ``yes`` or ``2020``, which a field of
    text keeps as it is.
    """

    value: Value
    origin: Origin
    text: str | None = None

    @property
    def mapping(self) -> dict[str, Node]:
        """The items of a mapping; nothing for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self) -> object:
        """The value without its origins: what JSON would hold."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def origins(self, path: str = "") -> Iterator[tuple[str, Origin]]:
        """Dotted path and origin of this node and of all below it."""
        yield path, self.origin
        prefix = f"{path}." if path else ""
        if isinstance(self.value, dict):
            for key, node in self.value.items():
                yield from node.origins(prefix + key)
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                yield from node.origins(f"{prefix}{index}")

    def with_items(self, items: dict[str, Node]) -> Node:
        """This mapping with ``items`` added or replaced."""
        return Node({**self.mapping, **items}, self.origin)

    def without(self, *keys: str) -> Node:
        """This mapping without ``keys``."""
        return Node({key: node for key, node in self.mapping.items() if key not in keys}, self.origin)


def scalar(text: str, origin: Origin) -> Node:
    """What ``text`` means when written without quotes.

    As YAML 1.2 says ``true``, ``null`` and decimal numbers are special; ``yes``, ``010``, ``1_000`` and ``1:30`` are
    text, which a field that wants a number refuses by name.
    """
    return Node(_meaning(text), origin, text)


def _meaning(text: str) -> Scalar:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            return number if abs(number) != float("inf") else text
    return text
