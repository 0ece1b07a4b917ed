"""Files that commands write: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ..plan.errors import ABSENT, Origin, PlanError


def check_writable(path: Path, *, force: bool) -> None:
    """Refuses early what ``write_whole`` would refuse after long work."""
    if not path.parent.is_dir():
        raise PlanError("", ABSENT, f"there is no folder {path.parent}", origin=Origin(str(path)))
    if path.exists() and not force:
        raise PlanError("", ABSENT, "is there already; --force overwrites it", origin=Origin(str(path)))


def write_whole(path: Path, content: bytes, *, force: bool) -> None:
    """Writes all of ``content`` or nothing, and never over a file unless ``force``."""
    from tempfile import TemporaryDirectory

    origin = Origin(str(path))
    try:
        with TemporaryDirectory(prefix=".memplan-", dir=path.parent) as folder:
            whole = Path(folder) / "whole"
            whole.write_bytes(content)
            if path.exists() and not force:
                raise FileExistsError
            whole.replace(path)
    except FileExistsError:
        raise PlanError("", ABSENT, "is there already; --force overwrites it", origin=origin) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PlanError("", ABSENT, f"cannot be written: {str(reason).lower()}", origin=origin) from None
