"""Files that commands write: a regular file whole or not at all; through what is none, as a shell's ``>`` writes."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..plan.errors import Origin, PlanError, wrong_at
from ..plan.text import path_of
from ..values import dataclass

PATIENCE = 10.0
"""Seconds that a FIFO may be without a reader before it is given up."""
_RETRY = 0.05
_NO_DESCRIPTOR = 2**31 - 1


ENDINGS: Mapping[str, tuple[str, ...]] = {"--html": (".html", ".htm")}
"""Of flags whose files other programs open by their names: what a name with an ending ends in."""


def check_writable(name: str, *, force: bool) -> None:
    """Refuses early what ``write_whole`` would refuse after long work."""
    try:
        _target(name, force)
    except (OSError, ValueError) as error:
        raise _unwritable(name, error) from None


def check_files(files: Mapping[str, str | None], *, force: bool) -> None:
    """Refuses early what writing ``files``, by their flags, would refuse after long work."""
    given = [(flag, file) for flag, file in files.items() if file is not None]
    if force and not given:
        *others, last = files
        raise wrong_at("--overwrite", f"is for {', '.join(others)} and {last}")
    for at, (flag, file) in enumerate(given):
        ending = path_of(file).suffix.lower()
        if flag in ENDINGS and ending and ending not in ENDINGS[flag]:
            raise wrong_at(flag, f"{file} must end in {' or '.join(ENDINGS[flag])}")
        check_writable(file, force=force)
        for other, same in given[:at]:
            if same == file:
                raise wrong_at(flag, f"is the file of {other}, too")
    if (picture := files.get("--plot")) is not None:
        from ..report.plot import check_matplotlib, format_of

        format_of(Path(picture))
        check_matplotlib()


@dataclass(frozen=True, slots=True)
class Files:
    """What is written besides an answer: a file, if one is asked for, by its flag."""

    by_flag: Mapping[str, str | None]
    force: bool

    def check(self) -> None:
        """Refuses before long work what would be refused after it."""
        check_files(self.by_flag, force=self.force)

    def write(self, flag: str, content: Callable[[str], bytes]) -> Iterator[str]:
        """The file of ``flag``, if it is asked for and was written; ``content`` makes what is in a file of its name."""
        file = self.by_flag[flag]
        if file is not None and write_whole(file, content(file), force=self.force):
            yield file


def write_whole(name: str, content: bytes, *, force: bool) -> bool:
    """Writes ``content`` to the file that the user called ``name``; the one place where a user's file is written.

    A regular file has all of ``content`` afterwards or is as it was; it is replaced only with ``force``, and keeps its
    mode. A link is followed. A FIFO, a terminal, ``/dev/stdout`` or ``>(…)`` is written to as it is, which loses
    nothing and so needs no ``force``. Gives whether ``content`` lies in a file now. ``PlanError`` where it cannot be
    written.
    """
    try:
        target = _target(name, force)
        if isinstance(target, int):
            _pass_on(target, content)
        elif target.exists() and not target.is_file():
            _write_through(target, content)
        else:
            _replace(target, content)
            return True
    except BrokenPipeError:
        pass  # the reader has seen enough
    except (OSError, ValueError) as error:
        raise _unwritable(name, error) from None
    return False


def _unwritable(name: str, error: OSError | ValueError) -> PlanError:
    if isinstance(error, PlanError):
        return error
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return wrong_at(name, f"cannot be written: {reason.lower()}")


def _target(name: str, force: bool) -> Path | int:
    """What ``name`` stands for, links followed: a path, or a descriptor of this process. ``PlanError`` where it may not
    be written."""
    path, origin = path_of(name), Origin(name)
    descriptor = _descriptor(path)
    if descriptor is not None:
        os.fstat(descriptor)
        return descriptor
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            folder = path.parent if path.parent.resolve() == target.parent else target.parent
            raise wrong_at(origin, f"there is no folder {folder}") from None
    else:
        if stat.S_ISDIR(mode):
            raise wrong_at(origin, "is a directory; name a file in it")
        if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
            what = "a disk" if stat.S_ISBLK(mode) else "a socket"
            raise wrong_at(origin, f"is {what}, which is not written to")
        if not stat.S_ISREG(mode):
            return target
        if not force:
            raise wrong_at(origin, "is there already; --overwrite replaces it")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise wrong_at(origin, f"cannot be written: folder {target.parent} is read-only")
    return target


def _descriptor(path: Path) -> int | None:
    """The descriptor that ``path`` is another name of, as ``/dev/stdout`` and ``/dev/fd/63`` are.

    It is written to itself: opened anew, a file behind it would begin at its start once more.
    """
    own, at = os.path.realpath("/proc/self/fd"), os.path.abspath(path)  # noqa: PTH100 (resolve() would go too far)
    for _ in range(40):
        folder, name = os.path.split(at)
        folder = os.path.realpath(folder)
        if folder == own:
            return min(int(name), _NO_DESCRIPTOR) if re.fullmatch("[0-9]{1,99}", name) else None
        if not os.path.islink(os.path.join(folder, name)):  # noqa: PTH114, PTH118
            return None
        at = os.path.normpath(os.path.join(folder, os.readlink(os.path.join(folder, name))))  # noqa: PTH115, PTH118
    return None


def _pass_on(descriptor: int, content: bytes) -> None:
    """Writes to a descriptor that is open, behind what was printed to it."""
    if sys.stdout is not None:
        sys.stdout.flush()
    _write(descriptor, content)


def _write_through(path: Path, content: bytes) -> None:
    """Writes to a FIFO, once it has a reader, or to a character device."""
    given_up = time.monotonic() + PATIENCE
    while True:
        try:
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            break
        except OSError as error:
            if not path.is_fifo():
                raise
            if time.monotonic() > given_up:
                raise TimeoutError(f"is a pipe that nothing read for {PATIENCE:g} s") from error
        time.sleep(_RETRY)
    try:
        os.set_blocking(file, True)
        _write(file, content)
    finally:
        os.close(file)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file beside ``path`` and gives it that name, with the mode and owner of a file that had it."""
    part = path.with_name(f".memplan-{os.urandom(8).hex()}")
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(file, content)
            if path.exists():
                _take_over(file, path.stat())
            os.fsync(file)
        finally:
            os.close(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _take_over(file: int, before: os.stat_result) -> None:
    own = os.fstat(file)
    if (before.st_uid, before.st_gid) != (own.st_uid, own.st_gid):
        with suppress(OSError):  # only a superuser may
            os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, before.st_mode & 0o777)


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
