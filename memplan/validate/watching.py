"""What the files of a run say while it goes on: what each rank does, and the first signs that one failed."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from .rank_files import RankFiles, last_said, ranks_in, read_json

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
