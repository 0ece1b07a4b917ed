"""The database of records: an SQLite file, its migrations, and what is read from and written to it.

What a record says of its GPU that holds for other plans, too.

Only what has a name, and what a run measures apart from everything else. Never learned are the allocator's overhead,
which is no property of a GPU (the replay derives reserved bytes from the order of the plan's own tensors, and a
correction would hide where that is wrong), and efficiencies: seconds of whole steps do not tell products, collectives
and kernels that stream apart.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..device.measured import CONTEXT, LARGEST, NCCL, WORKSPACES, Measurement, Ran, code_of, holds_workspaces, setting
from ..plan.errors import ABSENT, Origin, PlanError, wrong_at
from .place import VARIABLE, path_of_records
from .readings import RankReading, Run
from .record import Record, from_text, to_text


def facts_of(record: Record) -> tuple[Measurement, ...]:
    """What ``record`` teaches: nothing unless it ran to its end on GPUs of one kind that memplan knows."""
    run = record.run
    alike = len({rank.device for rank in run.ranks}) == 1
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", run.versions.torch)
    if run.device != "cuda" or run.world == "fake" or run.failures or run.gpu is None or not alike or release is None:
        return ()
    plan = record.estimate.to_json()["plan"]
    communicators = run.world == "real" and len(run.ranks) > 1
    ran = Ran(run.code, (int(release[1]), int(release[2])), len(run.ranks), record.hardware.nodes, communicators)
    return tuple(
        Measurement(name, run.gpu, setting(name, plan, ran), stage, size, record.time, record.id, _versions(run))
        for name, stage, size in _sizes(record)
        if 0 <= size <= LARGEST
    )


def _sizes(record: Record) -> Iterator[tuple[str, int | None, int]]:
    ranks = record.run.ranks
    contexts = [rank.context for rank in ranks if rank.context]
    if contexts:
        yield CONTEXT, None, max(contexts)
    same_code = record.run.code == code_of(record.ran.framework)
    workspaces = {rank.workspaces for rank in ranks}
    if same_code and len(workspaces) == 1 and not holds_workspaces(record.ran.framework):
        (size,) = workspaces
        if size is not None:
            yield WORKSPACES, None, size
    if same_code and _is_whole(record):
        for stage in sorted({rank.stage for rank in ranks}):
            yield NCCL, stage, max(rank.nccl or 0 for rank in ranks if rank.stage == stage)


def _is_whole(record: Record) -> bool:
    """Every rank of the plan ran in a process group of theirs, on machines as the plan has them, and was measured."""
    ranks, hardware = record.run.ranks, record.ran.hardware
    per_node = Counter(rank.host for rank in ranks)
    as_planned = len(ranks) == hardware.gpus and max(per_node.values()) == min(len(ranks), hardware.gpus_per_node)
    return record.run.world == "real" and len(ranks) > 1 and as_planned and all(map(_has_nccl, ranks))


def _has_nccl(rank: RankReading) -> bool:
    return rank.nccl is not None


def _versions(run: Run) -> str:
    """What of the machine a reader may compare with another."""
    named = (("torch", run.versions.torch), ("CUDA", run.versions.cuda), ("driver", run.versions.driver))
    return ", ".join(f"{name} {version}" for name, version in named if version)


# -- connection ------------------------------------------------------------------------------------------

APPLICATION = 0x6D656D70
"""``PRAGMA application_id``: the file is memplan's."""
PATIENCE = 5.0
"""Seconds that a command waits for others that write; each does for milliseconds."""

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
        where = f"{path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(where, timeout=patience, isolation_level=None, uri=True)
        connection.text_factory = _readable
    try:
        with errors_of(path):
            _prepare(connection, path, migrations)
        yield connection
    finally:
        connection.close()


def _readable(text: bytes) -> str:
    """Text of a file that another program may have changed. A record in it has a checksum of its own."""
    return text.decode(errors="replace")


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
        raise wrong_at(str(path), f"is a database of another program; {VARIABLE} names another directory")
    if version > newest:
        raise wrong_at(
            str(path), f"was written by a newer memplan (version {version}; this one knows {newest}): upgrade this one"
        )
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


class InUseError(PlanError):
    """Another process keeps the database for itself."""


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """SQLite's and the file system's errors as one line that names the file."""
    origin = Origin(str(path))
    try:
        yield
    except OSError as error:
        raise wrong_at(
            origin, f"cannot be made: {(error.strerror or str(error)).lower()}; {VARIABLE} names another directory"
        ) from None
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise InUseError("", ABSENT, "is in use by another process; try again later", origin=origin) from None
        raise wrong_at(origin, _words(str(error))) from None


