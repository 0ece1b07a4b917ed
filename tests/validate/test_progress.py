"""What is shown of a run: on a terminal, in a pipe, and not at all."""

from __future__ import annotations

import os
import pty
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from memplan.report.names import GIB
from memplan.validate import progress as module
from memplan.validate.progress import Row, rows_of, shown, table_of
from memplan.validate.run_files import Progress


def at(rank: int, what: str = "step 1: forward", began: float = 0.0, allocated: int | None = None) -> Progress:
    return Progress(rank, what, began, allocated, None if allocated is None else 80 * GIB)


def test_a_row_for_each_rank() -> None:
    rows = rows_of([at(0, allocated=GIB), at(1, "loading")], {0: 0, 1: 1})
    assert rows == (Row("rank 0", "step 1: forward", GIB, 80 * GIB), Row("rank 1", "loading", None, None))


def test_a_row_for_each_stage() -> None:
    """Of many ranks: the one that began what it does first is the slowest, and the one with most memory the fullest."""
    ranks = [at(rank, f"step {rank}", 100.0 - rank % 8, (rank + 1) * GIB) for rank in range(32)]
    rows = rows_of(ranks, {rank: rank // 16 for rank in range(32)})
    assert rows == (
        Row("stage 0 (16 ranks)", "step 7", 16 * GIB, 80 * GIB),
        Row("stage 1 (16 ranks)", "step 23", 32 * GIB, 80 * GIB),
    )


def test_a_rank_that_is_done_is_not_the_slowest() -> None:
    ranks = [Progress(rank, "done", 1.0, done=True) for rank in range(20)]
    assert rows_of([*ranks, at(20, "step 9", 50.0)], dict.fromkeys(range(21), 0))[0].what == "step 9"


def test_bars() -> None:
    rows = (Row("rank 0", "step 1", 40 * GIB, 80 * GIB), Row("rank 1", "loading", None, None))
    console = Console(file=StringIO(), width=100)
    console.print(table_of(rows, console))
    assert isinstance(console.file, StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first.split() == ["rank", "0", "■" * 12 + "·" * 11 + "│", "40.00", "GiB", "of", "80.00", "GiB", "step", "1"]
    assert second.split() == ["rank", "1", "loading"]


def drawn(seconds: float) -> str:
    """What a terminal gets in ``seconds`` of a run, or a little more on a machine that is busy."""
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as terminal:  # noqa: PTH123
        with shown(stream=terminal) as display:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                display([at(0, allocated=40 * GIB)])
                time.sleep(0.05)
        os.write(follower, b"END")
        said = b""
        while not said.endswith(b"END"):
            said += os.read(leader, 65536)
    os.close(leader)
    return said.removesuffix(b"END").decode()


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    said = drawn(0.3)
    assert "rank 0" in said
    assert said.endswith("\x1b[2K"), "the last row is wiped out"


def test_short_runs_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    assert drawn(0.2) == ""


@pytest.mark.parametrize(("verbosity", "lines"), [("verbose", 2), ("normal", 0), ("quiet", 0)])
def test_pipe(verbosity: module.Verbosity, lines: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line when something changes, and not too many of them: by a clock of the test's own."""
    now = time.monotonic() + 60  # behind the moment at which the display begins
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "BETWEEN", 0.2)
    with (tmp_path / "out").open("w+", encoding="utf-8") as pipe:
        with shown(verbosity, stream=pipe) as display:
            for what in ("loading", "loading", "step 1", "step 2"):
                display([at(0, what, allocated=GIB), at(1, "loading")])
                now += 0.15
        pipe.seek(0)
        said = pipe.read().splitlines()
    assert len(said) == lines
    if lines:
        assert said[0].endswith("s  rank 0: loading (1.00 GiB of 80.00 GiB); rank 1: loading")
        assert said[1].endswith("s  rank 0: step 1 (1.00 GiB of 80.00 GiB)")
