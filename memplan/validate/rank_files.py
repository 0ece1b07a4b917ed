"""The files in which a rank and what guards it speak to each other. Every time in them is ``time.monotonic()``, one
clock for all processes of a machine.

=======================  ====================================================================================
``task.json``            what is to be run: the launcher does not read it
``rank-R.progress``      a line of JSON for each thing that the rank begins to do, appended
``rank-R.json``          its ``RankReading``
``rank-R.failure.json``  why it failed, as it says itself: fields of ``Failure``, and ``at``
``rank-R.log``           what it printed, both streams in their order
``rank-R.pid``           its process
``rank-R.end.json``      ``code``, as ``subprocess`` has it (negative: a signal), and ``at``
``launcher.log``         what the elastic launcher printed, or the guards of emulated ranks
``keeper.log``           what the keeper printed: nothing, unless it failed
=======================  ====================================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASK = "task.json"
LAUNCHER_LOG = "launcher.log"
KEEPER_LOG = "keeper.log"


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank."""

    directory: Path
    rank: int

    @property
    def progress(self) -> Path:
        return self._named("progress")

    @property
    def result(self) -> Path:
        return self._named("json")

    @property
    def failure(self) -> Path:
        return self._named("failure.json")

    @property
    def log(self) -> Path:
        return self._named("log")

    @property
    def pid(self) -> Path:
        return self._named("pid")

    @property
    def end(self) -> Path:
        return self._named("end.json")

    def _named(self, kind: str) -> Path:
        return self.directory / f"rank-{self.rank}.{kind}"


def ranks_in(directory: Path) -> Iterator[RankFiles]:
    """Those that have a file in it, in order."""
    names = (path.name.partition(".")[0].removeprefix("rank-") for path in directory.glob("rank-*.*"))
    for rank in sorted({int(name) for name in names if name.isdigit()}):
        yield RankFiles(directory, rank)


def write_whole(path: Path, content: bytes) -> None:
    """All of ``content`` or nothing, whoever reads or kills meanwhile."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """``None`` where there is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content


def workers_in(directory: Path) -> list[int]:
    """Processes of the ranks that were started."""
    return [int(files.pid.read_bytes()) for files in ranks_in(directory) if files.pid.exists()]


def last_said(content: bytes) -> dict[str, Any] | None:
    """Of a piece of a rank's progress, what it said last. A line that is not whole, where a disk was full, counts as
    none."""
    for line in reversed(content.splitlines()):
        with suppress(ValueError):
            said: dict[str, Any] = json.loads(line)
            return said
    return None