_WORDS = (
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


# -- database --------------------------------------------------------------------------------------------

_NEWEST_FIRST = "ORDER BY time DESC, id"


class Row(NamedTuple):
    """What the list of runs has of one, besides its record, as text, whatever another program wrote there."""

    number: int
    """SQLite's own."""
    id: str
    time: str
    model: str
    gpu: str | None


class Unreadable(NamedTuple):
    """A row whose record cannot be read."""

    id: str
    time: str
    model: str
    gpu: str | None
    problem: str


class Database:
    """Open, from ``open_database``."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path

    def add(self, record: Record, *, imported: bool = False) -> bool:
        """Keeps ``record``, whole, and what it teaches with it; whether it is new here. ``imported``: it ran elsewhere.

        One of the same id and time is there already, and stays as it is: a shared file says less than it does.
        """
        with errors_of(self.path), transaction(self.connection):
            known = self.connection.execute("SELECT time FROM runs WHERE id = ?", (record.id,)).fetchone()
            if known is not None:
                if known[0] == record.time:
                    return False
                raise PlanError(
                    "id",
                    record.id,
                    f"is there already, as a run of {known[0]}; memplan runs {record.id} --delete removes that",
                    origin=Origin(str(self.path)),
                )
            gpu = record.run.gpu or record.hardware.gpu
            row = (record.id, record.time, record.ran.model.name, gpu, imported, to_text(record))
            self.connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)
            facts = [
                (record.id, one.name, one.gpu, one.setting, one.stage, one.bytes, one.time, one.versions, imported)
                for one in facts_of(record)
            ]
            self.connection.executemany("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", facts)
        return True

    def records(self, gpu: str | None = None, model: str | None = None) -> Iterator[Record | Unreadable]:
        """Newest first; of GPUs and models whose names contain the given text, in whatever case."""
        for row in self._rows():
            if _contains(row.gpu, gpu) and _contains(row.model, model):
                try:
                    yield self._record(row)
                except InUseError:
                    raise
                except PlanError as error:
                    yield Unreadable(row.id, row.time, row.model, row.gpu, str(error))

    def _rows(self) -> list[Row]:
        """Newest first."""
        with errors_of(self.path):
            found = self.connection.execute(f"SELECT rowid, id, time, model, gpu FROM runs {_NEWEST_FIRST}").fetchall()
        return [
            Row(number, _text(id_), _text(time), _text(model), None if gpu is None else _text(gpu))
            for number, id_, time, model, gpu in found
        ]

    def _record(self, row: Row) -> Record:
        with errors_of(self.path):
            found = self.connection.execute("SELECT record FROM runs WHERE rowid = ?", (row.number,)).fetchone()
        source = f"{self.path}, run {row.id}"
        if found is None:
            raise wrong_at(source, "was removed meanwhile")
        if not isinstance(found[0], str):
            raise PlanError("record", ABSENT, "is not text: another program changed it", origin=Origin(source))
        record = from_text(found[0], source)
        if (record.id, record.time) != (row.id, row.time):
            raise PlanError(
                "record",
                ABSENT,
                f"is run {record.id} of {record.time}: another program changed the row",
                origin=Origin(source),
            )
        return record

    def ids(self) -> list[str]:
        """Newest first."""
        return [row.id for row in self._rows()]

    def named(self, prefix: str) -> Row:
        """The run whose id is ``prefix``, or begins with it. ``PlanError`` where none or several do."""
        rows = self._rows()
        ids = [row.id for row in rows]
        found = [row for row in rows if row.id.lower().startswith(prefix.lower())] if prefix else []
        exact = [row for row in found if row.id == prefix]
        if exact or len(found) == 1:
            return (exact or found)[0]
        origin = Origin("memplan runs")
        if not found:
            known = f"the newest is {shortest(ids[0], ids)}" if ids else "no run is recorded"
            raise wrong_at(origin, f"{prefix or 'nothing'} is the id of no run; {known}")
        several = ", ".join(shortest(row.id, ids) for row in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise wrong_at(origin, f"{prefix} begins the ids of {len(found)} runs, {several}{more}: give more of it")

    def find(self, prefix: str) -> Record:
        """The record whose id begins with ``prefix``."""
        return self._record(self.named(prefix))

    def delete(self, prefix: str) -> str:
        """Removes a record, which may be one that cannot be read, and what was learned from it; gives its id."""
        row = self.named(prefix)
        with errors_of(self.path), transaction(self.connection):
            self.connection.execute(
                "DELETE FROM facts WHERE run IN (SELECT id FROM runs WHERE rowid = ?)", (row.number,)
            )
            self.connection.execute("DELETE FROM runs WHERE rowid = ?", (row.number,))
        return row.id


def _text(value: object) -> str:
    """A column that is to be text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else str(value)


def _contains(text: str | None, part: str | None) -> bool:
    return part is None or (text is not None and part.lower() in text.lower())


SHORTEST = 6
"""Characters of an id that are shown at least."""


def shortest(id_: str, ids: Sequence[str]) -> str:
    """The beginning of ``id_`` that none of the other ``ids`` have."""
    lengths = range(SHORTEST, len(id_))
    enough = (size for size in lengths if not any(one != id_ and one.startswith(id_[:size]) for one in ids))
    return id_[: next(enough, len(id_))]


@contextmanager
def open_database(path: Path | None = None, *, patience: float = PATIENCE) -> Iterator[Database]:
    """The user's records; the file is made if there is none yet."""
    path = path_of_records() if path is None else path
    with connected(path, patience=patience) as connection:
        yield Database(connection, path)
