"""What commands print, and to whom."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def printing() -> Iterator[None]:
    """Around all printing: a reader that has seen enough (``| head``) ends it, and changes no exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence()


def silence() -> None:
    """Points standard output at nothing, so that Python's own flush at exit finds a reader."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def print_json(value: Any) -> None:
    """``value`` as the only thing on standard output."""
    with printing():
        print(json.dumps(value, indent=1))


def print_text(text: str) -> None:
    """``text``, whose lines all end, as the only thing on standard output."""
    with printing():
        print(text, end="")


def console(no_color: bool) -> Console:
    """Standard output for tables, in colour where it is a terminal that wants it."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return QuietConsole(no_color=True if no_color else None, highlight=False)
