"""Ranks on a CPU need memory of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.validate.devices import check_host

PLAN = read_plan(None, {"model": "gpt2", "framework": "ddp", "gpus": "4", "seq": "128", "dtype": "fp32"}).plan


def meminfo(folder: Path, available: int) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   {available >> 10} kB\n")
    return file


def test_ranks_that_run_at_once_need_memory_each(tmp_path: Path) -> None:
    estimated = estimate(PLAN)
    memory = meminfo(tmp_path, 3 * estimated.stages[0].requested)
    check_host(estimated, 2, memory)
    with pytest.raises(PlanError) as caught:
        check_host(estimated, 4, memory)
    assert "4 ranks are estimated to need" in str(caught.value)
    assert "--force" in str(caught.value)


def test_what_is_not_known_is_not_checked(tmp_path: Path) -> None:
    check_host(estimate(PLAN), 1 << 40, tmp_path / "none")
