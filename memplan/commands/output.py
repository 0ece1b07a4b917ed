"""What commands print and to whom, and the flags that say how.

Files that commands write: a regular file whole or not at all; through what is none, as a shell's ``>`` writes.

What the user's records say of GPUs, for the commands that estimate.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..device.measured import NOTHING, Measured
from ..plan.errors import Origin, PlanError, lines, one_line, wrong_at
from ..plan.library import examples
from ..plan.notes import Note
from ..plan.read import ReadPlan
from ..plan.text import path_of
from ..streams import silence
from ..values import dataclass

if TYPE_CHECKING:
    from rich.console import Console

    from ..plan.plan import Plan


def beginning(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Those of ``names`` that begin with what is typed so far."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete.lower())]

    return complete


OUTPUT = "Output"
"""The panel of ``--help`` for flags of output."""
PlanOrLaunchFile = Annotated[
    str | None,
    typer.Argument(
        help="plan or launch file, name of a built-in example, or - for standard input",
        autocompletion=beginning(examples),
    ),
]
PlanOrLaunchFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PLAN]",
        help="plan or launch file, name of a built-in example, - for standard input; or several files of one job",
        autocompletion=beginning(examples),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON only", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="print only the verdict", rich_help_panel=OUTPUT)]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="print without colours (as NO_COLOR=1)", rich_help_panel=OUTPUT)
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", "--force", help="replace existing files", rich_help_panel=OUTPUT),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="print every stage, reading, rule and assumption", rich_help_panel=OUTPUT),
]
PRINTED = "-"
"""The file of ``--csv`` that stands for standard output, on which nothing else is printed then."""
Csv = Annotated[
    str | None,
    typer.Option(
        "--csv",
        metavar="[FILE.csv]",
        help="print CSV only, a row per stage or layout; with a file, write it there beside the report",
        rich_help_panel=OUTPUT,
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE.svg|png",
        help="draw it: stages and an iteration, or memory against time",
        rich_help_panel=OUTPUT,
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE.html", help="write the answer as one page for a browser, too", rich_help_panel=OUTPUT
    ),
]


def file_of(csv: str | None) -> str | None:
    """The file that ``--csv`` writes, if any."""
    return None if csv == PRINTED else csv


@contextmanager
def printing() -> Iterator[None]:
    """Around all printing: a reader that has seen enough (``| head``) ends it, and changes no exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)


@contextmanager
def without_collection() -> Iterator[None]:
    """Estimates and searches make hundreds of thousands of values that live to their end, and hardly one that refers to
    itself: looking for such takes an eighth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.freeze()
            gc.enable()


def print_json(value: Any) -> None:
    """``value`` as the only thing on standard output."""
    with printing():
        print(json.dumps(value, indent=1).replace("\x7f", "\\u007f"))  # the one control character that JSON leaves


def print_either(json: bool, content: Callable[[], Any], show: Callable[[], None]) -> None:
    """``content()`` as JSON, or what ``show`` prints in its place."""
    if json:
        print_json(content())
    else:
        with printing():
            show()


def print_text(text: str) -> None:
    """``text``, whose lines all end, as the only thing on standard output, without control characters."""
    with printing():
        print(lines(text), end="")


def print_file(text: str) -> None:
    """``text`` as a file would have it; on a terminal without control characters, which that would obey."""
    with printing():
        print(lines(text) if sys.stdout.isatty() else text, end="")


def tell_of_shell(plan: Plan) -> None:
    """A word on standard error of this shell's settings of PyTorch's allocator, which are no part of ``plan``."""
    from ..plan.environment import OF_ALLOCATOR

    if any(name in plan.environment for name in OF_ALLOCATOR):
        return
    for name in OF_ALLOCATOR:
        if os.environ.get(name):
            given = one_line(f"{name}={os.environ[name]}")
            print(f"memplan: {given} of this shell is not in the plan: --env {shlex.quote(given)}", file=sys.stderr)


def console(no_color: bool) -> Console:
    """Standard output for tables, in colour where it is a terminal that wants it."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return QuietConsole(no_color=True if no_color else None, highlight=False, markup=False, emoji=False)


# -- files ---------------------------------------------------------------------------------------------


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
        if file == PRINTED:
            raise wrong_at(flag, f"{file} is no file's name here; standard output is /dev/stdout")
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


# -- recorded ------------------------------------------------------------------------------------------


NoRecords = Annotated[
    bool,
    typer.Option(
        "--no-records",
        help="use published figures only; ignore measurements of your own runs (`memplan runs` lists them)",
        rich_help_panel="Hardware",
    ),
]


def measured_of(*, no_records: bool) -> tuple[Measured, str]:
    """What was measured, and what kept it from being read."""
    if no_records:
        return NOTHING, ""
    from ..records.known import known_measurements

    return known_measurements()


def warned(read: ReadPlan, problem: str) -> ReadPlan:
    """``read`` with a notice of records that could not be read, where a ``problem`` says so."""
    if not problem:
        return read
    note = Note("records-unreadable", f"what your runs measured is left out: {problem} (--no-records: without them)")
    return replace(read, warnings=(*read.warnings, note))
