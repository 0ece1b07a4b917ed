"""Ctrl-C, SIGTERM and a closed terminal, noticed at one place instead of raised anywhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """How often the process was asked to end."""

    def __init__(self) -> None:
        self.count = 0

    def notice(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def check(self) -> None:
        """``KeyboardInterrupt`` if it was, which the command line turns into exit code 130."""
        if self.count:
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Signals are counted within, and raised as ``KeyboardInterrupt`` at the end if nobody did. Outside the main thread
    Python has no handlers, and nothing is counted. What ignores a signal (``nohup``) goes on ignoring it."""
    noticed = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield noticed
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, noticed.notice) for number in heard}
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    noticed.check()
