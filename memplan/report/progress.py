"""What long work is at, on standard error while that is a terminal; it leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from time import monotonic
from typing import TYPE_CHECKING

from ..plan.errors import one_line

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

PATIENCE = 0.5
"""Seconds of work that nobody needs to be told about."""
FORESEEN = 2.0
"""Seconds of one kind of work from which on it is told how long the rest of it will take."""

Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much: 0 where it may end at any moment."""


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


def time_left(seconds: float) -> str:
    """``about 40 s``, ``about 3 min``: as precise as it is known."""
    if seconds < 90:
        return f"about {max(5 * round(seconds / 5), 1)} s"
    return f"about {round(seconds / 60)} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} h"


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
        self._what, self._began, self._first = "", 0.0, 0

    def start(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._ended:
                self._status = Console(stderr=True).status(_shown(self.text))
                self._status.start()

    def report(self, what: str, done: int, of: int) -> None:
        if what != self._what:
            self._what, self._began, self._first = what, monotonic(), done
        text = f"{what}: {done:,} of {of:,}{self._left(done, of)}" if of else f"{what}: {done:,}"
        if text != self.text:
            self.text = text
            if self._status is not None:
                self._status.update(_shown(text))

    def _left(self, done: int, of: int) -> str:
        """How long the rest will take, if it is as quick as what is done."""
        took, more = monotonic() - self._began, done - self._first
        return f", {time_left(took * (of - done) / more)} left" if took >= FORESEEN and more > 0 and done < of else ""

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            if self._status is not None:
                self._status.stop()
