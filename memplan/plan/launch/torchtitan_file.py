"""A torchtitan configuration as nodes that know their lines: a TOML file, or the JSON that a job has saved."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import ABSENT, Origin, PlanError
from ..node import Node
from ..text import STANDARD_INPUT, path_of, read_standard_input, read_text
from ..yaml_nodes import parse_yaml

_HEADER = re.compile(r"\s*\[\s*([^\[\]#]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w\"'.\- ]+?)\s*=")
_PLACE = re.compile(r" ?\(at (?:line (\d+), column \d+|end of document)\)")


def read_configuration(place: str) -> tuple[Node, bool]:
    """The configuration at ``place``, and whether it is JSON."""
    if place == "-":
        return configuration_of(read_standard_input(), STANDARD_INPUT)
    return configuration_of(read_text(path_of(place)), place)


def configuration_of(text: str, name: str) -> tuple[Node, bool]:
    """The configuration ``text``, which errors call ``name``, and whether it is JSON."""
    if not text.strip():
        raise PlanError("", ABSENT, "is empty", origin=Origin(name))
    if text.lstrip()[0] == "{":
        # Tabs may indent JSON, and not YAML.
        return parse_yaml(text.expandtabs(2), name), True
    return parse_toml(text, name), False


def parse_toml(text: str, source: str) -> Node:
    """The TOML document in ``text``; ``source`` is what errors call it."""
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        read = toml.loads(text.replace("\r\n", "\n"))
    except toml.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        line = place[1] if place is not None else None
        last = text.rstrip().count("\n") + 1
        problem = _PLACE.sub("", message)
        where = Origin(source, int(line) if line else last)
        raise PlanError("", ABSENT, f"is not valid TOML: {problem[:1].lower()}{problem[1:]}", origin=where) from None
    except RecursionError:
        raise PlanError("", ABSENT, "is nested too deeply", origin=Origin(source)) from None
    return _node(read, (), _lines(text), Origin(source))


def _node(value: Any, path: tuple[str, ...], lines: Mapping[tuple[str, ...], int], around: Origin) -> Node:
    origin = Origin(around.source, lines.get(path, around.line))
    if isinstance(value, dict):
        return Node({key: _node(item, (*path, key), lines, origin) for key, item in value.items()}, origin)
    if isinstance(value, list):
        return Node([_node(item, (*path, "[]"), lines, origin) for item in value], origin)
    plain = value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
    return Node(plain, origin)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of every section's header and of every key, as far as they stand at the beginning of one."""
    found: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.fullmatch(line)
        if header is not None:
            section = _path(header[1])
            found.setdefault(section, number)
            continue
        key = _KEY.match(line)
        if key is not None:
            found.setdefault((*section, *_path(key[1])), number)
    return found


def _path(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
