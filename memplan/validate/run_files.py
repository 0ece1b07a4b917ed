"""The files in which a rank and what guards it speak to each other: their names, what a worker writes in them
(``Telling``), and what they say while the run goes on (``Watch``).

 Every time in them is ``time.monotonic()``, one
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
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..values import dataclass

if TYPE_CHECKING:
    from ..records.readings import RankReading


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
    for rank in sorted({int(name) for name in names if name.isdecimal()}):
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


class Telling:
    """One rank's side of the run's folder."""

    def __init__(self, directory: Path | str, rank: int) -> None:
        self.rank = rank
        self._files = RankFiles(Path(directory), rank)
        self._last = ""

    def says(self, what: str, allocated: int | None = None, total: int | None = None) -> None:
        """It begins to do ``what``, with so many bytes allocated of the device's ``total``. Who says nothing for as
        long as the run's patience lasts, while no other rank does, is taken for hung."""
        self._last = what
        line = {"at": time.monotonic(), "what": what, "allocated": allocated, "total": total}
        file = os.open(self._files.progress, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)

    def result(self, reading: RankReading) -> None:
        """``reading`` is the result of its rank: this one, or one of another machine whose readings this one
        collects."""
        files = RankFiles(self._files.directory, reading.rank)
        write_whole(files.result, reading.model_dump_json().encode())

    def failed(
        self,
        kind: Literal["out-of-memory", "error"],
        message: str,
        *,
        when: str | None = None,
        allocated: int | None = None,
        reserved: int | None = None,
        failing: int | None = None,
    ) -> None:
        """Why it ends early; to be called where the exception is caught, before anything is torn down, since the time
        of this tells the rank that failed first from those that fail because of it. ``when`` is what it last said, if
        left out. Bytes, as in ``Failure``."""
        content = {
            "at": time.monotonic(),
            "rank": self.rank,
            "kind": kind,
            "message": " ".join(message.split()),
            "when": self._last if when is None else when,
            "allocated": allocated,
            "reserved": reserved,
            "failing": failing,
        }
        write_json(self._files.failure, content)


TRACEBACK = re.compile(rb"^(\[rank\d+\]: ?)?Traceback \(most recent call last\):", re.MULTILINE)
"""As Python prints it, and PyTorch with process groups."""
LONGEST_LINE = 1 << 16
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank does."""

    rank: int
    what: str
    at: float
    """``time.monotonic()``, when it began."""
    allocated: int | None = None
    total: int | None = None
    """Bytes of its device, where it told them."""
    done: bool = False
    """Whether its result is there."""


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's process ended."""

    code: int
    at: float


def end_of(files: RankFiles) -> End | None:
    data = read_json(files.end)
    return None if data is None else End(**data)


class _Reader:
    """What was appended to a file since it was last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def more(self) -> bytes:
        """Whole lines, or what could be one of a progress bar that never ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return b""
        whole = content if len(content) > LONGEST_LINE else content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


class _Rank:
    """One rank, from outside."""

    def __init__(self, files: RankFiles) -> None:
        self.files = files
        self.progress: Progress | None = None
        self.traceback_at: float | None = None
        self.failed = False
        """Whether it says so, or ended badly."""
        self.ended_well = False
        """From then on there is nothing new of it."""
        self._says = _Reader(files.progress)
        self._log = _Reader(files.log)

    def look(self) -> None:
        if self.ended_well:
            return
        end = end_of(self.files)
        said = last_said(self._says.more())
        if said is not None:
            self.progress = Progress(self.files.rank, **said)
        done = self.files.result.exists()
        if done and self.progress is not None and not self.progress.done:
            last = self.progress
            self.progress = Progress(last.rank, "done", last.at, last.allocated, last.total, done=True)
        printed = self._log.more()
        if self.traceback_at is None and not done and TRACEBACK.search(printed):
            self.traceback_at = time.monotonic()
        told = self.files.failure.exists()
        self.failed = told or (end is not None and end.code != 0)
        self.ended_well = not told and end is not None and end.code == 0


class Watch:
    """Looks at a run's folder again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self.since = time.monotonic()
        """When a rank last began something, or one of them started."""

    def look(self) -> None:
        for files in ranks_in(self._folder):
            if files.rank not in self._ranks:
                self._ranks[files.rank] = _Rank(files)
                self.since = time.monotonic()
        for rank in self._ranks.values():
            before = rank.progress
            rank.look()
            if rank.progress != before:
                self.since = time.monotonic()

    @property
    def progress(self) -> tuple[Progress, ...]:
        """Of every rank that said anything, in order."""
        return tuple(rank.progress for _, rank in sorted(self._ranks.items()) if rank.progress is not None)

    @property
    def tracebacks(self) -> dict[int, float]:
        """When a traceback was seen, by rank."""
        return {number: rank.traceback_at for number, rank in self._ranks.items() if rank.traceback_at is not None}

    def anyone_failed(self) -> bool:
        return any(rank.failed for rank in self._ranks.values())

    @property
    def started(self) -> bool:
        """Whether any rank did."""
        return bool(self._ranks)

    def quiet_for(self) -> float:
        """Seconds in which no rank began anything."""
        return time.monotonic() - self.since
