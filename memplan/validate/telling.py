"""What a worker tells whoever started it: what it does, what it measured, why it failed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .rank_files import RankFiles, write_json, write_whole

if TYPE_CHECKING:
    from .readings import RankReading


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
