"""The accuracy that docs/timing.md states, row by row from the same benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks import timing
from benchmarks.measured import read_rows

MEASURED = timing.MEASURED
needs_measured = pytest.mark.skipif(not MEASURED.is_dir(), reason=f"no measured runs in {MEASURED}")


@pytest.mark.parametrize(("name", "limit"), [("arxiv-2205.05198-table-5", 0.03), ("arxiv-2104.04473-table-1", 0.045)])
def test_published_steps(name: str, limit: float) -> None:
    table = timing.published(name)
    assert table.median_error < limit
    assert max(abs(row.error) for row in table.rows) < 0.11
    assert table.rank_correlation > 0.98


@needs_measured
@pytest.mark.parametrize(
    ("name", "read", "limit", "worst"),
    [
        ("bigscience_a100.jsonl", timing.bigscience, 0.045, 0.07),
        ("megatron_b200.jsonl", timing.b200, 0.1, 0.2),
        ("torchtitan_h100.jsonl", timing.torchtitan, 0.23, 0.23),
    ],
)
def test_measured_steps(name: str, read: Callable[[Sequence[Any]], timing.Table], limit: float, worst: float) -> None:
    table = read(read_rows(MEASURED / name))
    assert table.median_error < limit
    assert max(abs(row.error) for row in table.rows) < worst


@needs_measured
def test_trials_are_ranked_better_than_by_parameters() -> None:
    table = timing.bigscience(read_rows(MEASURED / "bigscience_a100.jsonl"))
    rules = [row.baseline for row in table.rows]
    measured = [row.measured for row in table.rows]
    assert table.rank_correlation > 0.95
    assert timing.spearman(measured, [rule for rule in rules if rule is not None]) < 0.9


def test_rank_correlation() -> None:
    assert timing.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert timing.spearman([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == pytest.approx(-1.0)
