"""Keys of torchtitan's configuration, the days on which each was one, the day's code that a file was written for, and
the file itself: TOML, or the JSON that a job has saved, as nodes that know their lines.

The table is ``arguments/torchtitan.txt``. Days are text, ``2025-10-17``, which sorts as they do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...bash.origin import Budget, ScriptError
from ...plan.errors import Node, Origin, PlanError, nearest, refused, wrong_at
from ...plan.text import parse_yaml, text_at
from ...values import dataclass
from ..settings import Table

RELEASES = MappingProxyType(
    {"0.1.0": "2025-06-17", "0.2.0": "2025-10-17", "0.2.1": "2025-12-26", "0.2.2": "2026-02-20"}
)
"""The day of each release."""
NEWEST = "2026-08-21"
"""The day of the newest code that the table has keys of."""
NO_TOML = "2026-02-23"
"""The day on which TOML files ended."""
SAVED = "2025-10-21"
"""The day from which a job saves its configuration as JSON."""
NO_FSDP2 = "2024-03-28"
"""The day on which ``fully_shard`` came."""

_LONGEST_NUMBER = 4300
"""Digits that Python reads."""
_ANOTHER = "--set torchtitan=RELEASE (or a day) names another"
_FILE = Path(__file__).parents[1] / "arguments" / "torchtitan.txt"
_TABLE = re.compile(r"\[(modelled|irrelevant|not-modelled)\](?: (.*))?")
_ROW = re.compile(r"([\w.*]+) (\d{4}-\d\d-\d\d) (\d{4}-\d\d-\d\d|-)(?: =(\S*))?(?: if (\S+))?")


@dataclass(frozen=True, slots=True)
class Key:
    """One key: a ``*`` at its end stands for all keys of a section that have no line of their own."""

    name: str
    since: str
    until: str
    """The first day without it."""
    table: Table
    why: str
    """Why it does not matter, or which way it pushes memory."""
    default: str | None
    """Of a key that is not modelled: the value with which it does nothing, if not false or empty."""
    conditions: tuple[str, ...]
    """It matters only where one of these keys is true."""

    def was(self, day: str) -> bool:
        """Whether it was a key on ``day``."""
        return self.since <= day < self.until


@dataclass(frozen=True, slots=True)
class Era:
    """The code that a file is read for."""

    day: str
    why: str

    @property
    def label(self) -> str:
        """As ``torchtitan 0.2.2 (2026-02-20)``."""
        release = next((name for name, day in RELEASES.items() if day == self.day), None)
        return f"torchtitan {release} ({self.day})" if release else f"torchtitan of {self.day}"


@cache
def keys() -> Mapping[str, Key]:
    """Every key by its name."""
    found: dict[str, Key] = {}
    table, why = Table.MODELLED, ""
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        heading = _TABLE.fullmatch(line)
        if heading is not None:
            table, why = Table(heading[1]), heading[2] or ""
            continue
        if not line or line.startswith("#"):
            continue
        match = _ROW.fullmatch(line)
        if match is None or match[1] in found:
            raise ValueError(f"cannot be read as a key, or is one for the second time: {line}")
        until = "9999-12-31" if match[3] == "-" else match[3]
        conditions = tuple(match[5].split(",")) if match[5] else ()
        found[match[1]] = Key(match[1], match[2], until, table, why, match[4], conditions)
    return MappingProxyType(found)


@cache
def sections() -> frozenset[str]:
    """Names that have keys below them: ``training``, ``quantize.linear.float8``."""
    parents = {name.rpartition(".")[0] for name in keys()}
    return frozenset(
        ".".join(parent.split(".")[:size]) for parent in parents if parent for size in range(1, parent.count(".") + 2)
    )


def key_of(name: str) -> Key | None:
    """The key called ``name``, or else the line that stands for its section."""
    known = keys()
    found = known.get(name)
    section = name
    while found is None and "." in section:
        section = section.rpartition(".")[0]
        found = known.get(f"{section}.*")
    return found


def nearest_key(name: str, day: str) -> str | None:
    """The key of ``day`` that ``name`` was probably meant to be: in its own section, or the same in another one."""
    known = [key.name for key in keys().values() if key.was(day) and not key.name.endswith("*")]
    section, _, last = name.rpartition(".")
    moved = [other for other in known if other.rpartition(".")[2] == last]
    if len(moved) == 1:
        return moved[0]
    guess = nearest(last, [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section])
    return f"{section}.{guess}" if guess and " or " not in guess else nearest(name, known, cutoff=0.8)


def era_of(names: Iterable[str], *, is_json: bool, version: str | None, is_python: bool = False) -> Era:
    """The code that a file with the keys ``names`` was written for: the newest release that has them all.

    Where no release has, the last day on which they were keys together. ``version`` is what the user said.
    """
    if version is not None:
        return Era(_day(version), "as --set says")
    first, end = (
        (NO_TOML if is_python else SAVED, "9999-12-31")
        if is_json or is_python
        else (min(key.since for key in keys().values()), NO_TOML)
    )
    known = [key for key in (key_of(name) for name in names) if key is not None and first < key.until]
    since = max((key.since for key in known if key.since < end), default=first)
    since = max(since, first)
    until = min([end, *(key.until for key in known if key.until > since)])
    between = f"which were keys together from {since} "
    between += f"until {until}" if until <= NEWEST else f"to {NEWEST}"
    released = [day for day in RELEASES.values() if since <= day < until]
    if released:
        return Era(released[-1], f"the newest release with all keys of the file ({between}); {_ANOTHER}")
    day = NEWEST if until > NEWEST else (date.fromisoformat(until) - timedelta(days=1)).isoformat()
    return Era(day, f"the newest code with all keys of the file ({between}), which no release has; {_ANOTHER}")


def _day(version: str) -> str:
    """The day of the release or day that ``--set torchtitan`` names."""
    release = RELEASES.get(version.removeprefix("v"))
    if release is not None:
        return release
    try:
        return date.fromisoformat(version).isoformat()
    except ValueError:
        problem = f"must be a release ({', '.join(RELEASES)}) or a day, as 2024-12-26"
        raise PlanError("torchtitan", version, problem, origin=Origin("--set")) from None


DEEPEST = 32
"""Nesting that a configuration may have."""
MOST_PARTS = 200
"""Dots that a line may have: ``tomllib`` takes a time that grows with the square of a dotted key's parts."""
_CHARACTER = 12
"""Steps of a character: ``tomllib`` reads one after the other."""
_VALUE = 20
"""Steps of a value."""
_PLACE = re.compile(r" ?\(at (?:line (\d+), column \d+|end of document)\)")


