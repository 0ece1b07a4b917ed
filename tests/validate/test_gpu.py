"""With a GPU: what is measured is what was estimated."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="needs a CUDA GPU: it measures what its allocator gives out"),
]
LLAMA = "--model llama-3-8b --layers 4 --seq 2048"
TITAN = f"{LLAMA} --framework fsdp --fsdp-code torchtitan"
CASES = {
    "gpt2-xl-fp32-eager": "--model gpt2-xl --layers 12 --seq 1024 --dtype fp32 --attention eager",
    "gpt2-xl-bf16-flash": "--model gpt2-xl --layers 12 --seq 1024 --dtype bf16 --attention flash --mbs 4",
    "gpt2-xl-recompute": "--model gpt2-xl --layers 12 --seq 1024 --dtype bf16 --recompute full --mbs 4",
    "bert-large": "--model bert-large --seq 512 --mbs 8 --dtype fp32 --attention eager",
    "llama-3-8b": f"{LLAMA} --dtype bf16",
    "vocabulary-256k": "--model gpt2 --vocab 256000 --seq 1024 --mbs 4 --dtype bf16",
    "ddp8": "--model gpt2 --seq 1024 --mbs 4 --dtype bf16 --framework ddp --gpus 8 --emulate",
    "zero1": "--model gpt2 --seq 1024 --mbs 4 --dtype bf16 --framework ddp --zero 1 --gpus 8 --emulate",
    "fsdp8": f"{TITAN} --gpus 8 --emulate",
    "fsdp64": f"{TITAN} --gpus 64 --emulate",
    "tp2-pp2": f"{TITAN} --tp 2 --pp 2 --gpus 8 --gbs 8 --emulate",
}


def run(arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "cli.py", "validate", *arguments.split(), "--json", "--no-records"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_measured_is_estimated(case: str) -> None:
    code, record = run(CASES[case])
    assert code == 0
    stages = {stage["stage"]: stage for stage in record["estimate"]["stages"]}
    for rank in record["run"]["ranks"]:
        expected = stages[rank["stage"]]
        assert rank["requested"] == pytest.approx(expected["requested_bytes"], rel=0.003)
        assert rank["allocated"] == pytest.approx(expected["allocated_bytes"], rel=0.015)
        assert rank["reserved"] == pytest.approx(expected["reserved_bytes"], rel=0.05)
        assert rank["device_bytes"] is None or rank["device_bytes"] > rank["reserved"]
        assert len(rank["seconds"]) == 3


def test_a_run_out_of_memory_says_which_tensor_it_was() -> None:
    """Scores of 256,000 tokens for each of a micro-batch that no GPU holds, behind a layer that most do (14 GB)."""
    code, record = run("--model gpt2 --layers 1 --vocab 256000 --seq 1024 --mbs 512 --dtype bf16 --force")
    (failure,) = record["run"]["failures"]
    assert code == 1
    assert failure["kind"] == "out-of-memory"
    assert failure["allocated"] > 0
    assert "logits" in failure["message"]
