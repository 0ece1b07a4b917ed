"""Signals to the program that launched ranks, or to what keeps them: nothing is left, whatever the signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memplan.validate.guards import MARKER
from memplan.validate.launch import interrupts

from .leftovers import anything_left, processes_of, soon

ROOT = Path(__file__).parents[2]


@contextmanager
def launching(place: Path, *does: str, way: str = "in turn") -> Iterator[subprocess.Popen[bytes]]:
    """A parent whose workers all began something."""
    command = [sys.executable, "-m", "tests.validate.workers.parent", way, json.dumps(does)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            assert soon(lambda: len(list(place.glob("*/rank-*.progress"))) == len(does), 60)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_end(place: Path, number: signal.Signals) -> None:
    with launching(place, "sleeps") as process:
        process.send_signal(number)
        assert process.wait(20) == 130
        assert anything_left(place) == []


def test_elastic_launcher_is_ended_too(place: Path) -> None:
    with launching(place, "sleeps", "has a child and sleeps", way="elastic") as process:
        assert len(processes_of(place)) >= 6
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
        assert anything_left(place) == []


def test_second_interrupt_is_in_a_hurry(place: Path) -> None:
    """Against a worker that does not mind SIGTERM."""
    with launching(place, "is stubborn") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert anything_left(place) == []


@pytest.mark.parametrize("way", ["in turn", "elastic"])
def test_killed(place: Path, way: str) -> None:
    """The keeper notices, and removes the folder as well."""
    does = ("sleeps",) if way == "in turn" else ("sleeps", "has a child and sleeps")
    with launching(place, *does, way=way) as process:
        process.kill()
        process.wait(20)
        assert soon(lambda: anything_left(place) == [])


def test_keeper_killed(place: Path) -> None:
    """Its processes follow it; the program that launched notices, and removes the rest."""
    with launching(place, "has a child and sleeps") as process:
        os.kill(keeper_of(process.pid), signal.SIGKILL)
        assert process.wait(20) == 0
        assert anything_left(place) == []


def test_all_killed_at_once(place: Path) -> None:
    """Nobody is left who could remove the folder: the next run does, and ends a child of a worker's."""
    with launching(place, "has a child and sleeps") as process:
        keeper = keeper_of(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    (folder,) = place.iterdir()
    long_ago = time.time() - 1000
    os.utime(folder, (long_ago, long_ago))
    with launching(place, "works") as process:
        assert process.wait(20) == 0
    assert anything_left(place) == []


def keeper_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
    (keeper,) = [int(child) for child in children if MARKER in environment_of(int(child))]
    return keeper


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text(encoding="utf-8")


def test_signals_are_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with interrupts() as noticed:
        noticed.check()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_interrupted_between_two_looks() -> None:
    """Nobody checks after the signal: leaving does."""
    with pytest.raises(KeyboardInterrupt), interrupts():
        signal.raise_signal(signal.SIGTERM)


def test_what_is_ignored_stays_ignored() -> None:
    """As under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
