"""A campaign's file: a line of JSON for the machine, then one for each case, written to the disk at once.

A line that a machine did not finish, because it was taken away, is left out when the file is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

DONE = ("measured", "refused", "failed")
"""States of a case that need not run again. One that the campaign's own end cut short is ``unfinished``, and one that
found the device in use, or a package missing, ``lacking``."""


def append(path: Path, line: Line) -> None:
    """Adds ``line`` to the file. When this returns, the line survives the machine. A last line that was cut short is
    ended first."""
    data = json.dumps(line, allow_nan=False).encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            data = data if file.read(1) == b"\n" else b"\n" + data
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Whole lines of files, in order; a line that appears twice is there once. ``OSError`` of a file that cannot be
    read."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                found[text] = line
    return list(found.values())


def last_of_each(lines: Iterable[Line]) -> dict[str, Line]:
    """The last line of each case, by name; a case that was measured once stays so."""
    found: dict[str, Line] = {}
    for line in lines:
        name = line.get("case")
        if name is not None and not (name in found and _is_better(found[name], line)):
            found[name] = line
    return found


def _is_better(old: Line, new: Line) -> bool:
    return old["status"] == "measured" and new["status"] != "measured"


def done(lines: Iterable[Line]) -> set[str]:
    """Names of cases that need not run again."""
    return {name for name, line in last_of_each(lines).items() if line["status"] in DONE}


def machines(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if "machine" in line]
