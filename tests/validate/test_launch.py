"""Ranks that work, fail, hang or die, one after the other: real processes, without torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.validate.cluster import Elastic, InTurn, Joined, Membership
from memplan.validate.launch import Outcome, launched
from memplan.validate.run_files import Progress

from .leftovers import SHARED, processes_of

WORKER = "tests.validate.workers.plain"


def in_turn(*does: str, patience: float = 60.0, limit: float | None = None) -> Outcome:
    return launched(
        InTurn(tuple(range(len(does)))), json.dumps(does).encode(), worker=WORKER, patience=patience, limit=limit
    )


def test_ranks_in_turn(place: Path) -> None:
    seen: list[tuple[Progress, ...]] = []
    task = json.dumps(["works", "works", "works"]).encode()
    outcome = launched(InTurn((0, 2)), task, worker=WORKER, watch=seen.append)
    assert [reading.rank for reading in outcome.readings] == [0, 2]
    assert outcome.failures == ()
    assert seen[0] == ()
    told = [one for progress in seen for one in progress if one.what == "counting" or one.done]
    assert {(one.allocated, one.total) for one in told} == {(1 << 20, 4 << 20)}


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        ("is killed", "died", "ended by SIGKILL, which Linux sends where memory runs out"),
        ("is broken", "died", "ended by SIGSEGV"),
        ("exits", "died", "ended with 3: no luck today"),
        ("raises", "error", "ValueError: of its own"),
        ("prints a traceback", "error", "KeyError: 'gone'"),
        ("runs out of memory", "out-of-memory", "40 GiB asked for of 2"),
        ("has no result", "died", "ended without a result"),
    ],
)
def test_failures(place: Path, does: str, kind: str, message: str) -> None:
    """The second rank's end is the run's: the third never starts."""
    outcome = in_turn("works", does, "works")
    (failure,) = outcome.failures
    assert (failure.rank, failure.kind, failure.message) == (1, kind, message)
    assert failure.when == ("step 1: forward" if kind == "out-of-memory" else "starting")
    ran = [reading.rank for reading in outcome.readings]
    assert ran == ([0, 2] if does == "has no result" else [0])


def test_last_lines(place: Path) -> None:
    """Of a rank that dies in C, Python's own account of where."""
    (failure,) = in_turn("is broken").failures
    assert failure.lines[0] == "Fatal Python error: Segmentation fault"
    assert any("in does" in line for line in failure.lines)
    (failure,) = in_turn("raises").failures
    assert failure.lines[-2:] == ("ValueError: of its own", "in two lines")


def test_memory_that_ran_out(place: Path) -> None:
    (failure,) = in_turn("runs out of memory").failures
    assert (failure.allocated, failure.reserved, failure.failing) == (1, 2, 40 << 30)


def test_hung(place: Path) -> None:
    outcome = in_turn("works", "sleeps", patience=1.5)
    (failure,) = outcome.failures
    assert (failure.rank, failure.kind, failure.when) == (1, "timeout", "starting")
    assert failure.message == "nothing happened for 1.5 s; it stood outside of any collective"
    assert "in does" in failure.lines[1]
    assert len(outcome.readings) == 1


def test_time_is_up(place: Path) -> None:
    (failure,) = in_turn("sleeps", limit=2.0).failures
    assert (failure.kind, failure.message) == ("timeout", "the run took longer than 2 s")
    assert (failure.rank, failure.when) == (0, "starting")


def test_who_ignores_sigterm(place: Path) -> None:
    (failure,) = in_turn("is stubborn", patience=1.5).failures
    assert failure.when == "being stubborn"


def test_children_of_a_worker(place: Path) -> None:
    """One of them forked twice, in a session of its own and without the run's mark."""
    assert in_turn("has children").failures == ()
    assert processes_of(place) == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared memory here")
def test_shared_memory(place: Path) -> None:
    """What a killed rank had mapped, under its own number and under a name that says nothing; what others have there
    stays."""
    others = SHARED / f"nccl-of-others-{place.name}"
    others.touch()
    try:
        (failure,) = in_turn("leaves shared memory").failures
        names = failure.when.split()
        assert [name.partition("_")[0].partition("-")[0] for name in names] == ["torch", "nccl"]
        assert [name for name in names if (SHARED / name).exists()] == []
        assert others.exists()
    finally:
        others.unlink()


def test_temporary_files(place: Path) -> None:
    """``TMPDIR`` of a worker is in the folder."""
    assert in_turn("fills the folder").failures == ()
    assert list(place.iterdir()) == []


def test_a_rank_of_somebody_elses_launcher(place: Path) -> None:
    joined = Joined(Membership("srun", 3, 4, 1, "gpu03", 20_000))
    outcome = launched(joined, json.dumps([None, None, None, "tells"]).encode(), worker=WORKER)
    assert [reading.rank for reading in outcome.readings] == [3]
    assert outcome.readings[0].host == "3 of 4, 1 here, gpu03:20000"


def test_emulated_ranks_have_no_process_group(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES"):
        monkeypatch.setenv(name, "7")
    outcome = in_turn("tells")
    assert outcome.readings[0].host == "None of None, None here, None:None"


def test_elastic_launcher(place: Path) -> None:
    """With one rank that ends early, while the other does not wait for it: both are PyTorch's to start, and neither is
    left."""
    seen: list[list[int]] = []
    task = json.dumps(["sleeps", "exits"]).encode()
    outcome = launched(
        Elastic(2), task, worker=WORKER, patience=60, watch=lambda progress: seen.append(processes_of(place))
    )
    assert [(one.rank, one.message) for one in outcome.failures] == [(1, "ended with 3: no luck today")]
    assert max(map(len, seen)) >= 4, "keeper, launcher, and guards with workers"


def test_elastic_launcher_with_fixed_ranks(place: Path) -> None:
    """``node_rank`` meets at the endpoint's port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    way = Elastic(1, endpoint=f"localhost:{port}", node_rank=0)
    outcome = launched(way, b'["tells"]', worker=WORKER)
    assert outcome.failures == ()
    assert outcome.readings[0].host == f"0 of 1, 0 here, localhost:{port}"


def test_launcher_that_cannot_start(place: Path) -> None:
    (failure,) = launched(Elastic(1, endpoint="localhost:first"), b"[]", worker=WORKER).failures
    assert (failure.rank, failure.kind) == (None, "died")
    assert failure.message.startswith("PyTorch's launcher failed: ValueError: ")
    assert "first" in failure.message


def test_parent_imports_no_torch() -> None:
    names = "launch cluster devices progress run_files guards"
    modules = "; ".join(f"import memplan.validate.{name}" for name in names.split())
    check = "import sys; assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{modules}; {check}"], check=True)
