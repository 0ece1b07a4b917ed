"""A fault in memplan itself: one line on standard error, and a file with what it takes to find the fault."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from .plan.errors import PlanError, one_line
from .streams import tell
from .user_folders import user_folder

LONGEST_LINE = 1000
"""Characters of a line of the details."""
MOST_FRAMES = 60
"""Calls of a traceback that are kept, the innermost."""
_NEEDS = ("typer", "rich", "pydantic", "PyYAML", "torch", "transformers")
_NOTICE = (
    "memplan found a fault in itself. This file holds the command line and the error's message: they may name\n"
    "your files and models, and repeat values out of them. Read it before you pass it on. It holds no other\n"
    "content of files and nothing of the environment; your home directory is written ~."
)


def report(error: BaseException, arguments: Sequence[str], *, debug: bool) -> None:
    """Tells of ``error``, which ended ``memplan`` with ``arguments``; with ``debug`` by its traceback."""
    tell(_traceback(error).rstrip() if debug else _line(error, arguments))


def _line(error: BaseException, arguments: Sequence[str]) -> str:
    what = "out of memory" if isinstance(error, MemoryError) else f"a fault in memplan itself ({_where(error)})"
    try:
        return one_line(f"memplan: {what}; the details are in {_written(_details(error, arguments))}")
    except PlanError as problem:
        why = problem.problem
    except OSError as problem:
        place = f"{problem.filename}: " if problem.filename else ""
        why = f"{place}{(problem.strerror or str(problem)).lower()}"
    return one_line(f"memplan: {what}; its details cannot be written ({why}): --debug shows them")


def _where(error: BaseException) -> str:
    """The error's kind, and the line of memplan that it came from."""
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            place = f" in {Path(code.co_filename).name}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"{type(error).__name__}{place}"


def _details(error: BaseException, arguments: Sequence[str]) -> str:
    command = shlex.join(["memplan", *arguments])
    return _without_home(f"{_NOTICE}\n\n{_versions()}\ncommand: {command[:LONGEST_LINE]}\n\n{_traceback(error)}")


def _versions() -> str:
    import platform
    from importlib.metadata import distributions

    from . import __version__

    packages = {one.name: one.version for one in distributions() if one.name in _NEEDS}
    found = [f"memplan {__version__}", f"Python {platform.python_version()} on {platform.platform()}"]
    return ", ".join([*found, *(f"{name} {packages[name]}" for name in _NEEDS if name in packages)])


def _traceback(error: BaseException) -> str:
    from traceback import format_exception

    lines = "".join(format_exception(type(error), error, error.__traceback__, -MOST_FRAMES)).splitlines()
    return "".join(f"{line[:LONGEST_LINE]}\n" for line in lines)


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home() raises where there is none)
    return text.replace(home, "~") if len(home) > 1 else text


def _written(details: str) -> Path:
    """The file with ``details``, whole, for its owner alone. The same fault writes the same file."""
    from zlib import crc32

    folder = user_folder("MEMPLAN_CACHE", "XDG_CACHE_HOME", "~/.cache", "what is kept of faults")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = details.encode(errors="backslashreplace")
    path = folder / f"fault-{crc32(content):08x}.txt"
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123
            file.write(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
