"""Processes, found and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memplan.validate.guards import MARKER, all_processes, descendants, end_all, is_alive, marked, send

from .leftovers import soon

SLEEP = "import time; time.sleep(60)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"


@contextmanager
def running(code: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    command, given = [sys.executable, "-c", code], {**os.environ, **environment}
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_descendants() -> None:
    with running(CHILD) as process:
        assert soon(lambda: len(descendants(process.pid)) == 1)
        (grandchild,) = descendants(process.pid)
        assert {process.pid, grandchild} <= set(descendants(os.getpid()))
        send([grandchild, 2**22 + 1], signal.SIGKILL)
        assert process.wait(10) == 0
    assert descendants(process.pid) == []


def test_marked(tmp_path: Path) -> None:
    """Children inherit the mark; one that is like it is another one."""
    mark = str(tmp_path)
    with running(f"{CHILD}; {SLEEP}", **{MARKER: mark}) as process, running(SLEEP, **{MARKER: f"{mark}2"}):
        assert soon(lambda: len(marked(mark)) == 2)
        assert process.pid in marked(mark)
        assert end_all(lambda: marked(mark), 5) == ()
        assert process.wait(10) == -signal.SIGTERM
    assert marked(mark) == []


def test_zombies_do_not_live() -> None:
    with running("pass") as process:
        assert soon(lambda: not is_alive(process.pid))
        assert process.pid in all_processes(), "nobody has asked how it ended"


@pytest.mark.parametrize("hurried", [False, True])
def test_grace(hurried: bool) -> None:
    """Who ignores SIGTERM has as long as it lasts, unless somebody is in a hurry."""
    grace = 60 if hurried else 0.5
    with running(STUBBORN) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        assert end_all(lambda: [process.pid] if is_alive(process.pid) else [], grace, hurried=lambda: hurried) == ()
        took = time.monotonic() - began
        assert took < 30 if hurried else took > 0.45
        assert process.wait(10) == -signal.SIGKILL
