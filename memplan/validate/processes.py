"""Processes as Linux shows them: which belong to a run, and how all of them are ended.

Only the standard library, since what guards a run is to be up in milliseconds. Elsewhere than on Linux nothing is found
in ``/proc``, and only the process groups are ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MARKER = "MEMPLAN_RUN"
"""An environment variable of every process of a run: the run's folder."""
PROC = Path("/proc")
PAUSE = 0.02
"""Seconds between two looks at processes that are about to end."""
LONGEST_DEATH = 30.0
"""Seconds after SIGKILL before a process counts as one that cannot be ended: a driver takes several to give back
hundreds of GB of pinned memory, and one that is stuck does not return at all."""

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
"""``PR_SET_PDEATHSIG`` and ``PR_SET_CHILD_SUBREAPER`` of ``linux/prctl.h``."""
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """SIGKILL comes when the process that started this one ends, however it ends."""
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes below this one that lose their parent become its own children, and not init's."""
    _control(_SET_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    if _LIBRARY is not None:
        _LIBRARY.prctl(option, value, 0, 0, 0)


def descendants(process: int) -> list[int]:
    """Living processes below ``process``, without itself."""
    children: dict[int, list[int]] = {}
    for pid in all_processes():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = list(children.get(process, ()))
    while waiting:
        found.append(waiting.pop())
        waiting.extend(children.get(found[-1], ()))
    return [pid for pid in found if is_alive(pid)]


def marked(mark: str) -> list[int]:
    """Living processes whose environment has the mark ``mark``, without the one that asks."""
    entry = f"{MARKER}={mark}".encode()
    return [pid for pid in all_processes() if pid != os.getpid() and entry in _environment(pid)]


def all_processes() -> Iterable[int]:
    try:
        return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return ()


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


def _status(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third on: state, parent, …; the name before them can hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    status = _status(pid)
    return int(status[1]) if status else None


def is_alive(pid: int) -> bool:
    """Whether it runs; what has ended and only waits for its parent does not."""
    status = _status(pid)
    return bool(status) and status[0] not in "ZX"


def send(pids: Iterable[int], which: signal.Signals) -> None:
    """``which`` to each of them that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, which)


def end_all(
    find: Callable[[], list[int]], grace: float, *, hurried: Callable[[], bool] = lambda: False
) -> tuple[int, ...]:
    """Ends what ``find`` finds until it finds nothing: SIGTERM, and SIGKILL to who is left after ``grace`` seconds or
    once ``hurried`` says so. Returns the processes that cannot be ended."""
    deadline = time.monotonic() + grace
    told: set[int] = set()
    while left := find():
        if time.monotonic() >= deadline or hurried():
            break
        send(set(left) - told, signal.SIGTERM)
        told.update(left)
        time.sleep(PAUSE)
    deadline = time.monotonic() + LONGEST_DEATH
    while (left := find()) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(PAUSE)
    return tuple(left)
