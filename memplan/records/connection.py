"""The SQLite file of records: opening it, its tables, transactions, and its errors as a line.

A rollback journal, never a write-ahead log, because home directories are often on NFS, where the log's shared memory
does not work (https://sqlite.org/wal.html). Each write is one transaction that begins by taking the lock, so that
parallel runs wait for one another, and a process that is killed leaves all of a record or nothing. What cannot be read
is said in a line, and never removed or written over.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..plan.errors import ABSENT, Origin, PlanError
from .place import VARIABLE

APPLICATION = 0x6D656D70
"""``PRAGMA application_id``: the file is memplan's."""
PATIENCE = 30.0
"""Seconds that a writer waits for others."""

Migration = Callable[[sqlite3.Connection], None]


def _first_tables(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE runs (id TEXT PRIMARY KEY, time TEXT NOT NULL, model TEXT NOT NULL, gpu TEXT, "
        "imported INTEGER NOT NULL, record TEXT NOT NULL)"
    )
    connection.execute("CREATE INDEX runs_by_time ON runs (time, id)")
    connection.execute(
        "CREATE TABLE facts (run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, name TEXT NOT NULL, "
        "gpu TEXT NOT NULL, setting TEXT NOT NULL, stage INTEGER, bytes INTEGER NOT NULL, time TEXT NOT NULL, "
        "versions TEXT NOT NULL, imported INTEGER NOT NULL)"
    )
    connection.execute("CREATE INDEX facts_by_run ON facts (run)")


MIGRATIONS: tuple[Migration, ...] = (_first_tables,)
"""Each from one version of the tables to the next; a version is the number of those that were applied."""


@contextmanager
def connected(
    path: Path, *, patience: float = PATIENCE, migrations: Sequence[Migration] = MIGRATIONS
) -> Iterator[sqlite3.Connection]:
    """The database at ``path``, made if there is none yet, its tables as this memplan has them."""
    with errors_of(path):
        _make(path)
        # Not "rwc": a file that vanishes meanwhile is an error. What is read-only opens, and is refused when written.
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", patience, isolation_level=None, uri=True)
    try:
        with errors_of(path):
            _prepare(connection, path, migrations)
        yield connection
    finally:
        connection.close()


def _make(path: Path) -> None:
    """An empty file, readable by its owner alone, and the directories above."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _prepare(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    newest = len(migrations)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = EXTRA")  # the directory is synchronised, too, once the journal is gone
    if _version(connection, path, newest) == newest:
        return
    connection.execute("PRAGMA journal_mode = DELETE")
    with transaction(connection):
        for migration in migrations[_version(connection, path, newest) :]:  # another process may have been quicker
            migration(connection)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {newest}")


def _version(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    """How many migrations the tables have seen. ``PlanError`` for those of a newer memplan, or another program."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION and (version or application or tables):
        problem = f"is a database of another program; {VARIABLE} names another directory"
        raise PlanError("", ABSENT, problem, origin=Origin(str(path)))
    if version > newest:
        problem = f"was written by a newer memplan (version {version}; this one knows {newest}): upgrade this one"
        raise PlanError("", ABSENT, problem, origin=Origin(str(path)))
    return int(version)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. The lock is taken at once: two that first read would each wait for the other to write."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled back itself
            connection.execute("ROLLBACK")
        raise


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """SQLite's and the file system's errors as one line that names the file."""
    origin = Origin(str(path))
    try:
        yield
    except OSError as error:
        problem = f"cannot be made: {(error.strerror or str(error)).lower()}; {VARIABLE} names another directory"
        raise PlanError("", ABSENT, problem, origin=origin) from None
    except sqlite3.Error as error:
        raise PlanError("", ABSENT, _words(str(error)), origin=origin) from None


_WORDS = (
    ("locked", "is in use by another process, which did not end in time; try again"),
    ("readonly", f"cannot be written: it, or its directory, is read-only; {VARIABLE} names another directory"),
    ("full", f"cannot be written: no space is left; {VARIABLE} names another directory"),
    ("unable to open", f"cannot be opened; {VARIABLE} names another directory"),
    ("disk I/O", f"cannot be read or written: disk I/O error; {VARIABLE} names another directory"),
)
_DAMAGED = (
    "is damaged ({}); nothing was changed: move it away for a new one to be made, `sqlite3 FILE .recover` may rescue it"
)


def _words(message: str) -> str:
    return next((words for part, words in _WORDS if part in message), _DAMAGED.format(message))