def read_configuration(place: str) -> tuple[Node, bool]:
    """The configuration at ``place``, and whether it is JSON."""
    return configuration_of(*text_at(place))


def configuration_of(text: str, name: str) -> tuple[Node, bool]:
    """The configuration ``text``, which errors call ``name``, and whether it is JSON."""
    if not text.strip():
        raise wrong_at(name, "is empty")
    if text.lstrip()[0] == "{":
        # Tabs may indent JSON, and not YAML.
        return parse_yaml(text.expandtabs(2), name), True
    return parse_toml(text, name), False


def parse_toml(text: str, source: str) -> Node:
    """The TOML document in ``text``; ``source`` is what errors call it."""
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text, budget = text.replace("\r\n", "\n"), Budget(Origin(source))
    try:
        budget.spend(_CHARACTER * len(text))
        for number, line in enumerate(text.split("\n"), 1):
            if line.count(".") > MOST_PARTS:
                raise wrong_at(
                    Origin(source, number),
                    f"has a line with more than {MOST_PARTS} dots, which a configuration does not have",
                )
        return _node(toml.loads(text), (), _lines(text), budget, Origin(source))
    except ScriptError as error:
        raise refused(error) from None
    except toml.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        named = place[1] if place is not None else None
        last = text.rstrip().count("\n") + 1
        problem = _PLACE.sub("", message)
        where = Origin(source, int(named) if named else last)
        raise wrong_at(where, f"is not valid TOML: {problem[:1].lower()}{problem[1:]}") from None
    except RecursionError:
        raise wrong_at(source, "is nested too deeply") from None
    except PlanError:
        raise
    except ValueError as error:  # a number of thousands of digits
        digits = next((number for number, line in enumerate(text.split("\n"), 1) if _has_long_number(line)), None)
        long = f"has a number of more than {_LONGEST_NUMBER:,} digits"
        problem = long if digits is not None else f"is not valid TOML: {error}"
        raise wrong_at(Origin(source, digits), problem) from None


def _has_long_number(line: str) -> bool:
    return any(len(digits[0]) > _LONGEST_NUMBER for digits in re.finditer(r"[0-9_]+", line))


def _node(
    value: Any, path: tuple[str, ...], lines: Mapping[tuple[str, ...], int], budget: Budget, around: Origin
) -> Node:
    origin = Origin(around.source, lines.get(path, around.line))
    budget.make(1, 0, origin, steps=_VALUE)
    if len(path) > DEEPEST:
        raise wrong_at(origin, f"is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return Node({key: _node(item, (*path, key), lines, budget, origin) for key, item in value.items()}, origin)
    if isinstance(value, list):
        return Node([_node(item, (*path, "[]"), lines, budget, origin) for item in value], origin)
    plain = value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
    return Node(plain, origin)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of every section's header and of every key, as far as they stand at the beginning of one."""
    found: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        name, _, rest = line.strip().partition("#")[0].partition("]")
        if name.startswith("[") and not name.startswith("[[") and not rest.strip():
            section = _path(name[1:])
            _note(found, section, number)
            continue
        key, equals, _ = line.partition("=")
        if equals and key.strip() and not key.lstrip().startswith("#"):
            _note(found, (*section, *_path(key)), number)
    return found


def _note(found: dict[tuple[str, ...], int], path: tuple[str, ...], line: int) -> None:
    """That ``path``, and what is around it, stand on ``line`` if they stand on none before."""
    for size in range(1, min(len(path), DEEPEST + 2) + 1):
        found.setdefault(path[:size], line)


def _path(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
