"""What a run must not leave behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from memplan.validate.guards import MARKER, all_processes, is_alive
from memplan.validate.launch import PREFIX

SHARED = Path("/dev/shm")


def processes_of(folder: Path) -> list[int]:
    """Living processes of runs whose folders are in ``folder``: by their environment, or by their arguments."""
    mark, name = f"{MARKER}={folder}".encode(), str(folder).encode()
    others = [pid for pid in all_processes() if pid != os.getpid() and is_alive(pid)]
    return [pid for pid in others if mark in _content(pid, "environ") or name in _content(pid, "cmdline")]


def _content(pid: int, kind: str) -> bytes:
    try:
        return Path("/proc", str(pid), kind).read_bytes()
    except OSError:
        return b""


def anything_left(folder: Path) -> list[str]:
    """Processes and files of runs whose folders are in ``folder``."""
    processes = [f"process {pid}" for pid in processes_of(folder)]
    return [*processes, *(str(path) for path in folder.glob(f"{PREFIX}*"))]


def soon(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it comes to hold."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("localhost", port)) == 0
