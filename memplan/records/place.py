"""Where records are. Light: every estimate asks whether there are any."""

from __future__ import annotations

from pathlib import Path

from ..plan.errors import wrong_at
from ..user_folders import user_folder

VARIABLE = "MEMPLAN_DATA"
NAME = "runs.sqlite3"


def folder() -> Path:
    """The user's data directory; ``PlanError`` where that is in a home directory which nobody knows."""
    return user_folder(VARIABLE, "XDG_DATA_HOME", "~/.local/share", "records")


def path_of_records() -> Path:
    return folder() / NAME


def exists(path: Path) -> bool:
    """Whether there is a database with something in it."""
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise wrong_at(str(path), f"cannot be read: {str(getattr(error, 'strerror', None) or error).lower()}") from None
