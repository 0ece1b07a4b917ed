"""What long work is at, on standard error while that is a terminal; it leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

from ..plan.errors import one_line

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

PATIENCE = 0.5
"""Seconds of work that nobody needs to be told about."""

Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""


@contextmanager
def progress(doing: str, *, quiet: bool = False) -> Iterator[Report]:
    """A function to report to. ``doing`` stands there until it is first called."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, of: None
        return
    shown = _Shown(doing)
    timer = Timer(PATIENCE, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.report
    finally:
        timer.cancel()
        shown.stop()


def _shown(text: str) -> Text:
    """As a text without markup: names may have brackets."""
    from rich.text import Text

    return Text(one_line(text))


class _Shown:
    """A line that appears when ``start`` is called, from another thread, unless the work has ended by then."""

    def __init__(self, doing: str) -> None:
        self.text = doing
        self._lock = Lock()
        self._ended = False
        self._status: Status | None = None

    def start(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._ended:
                self._status = Console(stderr=True).status(_shown(self.text))
                self._status.start()

    def report(self, what: str, done: int, of: int) -> None:
        text = f"{what}: {done:,} of {of:,}" if of else what
        if text != self.text:
            self.text = text
            if self._status is not None:
                self._status.update(_shown(text))

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            if self._status is not None:
                self._status.stop()
