"""What a worker writes, read by who waits for it."""

from __future__ import annotations

import math
import time
from pathlib import Path

from memplan.records.readings import RankReading
from memplan.validate.failing import failures_of
from memplan.validate.run_files import Progress, RankFiles, Telling, Watch, ranks_in, read_json

from .workers.plain import reading


def test_progress(tmp_path: Path) -> None:
    """The last line of each rank counts, and half a line does not."""
    watch = Watch(tmp_path)
    watch.look()
    assert watch.progress == ()
    began = watch.since
    telling = Telling(tmp_path, 3)
    telling.says("loading")
    telling.says("step 1: forward", 5, 8)
    Telling(tmp_path, 1).says("waiting")
    watch.look()
    assert [(one.rank, one.what, one.allocated, one.total) for one in watch.progress] == [
        (1, "waiting", None, None),
        (3, "step 1: forward", 5, 8),
    ]
    assert watch.since > began
    with RankFiles(tmp_path, 3).progress.open("ab") as file:
        file.write(b'{"at": 1, "wh')
    before = watch.progress
    watch.look()
    assert watch.progress == before


def test_done(tmp_path: Path) -> None:
    telling, watch = Telling(tmp_path, 0), Watch(tmp_path)
    telling.says("step 3", 5, 8)
    telling.result(reading(0))
    watch.look()
    (progress,) = watch.progress
    assert progress == Progress(0, "done", progress.at, 5, 8, done=True)


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    """As of fp16 without a scaler: what a worker writes is read back."""
    given = reading(0).model_copy(update={"losses": (2.0, math.nan, math.inf)})
    Telling(tmp_path, 0).result(given)
    (files,) = ranks_in(tmp_path)
    losses = RankReading.model_validate_json(files.result.read_bytes()).losses
    assert (losses[0], math.isnan(losses[1]), losses[2]) == (2.0, True, math.inf)


def test_readings_of_other_machines(tmp_path: Path) -> None:
    Telling(tmp_path, 0).result(reading(12))
    (files,) = ranks_in(tmp_path)
    assert RankReading.model_validate_json(files.result.read_bytes()) == reading(12)


def test_failure(tmp_path: Path) -> None:
    telling = Telling(tmp_path, 2)
    telling.says("step 1: backward")
    telling.failed("error", "ValueError: a\n  b")
    (failure,) = failures_of(tmp_path, time.monotonic(), {})
    assert (failure.rank, failure.kind, failure.message, failure.when) == (
        2,
        "error",
        "ValueError: a b",
        "step 1: backward",
    )


def test_quiet(tmp_path: Path) -> None:
    """Patience begins anew with whatever any rank says."""
    watch = Watch(tmp_path)
    time.sleep(0.2)
    assert watch.quiet_for() >= 0.2
    Telling(tmp_path, 0).says("something")
    watch.look()
    assert watch.quiet_for() < 0.2


def test_nothing_is_half_written(tmp_path: Path) -> None:
    Telling(tmp_path, 0).failed("error", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.failure.json"]
    assert read_json(tmp_path / "rank-1.failure.json") is None
