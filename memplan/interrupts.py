"""Ctrl-C, SIGTERM and SIGHUP: they end the command wherever it is, once, and none is lost.

Python raises ``KeyboardInterrupt`` between any two instructions, and swallows it in ``__del__``, in callbacks of weak
references and wherever else nobody is there to hear it. Hence

* the handler puts an interrupt off while a ``__del__`` runs;
* an interrupt that dies unheard (``Interrupt.__del__``) is raised again;
* one that comes while another is on its way is left out, so that what tidies up is not disturbed;
* once it is ``over`` nothing is raised any more.

Only a process that is all memplan's installs the handler, and only its main thread runs it.
"""

from __future__ import annotations

import sys
import time
from signal import ITIMER_REAL, SIG_IGN, SIGALRM, SIGHUP, SIGINT, SIGTERM, getsignal, setitimer, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any

SIGNALS = (SIGINT, SIGTERM, SIGHUP)
AGAIN = 0.002
"""Seconds until an interrupt that was put off, or swallowed, is tried again."""
UNDISTURBED = 1.0
"""Seconds that an interrupt has to tidy up before another disturbs it."""


class Interrupt(KeyboardInterrupt):
    """What the handler raises. Not ``KeyboardInterrupt`` itself, after which Python ends by SIGINT, without a code, if
    that fell into an ``exec`` (as of a dataclass)."""

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__()
        self.interrupts = interrupts

    def __del__(self) -> None:
        self.interrupts.died()


class Interrupts:
    """The process's, from ``install`` to ``end``."""

    def __init__(self) -> None:
        self.came = False
        """The process was asked to end."""
        self.over = False
        """It no longer listens."""
        self.fault: BaseException | None = None
        """What Python swallowed in code of memplan, whose results are none then."""
        self._raised: float | None = None
        """When the interrupt was raised that is on its way."""

    def install(self) -> None:
        """What ignores a signal (``nohup``) goes on ignoring it."""
        sys.unraisablehook = self._swallowed
        signal(SIGALRM, self._take)
        for number in SIGNALS:
            if getsignal(number) is not SIG_IGN:
                signal(number, self._take)

    def end(self) -> bool:
        """From here on nothing is raised, not while Python ends either. Returns whether the process was asked to."""
        self.over = True
        setitimer(ITIMER_REAL, 0)
        for number in (SIGALRM, *SIGNALS):
            signal(number, SIG_IGN)
        return self.came

    def died(self) -> None:
        """An interrupt did: it has been heard (``over``), or was swallowed."""
        self._raised = None
        if not self.over:
            setitimer(ITIMER_REAL, AGAIN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if self.over or (self._raised is not None and time.monotonic() - self._raised < UNDISTURBED):
            return
        if _is_deaf(frame):
            setitimer(ITIMER_REAL, AGAIN)
            return
        self._raised = time.monotonic()
        raise Interrupt(self)

    def _swallowed(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if isinstance(error, KeyboardInterrupt):
            return
        if error is not None and _is_ours(error.__traceback__):
            self.fault = self.fault or error
        else:
            sys.__unraisablehook__(unraisable)


def _is_deaf(frame: FrameType | None) -> bool:
    """Whether Python would swallow what is raised in ``frame``."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _is_ours(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            return True
        traceback = traceback.tb_next
    return False
