"""Validations as they run on a GPU, on one that computes nothing (``tests/oracle/cuda_device``): PyTorch's allocator,
operators and autograd are those of its CUDA build. The context and seconds are made up, and not looked at."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.cuda_device import PYTHON, environment

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"needs a Python with a CUDA build of torch in {PYTHON}"
)
FLAGS = "--no-records --json --layers 4 --seq 512 --mbs 2 --dtype fp32 --attention eager"
CASES = {
    "gpt2": "--model gpt2",
    "gpt2-bf16-recompute": "--model gpt2 --dtype bf16 --recompute full",
    "bert": "--model bert-large",
    "fused": "--model gpt2 --optimizer-implementation fused",
    "fsdp": "--model llama-3-8b --framework fsdp --gpus 8 --emulate --hidden 1024 --ffn 2048 --heads 8 --kv-heads 8",
}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    code = "import torch; print(torch.__path__[0])"
    done = subprocess.run([os.environ[PYTHON], "-c", code], capture_output=True, text=True, check=True)
    return environment(Path(done.stdout.strip()), tmp_path_factory.mktemp("cuda_device"))


def run(there: dict[str, str], arguments: str) -> dict[str, Any]:
    words = [*FLAGS.split(), *arguments.split()]
    command = [os.environ[PYTHON], "cli.py", "validate", *words]
    done = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.parametrize("case", CASES)
def test_allocated_is_estimated(case: str, there: dict[str, str]) -> None:
    record = run(there, CASES[case])
    (rank,), (stage,) = record["run"]["ranks"], record["estimate"]["stages"]
    assert (record["run"]["gpu"], record["run"]["device"]) == ("h200", "cuda")
    assert rank["requested"] == pytest.approx(stage["requested_bytes"], rel=0.003)
    assert rank["allocated"] == pytest.approx(stage["allocated_bytes"], rel=0.005)
    assert rank["workspaces"] > 0
