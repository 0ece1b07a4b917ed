"""What the user's records say of GPUs, for an estimate: quick, and never in its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device.measured import LARGEST, NOTHING, Measured, Measurement
from ..plan.errors import PlanError
from .place import exists, path_of_records

if TYPE_CHECKING:
    from sqlite3 import Connection

PATIENCE = 2.0
"""Seconds that an estimate waits for a run that is being recorded."""


def known_measurements() -> tuple[Measured, str]:
    """What was measured, and what kept it from being read: a line, empty where nothing did."""
    try:
        path = path_of_records()
        if not exists(path):
            return NOTHING, ""
        from .database import connected, errors_of

        with connected(path, patience=PATIENCE) as connection, errors_of(path):
            return Measured(_measurements(connection)), ""
    except PlanError as error:
        return NOTHING, str(error)
    except ImportError as error:  # a Python that was built without SQLite
        return NOTHING, f"this Python cannot read them ({error})"


_NEWEST = (
    "SELECT name, gpu, setting, stage, bytes, time, run, versions, imported, "
    "max((1 - imported) || time || run) FROM facts "
    "GROUP BY name, gpu, setting, stage ORDER BY name, gpu, setting, stage"
)
"""Of what was measured several times the latest, and what ran here before what was imported
(https://sqlite.org/lang_select.html, bare columns beside ``max``)."""


def _measurements(connection: Connection) -> tuple[Measurement, ...]:
    rows = connection.execute(_NEWEST).fetchall()
    return tuple(
        Measurement(name, gpu, setting, stage, size, str(time), str(run), str(versions), bool(imported))
        for name, gpu, setting, stage, size, time, run, versions, imported, _ in rows
        if isinstance(size, int) and 0 <= size <= LARGEST
    )


__all__ = ["known_measurements"]
