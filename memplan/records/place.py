"""Where records are. Light: every estimate asks whether there are any."""

from __future__ import annotations

import os
from pathlib import Path

from ..plan.errors import ABSENT, Origin, PlanError

VARIABLE = "MEMPLAN_DATA"
NAME = "runs.sqlite3"


def folder() -> Path:
    """The user's data directory; ``PlanError`` where that is in a home directory which nobody knows."""
    given = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_DATA_HOME")
    try:
        if given:
            return Path(given).expanduser()
        root = Path(base) if base and Path(base).is_absolute() else Path("~/.local/share").expanduser()
    except RuntimeError:
        problem = "must be a directory: no home directory is known for what it begins with"
        if not given:
            problem = "is needed: it names the directory of records, and no home directory is known"
        raise PlanError(VARIABLE, given or ABSENT, problem, origin=Origin("environment")) from None
    return root / "memplan"


def path_of_records() -> Path:
    return folder() / NAME


def exists(path: Path) -> bool:
    """Whether there is a database with something in it."""
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {str(getattr(error, 'strerror', None) or error).lower()}"
        raise PlanError("", ABSENT, problem, origin=Origin(str(path))) from None
