"""Flags whose value says more than one thing, taken apart: ``--gpu 8xh100``, ``--framework torchtitan``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from .errors import ABSENT, Origin, PlanError
from .spellings import gpus_called, plain

Flags: TypeAlias = "Mapping[str, str | tuple[str, ...]]"

_COUNT = r"([1-9][0-9]{0,5})"
_TIMES = r"\s*[xX\u00d7*]\s*"
_GPU_AND_COUNT = re.compile(rf"\s*(?:{_COUNT}{_TIMES})?{_COUNT}{_TIMES}(\S.*?)\s*")
_COUNT_LAST = re.compile(rf"\s*(?:gpu:)?(\S.*?)(?:{_TIMES}|\s*:\s*){_COUNT}\s*")
_NODES_AND_GPUS = re.compile(rf"\s*{_COUNT}{_TIMES}{_COUNT}\s*")


def with_said_at_once(flags: Flags) -> Flags:
    """``flags`` where each says one thing: ``--gpu 8xh100`` is ``gpu`` and ``gpus``, ``--framework torchtitan`` a
    framework and whose code runs on it."""
    from ..frameworks import STAND_FOR

    named = flags.get("framework")
    stands_for = STAND_FOR.get(plain(named), {}) if isinstance(named, str) else {}
    for name, value in stands_for.items():
        said = flags.get(name, value) if name != "framework" else value
        if said != value:
            raise PlanError("", ABSENT, f"{said} is not the {value} of --framework {named}", origin=Origin(f"--{name}"))
    return _counted({**flags, **stands_for})


def gpus_named(text: str) -> tuple[str, int, int | None] | None:
    """The GPU, their number, and how many of them a node has where that is said, of ``8xH100``, ``h100:8`` or
    ``2x8xH100``; ``None`` where ``text`` names no GPU with a number."""
    if gpus_called(text):
        return None
    for pattern, order in ((_GPU_AND_COUNT, (3, 2, 1)), (_COUNT_LAST, (1, 2, 0))):
        match = pattern.fullmatch(text)
        if match is not None and gpus_called(match[order[0]]):
            nodes = match[order[2]] if order[2] else None
            each = int(match[order[1]])
            return match[order[0]], each * int(nodes or 1), each if nodes else None
    return None


def _counted(flags: Flags) -> Flags:
    """``flags`` where ``gpu`` is a name alone, and ``gpus`` a number: ``8xh100`` is ``gpu`` h100 and ``gpus`` 8,
    ``--gpus 2x8`` two nodes of eight."""
    made = dict(flags)
    for flag in ("gpu", "gpus"):
        text = made.get(flag)
        if not isinstance(text, str) or text.isdigit():
            continue
        nodes = _NODES_AND_GPUS.fullmatch(text) if flag == "gpus" else None
        found = gpus_named(text)
        if found is not None:
            _say(made, "gpu", found[0], flag, text)
            _say(made, "gpus", str(found[1]), flag, text)
            if found[2] is not None:
                _say(made, "gpus-per-node", str(found[2]), flag, text)
        elif nodes is not None:
            _say(made, "gpus", str(int(nodes[1]) * int(nodes[2])), flag, text)
            _say(made, "gpus-per-node", nodes[2], flag, text)
    return made


def _say(flags: dict[str, str | tuple[str, ...]], name: str, value: str, by: str, text: str) -> None:
    """Sets the flag ``name`` to what ``--by text`` says of it, unless it says another thing itself."""
    said = value if name == by else flags.get(name, value)
    alike = said == value or (name == "gpu" and isinstance(said, str) and gpus_called(said) == gpus_called(value))
    if not alike:
        raise PlanError("", ABSENT, f"{said} is not the {value} of --{by} {text}", origin=Origin(f"--{name}"))
    flags[name] = value if name == by else said
