"""Flags whose value says more than one thing, taken apart: ``--gpu 8xh100``, ``--framework torchtitan``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from .errors import ABSENT, Origin, PlanError
from .spellings import gpu_called, plain

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
    return _in_sequences(_counted({**flags, **stands_for}))


def gpus_named(text: str, origin: Origin) -> tuple[str, int, int | None] | None:
    """The GPU, their number, and how many of them a node has where that is said, of ``8xH100``, ``h100:8`` or
    ``2x8xH100``; ``None`` where ``text`` names no GPU with a number."""
    from ..device.gpus import GPUS

    if gpu_called(text, origin) in GPUS:
        return None
    for pattern, order in ((_GPU_AND_COUNT, (3, 2, 1)), (_COUNT_LAST, (1, 2, 0))):
        match = pattern.fullmatch(text)
        if match is not None and gpu_called(match[order[0]], origin) in GPUS:
            nodes = match[order[2]] if order[2] else None
            each = int(match[order[1]])
            return match[order[0]], each * int(nodes or 1), each if nodes else None
    return None


def _counted(flags: Flags) -> Flags:
    """``flags`` where ``gpu`` is a name alone, and ``gpus`` a number: ``8xh100`` is ``gpu`` h100 and ``gpus`` 8,
    ``--gpus 2x8`` two nodes of eight."""
    made = dict(flags)
    for flag in ("gpu", "gpus"):
        text, origin = made.get(flag), Origin(f"--{flag}")
        if not isinstance(text, str) or text.isdigit():
            continue
        nodes = _NODES_AND_GPUS.fullmatch(text) if flag == "gpus" else None
        found = gpus_named(text, origin)
        if found is not None:
            _say(made, "gpu", found[0], flag, text)
            _say(made, "gpus", str(found[1]), flag, text)
            if found[2] is not None:
                _say(made, "gpus-per-node", str(found[2]), flag, text)
        elif nodes is not None:
            _say(made, "gpus", str(int(nodes[1]) * int(nodes[2])), flag, text)
            _say(made, "gpus-per-node", nodes[2], flag, text)
        elif flag == "gpus":
            _check_names_no_gpu(text, origin)
    return made


def _say(flags: dict[str, str | tuple[str, ...]], name: str, value: str, by: str, text: str) -> None:
    """Sets the flag ``name`` to what ``--by text`` says of it, unless it says another thing itself."""
    said = value if name == by else flags.get(name, value)
    alike = said == value or (
        name == "gpu"
        and isinstance(said, str)
        and gpu_called(said, Origin("--gpu")) == gpu_called(value, Origin(f"--{by}"))
    )
    if not alike:
        raise PlanError("", ABSENT, f"{said} is not the {value} of --{by} {text}", origin=Origin(f"--{name}"))
    flags[name] = value if name == by else said


def _check_names_no_gpu(text: str, origin: Origin) -> None:
    from ..device.gpus import GPUS

    if gpu_called(text, origin) in GPUS:
        problem = f"must be a whole number; the GPU's name is --gpu {text}, and both at once --gpu 8x{text}"
        raise PlanError("hardware.gpus", text, problem, origin=origin)


_TOKENS = re.compile(r"(?i)\s*([0-9]+(?:\.[0-9]+)?)\s*([km]?)\s*(tok(?:en)?s?)?\s*")
_SEQUENCES = re.compile(r"([1-9][0-9]{0,5})\s*([kK]?)")


def _in_sequences(flags: Flags) -> Flags:
    """Refuses a global batch in tokens, ``4M``, with how many sequences that is."""
    text, seq = flags.get("gbs"), flags.get("seq")
    match = _TOKENS.fullmatch(text) if isinstance(text, str) else None
    if match is None or not (match[2] or match[3]):
        return flags
    length = _SEQUENCES.fullmatch(seq) if isinstance(seq, str) else None
    each = int(length[1]) << (10 if length[2] else 0) if length is not None else 0
    scale = {"": 0, "k": 10, "m": 20}[match[2].lower()]
    problem = "must be a whole number of sequences: tokens divided by --seq"
    if each:
        problem += f", {max(round(float(match[1]) * (1 << scale) / each), 1):,} of {each:,} tokens each"
    raise PlanError("batch.gbs", text, problem, origin=Origin("--gbs"))
