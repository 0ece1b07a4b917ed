"""What every argument of a launch script means for memory: modelled, irrelevant, or not modelled yet.

The tables are text files beside this one, in ``arguments/``, each with the commit of the parser whose
arguments it has. Every argument is in exactly one table, under a line that says why it does not matter
(irrelevant) or which way it pushes (not modelled: ``more``, ``less``, ``either``; ``refused`` where it changes so
much that no estimate would mean anything).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..errors import nearest

Launched = Literal["megatron", "megatron-deepspeed"]
"""Frameworks whose launch scripts are read: choices of ``--from``."""

_FOLDER = Path(__file__).parent / "arguments"
_HEADING = re.compile(r"\[(modelled|irrelevant|not-modelled)\](?: (.*))?")
_LINE = re.compile(r"((?:--\S+)(?: --\S+)*)(?: (int|float|str)([*+]|\d+)?)?(?: \{(.*)\})?(?: =(.*))?")


class Table(Enum):
    """Where an argument belongs."""

    MODELLED = "modelled"
    IRRELEVANT = "irrelevant"
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
    """Of an argument that is not modelled: the value with which it does nothing."""
    table: Table
    why: str

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_switch(self) -> bool:
        return not self.type


@cache
def arguments_of(framework: Launched) -> Mapping[str, Argument]:
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


def nearest_argument(name: str, framework: Launched) -> str | None:
    """The argument that ``name`` was probably meant to be."""
    return nearest(name, arguments_of(framework), cutoff=0.75)
