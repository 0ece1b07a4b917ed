"""The three standard streams as a process is given them: closed, full, without a reader, of a width that cannot be.

What cannot be printed changes no exit code, and what is for standard error never comes to standard output. Light:
``memplan --version`` imports it.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

WIDEST = 10_000
"""Columns of a terminal, and its lines, at most."""
_SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
"""Variables of the environment that rich and typer take for a size, whatever they hold."""


def prepare() -> None:
    """Makes all three usable. A closed one leads nowhere, or else the next file to be opened would get its number and
    what others print; characters that the terminal lacks become ``?``."""
    for number in range(3):
        if not _is_open(number):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for name in _SIZES:
        if name in os.environ and not _is_size(os.environ[name]):
            del os.environ[name]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 (stays open for the process)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) <= WIDEST


def tell(line: str) -> None:
    """``line`` on standard error, if that takes it, with control characters escaped."""
    from .plan.errors import lines

    try:
        print(lines(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: somebody has closed it
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Points ``stream`` at nothing, so that Python's own flush at exit succeeds."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # it is no file, or closed
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
