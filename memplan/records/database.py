"""All records of a user, in one SQLite file (``connection``)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..plan.errors import ABSENT, Origin, PlanError
from .connection import PATIENCE, connected, errors_of, transaction
from .learned import facts_of
from .place import path_of_records
from .record import Record, from_text, to_text

_NEWEST_FIRST = "ORDER BY time DESC, id"


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
                problem = f"is there already, as a run of {known[0]}; memplan runs {record.id} --delete removes that"
                raise PlanError("id", record.id, problem, origin=Origin(str(self.path)))
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
        with errors_of(self.path):
            rows = self.connection.execute(f"SELECT id, time, model, gpu FROM runs {_NEWEST_FIRST}").fetchall()
        for row in rows:
            if _contains(row[3], gpu) and _contains(row[2], model):
                try:
                    yield self._record(row[0])
                except PlanError as error:
                    yield Unreadable(row[0], row[1], row[2], row[3], str(error))

    def _record(self, id_: str) -> Record:
        with errors_of(self.path):
            row = self.connection.execute("SELECT record FROM runs WHERE id = ?", (id_,)).fetchone()
        return from_text(str(row[0]) if row else "", f"{self.path}, run {id_}")

    def ids(self) -> list[str]:
        """Newest first."""
        with errors_of(self.path):
            return [id_ for (id_,) in self.connection.execute(f"SELECT id FROM runs {_NEWEST_FIRST}")]

    def named(self, prefix: str) -> str:
        """The id that begins with ``prefix``. ``PlanError`` where none or several do."""
        ids = self.ids()
        found = [id_ for id_ in ids if id_.startswith(prefix.lower())] if prefix else []
        if len(found) == 1:
            return found[0]
        origin = Origin("memplan runs")
        if not found:
            known = f"the newest is {shortest(ids[0], ids)}" if ids else "no run is recorded"
            raise PlanError("", ABSENT, f"{prefix or 'nothing'} is the id of no run; {known}", origin=origin)
        several = ", ".join(shortest(id_, ids) for id_ in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        problem = f"{prefix} begins the ids of {len(found)} runs, {several}{more}: give more of it"
        raise PlanError("", ABSENT, problem, origin=origin)

    def find(self, prefix: str) -> Record:
        """The record whose id begins with ``prefix``."""
        return self._record(self.named(prefix))

    def delete(self, prefix: str) -> str:
        """Removes a record, which may be one that cannot be read, and what was learned from it; gives its id."""
        id_ = self.named(prefix)
        with errors_of(self.path), transaction(self.connection):
            self.connection.execute("DELETE FROM facts WHERE run = ?", (id_,))
            self.connection.execute("DELETE FROM runs WHERE id = ?", (id_,))
        return id_


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
