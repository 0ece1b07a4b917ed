"""The folder of a run's files: made in the temporary directory, locked while the run lives, always removed.

Whoever removes it: the run itself; its keeper, if the run is killed; and the next run of the same user, if both were.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..plan.errors import LackingError, one_line
from .processes import end_all, marked

PREFIX = "memplan-run-"
LOCK = "lock"
TEMPORARY = "tmp"
"""What the workers have as ``TMPDIR``, so that what libraries leave there goes with the folder."""
LEAST_FREE = 16 << 20
"""Bytes: room for what the ranks print and measure."""
YOUNG = 60.0
"""Seconds that a folder may exist before it is locked."""


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new one; what runs of this user left behind goes. ``LackingError`` where none can be made."""
    _remove_left_ones()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise _unusable(_temporary(), error.strerror or str(error)) from None
    try:
        yield from _locked(folder)
    finally:
        _remove(folder)


def _locked(folder: Path) -> Iterator[Path]:
    try:
        (folder / TEMPORARY).mkdir()
        (folder / LOCK).write_text(socket.gethostname(), encoding="utf-8")
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError as error:
        raise _unusable(str(folder.parent), error.strerror or str(error)) from None
    try:
        with suppress(OSError):  # file systems without locks: the age decides
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE:
            raise _unusable(str(folder.parent), f"{free:,} bytes are free, and {LEAST_FREE:,} are wanted")
        yield folder
    finally:
        os.close(lock)


def _unusable(where: str, why: str) -> LackingError:
    line = f"memplan validate cannot keep its run's files in {where}: {why}; set TMPDIR to a folder that has room"
    return LackingError(one_line(line))


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "a temporary folder"


def _remove(folder: Path) -> None:
    """A process that could not be ended may still write: what is left then goes with the next run."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _remove_left_ones() -> None:
    """Folders of runs whose every guard was killed, and what still runs of them."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                if folder.stat().st_uid == os.getuid() and _is_left(folder):
                    end_all(lambda mark=str(folder): marked(mark), 0)  # type: ignore[misc]
                    _remove(folder)


def _is_left(folder: Path) -> bool:
    """Whether nobody holds its lock, nor can be about to, nor has it from another machine, whose locks cannot always
    be seen from here."""
    if time.time() - folder.stat().st_mtime < YOUNG or (folder / LOCK).read_text() != socket.gethostname():
        return False
    lock = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
