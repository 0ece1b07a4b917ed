"""Reading the text of a plan, spec or configuration, from a file or standard input, without being hurt by it."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from .errors import ABSENT, Origin, PlanError

LARGEST = 1 << 20
"""Bytes of the largest file that is read as a plan. Real ones are a few kilobytes."""

STANDARD_INPUT = "standard input"


def path_of(text: str, folder: Path | None = None) -> Path:
    """The path that ``text`` names, from ``folder`` if it is relative; ``~`` is the user's home."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # no such user: then it is a name like any other
        path = Path(text)
    return path if folder is None else folder / path


def is_there(path: Path) -> bool:
    """Whether there is anything at ``path``; not if nobody can say."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; not if nobody can say."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_text(path: Path, field: str = "") -> str:
    """The text of the file at ``path``, of at most 1 MiB of UTF-8. ``field`` names who asked for it."""
    origin = Origin(str(path))
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(field, origin, error) from None
    if stat.S_ISDIR(status.st_mode):
        raise PlanError(field, ABSENT, "is a directory; name a file in it", origin=origin)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
        raise PlanError(field, ABSENT, "is not a regular file", origin=origin)
    if status.st_size > LARGEST:
        raise _too_large(field, origin, status.st_size)
    try:
        with path.open("rb") as file:
            return _decoded(file.read(LARGEST + 1), field, origin)
    except OSError as error:
        raise _unreadable(field, origin, error) from None


def text_at(place: str) -> tuple[str, str]:
    """The text at ``place``, a path or ``-`` for standard input, and what errors call it."""
    if place == "-":
        return read_standard_input(), STANDARD_INPUT
    return read_text(path_of(place)), place


def read_standard_input() -> str:
    """The text on standard input, at most 1 MiB of UTF-8."""
    origin = Origin(STANDARD_INPUT)
    if sys.stdin is None:
        raise PlanError("", ABSENT, "is closed", origin=origin)
    try:
        return _decoded(sys.stdin.buffer.read(LARGEST + 1), "", origin)
    except OSError as error:
        raise _unreadable("", origin, error) from None


def _decoded(data: bytes, field: str, origin: Origin) -> str:
    if len(data) > LARGEST:
        raise _too_large(field, origin, len(data))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8 text (byte 0x{data[error.start]:02x}); save it as UTF-8"
        raise PlanError(field, ABSENT, problem, origin=Origin(origin.source, line)) from None


def _too_large(field: str, origin: Origin, size: int) -> PlanError:
    return PlanError(field, ABSENT, f"is larger than a plan can be (1 MiB): at least {size:,} bytes", origin=origin)


def _unreadable(field: str, origin: Origin, error: OSError | ValueError) -> PlanError:
    if isinstance(error, FileNotFoundError):
        return PlanError(field, ABSENT, "no such file", origin=origin)
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return PlanError(field, ABSENT, f"cannot be read: {reason.lower()}", origin=origin)
