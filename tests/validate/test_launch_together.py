"""Ranks of a gloo process group that wait for each other, started by PyTorch's elastic launcher."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from memplan.validate.launch import Outcome, launched
from memplan.validate.watching import Progress
from memplan.validate.ways import Elastic

from .leftovers import listens

pytest.importorskip("torch")

WORKER = "tests.validate.workers.together"
PATIENCE = 60.0
"""Seconds for two ranks to import torch on a busy machine."""


class Seen:
    """The port at which the ranks met."""

    def __init__(self) -> None:
        self.port: int | None = None

    def __call__(self, progress: tuple[Progress, ...]) -> None:
        for one in progress:
            if one.what.startswith("port "):
                self.port = int(one.what.removeprefix("port "))


TWO = Elastic(2)


def together(way: Elastic = TWO, patience: float = PATIENCE, **task: Any) -> Outcome:
    seen = Seen()
    outcome = launched(way, json.dumps(task).encode(), worker=WORKER, patience=patience, watch=seen)
    assert seen.port is not None
    assert not listens(seen.port)
    return outcome


def test_all_work(place: Path) -> None:
    outcome = together()
    assert [reading.rank for reading in outcome.readings] == [0, 1]
    assert outcome.failures == ()


@pytest.mark.parametrize(
    ("rank", "does", "message"),
    [
        (1, "is killed", "ended by SIGKILL, which Linux sends where memory runs out"),
        (0, "raises", "ValueError: of its own"),
    ],
)
def test_one_fails_while_another_waits(place: Path, rank: int, does: str, message: str) -> None:
    """Only the one that failed by itself is named."""
    outcome = together(rank=rank, does=does)
    assert [(one.rank, one.message) for one in outcome.failures] == [(rank, message)]


def test_one_never_comes(place: Path) -> None:
    """The process group's own timeout is shorter than ours: the rank that waited tells, and the other one is named."""
    outcome = together(rank=1, does="sleeps", timeout=1)
    (failure,) = outcome.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    assert "rank 1 did not come to the collective in which rank 0 waited" in failure.message


def test_blocked_collective(place: Path) -> None:
    """Nothing but our patience ends it; the stacks tell who waits for whom."""
    outcome = together(rank=1, does="sleeps", patience=4)
    (failure,) = outcome.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    assert (
        failure.message == "nothing happened for 10 s; it stood outside of any collective, while rank 0 waited in one"
    )


def test_two_machines(place: Path) -> None:
    """Both here: each launches its own rank, and they meet at one endpoint."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    way = Elastic(1, nodes=2, endpoint=f"localhost:{port}")
    outcomes: list[Outcome] = []
    other = threading.Thread(target=lambda: outcomes.append(together(way)))
    other.start()
    outcomes.append(together(way))
    other.join()
    assert sorted(reading.rank for outcome in outcomes for reading in outcome.readings) == [0, 1]
    assert [outcome.failures for outcome in outcomes] == [(), ()]
