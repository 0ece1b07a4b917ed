"""Consoles to print on, and what came out."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def printed(show: Callable[[Console], object], width: int = 80, *, colour: bool = False) -> str:
    """What ``show`` prints to a pipe of ``width`` columns, or to a terminal that has colours."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        legacy_windows=False,
        _environ={},
    )
    show(console)
    return file.getvalue()


def widest(text: str) -> int:
    """Columns of the longest line, colours aside."""
    return max((cell_len(ANSI.sub("", line)) for line in text.splitlines()), default=0)
