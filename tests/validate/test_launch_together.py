"""Ranks of a gloo process group that wait for each other, started by PyTorch's elastic launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from memplan.validate.cluster import Elastic
from memplan.validate.launch import Outcome, launched

from .leftovers import listens

pytest.importorskip("torch")

WORKER = "tests.validate.workers.together"
PATIENCE = 60.0
"""Seconds for two ranks to import torch on a busy machine."""


TWO = Elastic(2)


def together(way: Elastic = TWO, patience: float = PATIENCE, **task: Any) -> Outcome:
    outcome = launched(way, json.dumps(task).encode(), worker=WORKER, patience=patience)
    no_port_listens()
    return outcome


def no_port_listens() -> None:
    """Of those that ranks met at."""
    ports = [int(path.read_text()) for path in Path(tempfile.gettempdir()).glob("port-*")]
    assert ports
    assert not any(listens(port) for port in ports)


@pytest.mark.parametrize(
    ("rank", "does", "message"),
    [
        (1, "is killed", "ended by SIGKILL, which Linux sends where memory runs out"),
        pytest.param(0, "raises", "ValueError: of its own", marks=pytest.mark.slow),
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
    outcome = together(rank=1, does="sleeps", patience=3)
    (failure,) = outcome.failures
    assert (failure.rank, failure.kind) == (1, "timeout")
    assert failure.message == "nothing happened for 3 s; it stood outside of any collective, while rank 0 waited in one"


def test_two_machines(place: Path) -> None:
    """Both here: each launches its own rank, and they meet at one endpoint."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    way = Elastic(1, nodes=2, endpoint=f"localhost:{port}")
    outcomes: list[Outcome] = []
    machines = [threading.Thread(target=lambda: outcomes.append(launched(way, b"{}", worker=WORKER))) for _ in range(2)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    assert sorted(reading.rank for outcome in outcomes for reading in outcome.readings) == [0, 1]
    assert [outcome.failures for outcome in outcomes] == [(), ()]
    no_port_listens()


ROOT = Path(__file__).parents[2]
MEMBER = ["-m", "tests.validate.workers.parent", "joined"]


def test_joined_by_torchrun(place: Path) -> None:
    """Two processes that torchrun started become one run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([*torchrun, *MEMBER, "{}", "2"], env=environment, capture_output=True, text=True)
    assert sorted(answer.stdout.splitlines()) == ["[0] []", "[1] []"], answer.stderr


def test_joined_by_srun(place: Path) -> None:
    """Two processes with the variables of a Slurm step, of which one is killed: each of them says what its own rank
    did."""
    ranks = []
    for rank in range(2):
        step = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **step}
        command = [sys.executable, *MEMBER, json.dumps({"rank": 1, "does": "is killed"}), "2"]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    first, second = (process.communicate()[0] for process in ranks)
    assert second == "[] ['ended by SIGKILL, which Linux sends where memory runs out']\n"
    assert "gloo" in first, "the connection was closed or reset"
