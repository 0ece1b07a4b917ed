"""The first line of a validation: what runs, where, and for how long."""

from __future__ import annotations

import re

import pytest

from memplan.plan.read import read_plan
from memplan.validate import devices as validate_devices, run
from memplan.validate.devices import Device
from memplan.validate.run import Prepared, Where, announced, duration, iterations, prepared

GPT = "model=gpt2 seq=1024 dtype=bf16 framework=single"
TITAN = "model=llama-3-8b layers=8 seq=512 framework=fsdp fsdp-code=torchtitan pp=4 gpus=8 gbs=8"


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device(0, "GPU-0", "NVIDIA H200", "580.1", 143_771 << 20, 0, 143_156 << 20)
    monkeypatch.setattr(validate_devices, "devices", lambda: (gpu,))
    monkeypatch.setattr(run, "version", lambda package: "2.13.0+cu130")
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def asked(words: str, where: Where | None = None) -> Prepared:
    flags = dict(word.split("=") for word in words.split())
    return prepared(read_plan(None, flags).plan, where or Where(gpus=1), {})


def seconds(line: str) -> int:
    found = re.search(r", about (\d+) s$", line)
    assert found is not None, line
    return int(found[1])


def test_one_process_on_a_gpu() -> None:
    """2 iterations that warm up, 3, one by phases, and 3 that are followed: most of it is imports."""
    line = announced(asked(GPT))
    assert line.startswith("runs gpt2 (single, bf16, mbs 1, seq 1024) as one process on h200: 9 iterations, about ")
    assert 15 <= seconds(line) <= 25


def test_every_rank_in_turn_has_its_own_time() -> None:
    whole, one = asked(TITAN), asked(TITAN, Where(gpus=1, stages=(2,)))
    assert " as 4 of 8 ranks, one after another, on h200: 9 iterations" in announced(whole)
    assert " as one of 8 ranks on h200: " in announced(one)
    assert duration(whole) == pytest.approx(4 * (duration(one) or 0))
    assert seconds(announced(one)) < 60


def test_on_a_cpu() -> None:
    """By its products: GPT-2 at 1,024 tokens has 0.9 TFLOP a step."""
    found = asked(GPT, Where(gpus=1, device="cpu"))
    assert announced(found).startswith("runs gpt2 (single, bf16, mbs 1, seq 1024) as one process on the CPU: 3 iter")
    assert iterations(found) == 3
    assert 100 < seconds(announced(found)) < 200


def test_no_more_micro_batches_than_run() -> None:
    two, many = (asked(f"{GPT} gbs={gbs}", Where(gpus=1, device="cpu")) for gbs in (2, 64))
    assert duration(many) == pytest.approx(duration(two))


def test_a_gpu_whose_speed_nobody_published(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device(0, "GPU-0", "NVIDIA X1", "580.1", 50 << 30, 0, 50 << 30)
    monkeypatch.setattr(validate_devices, "devices", lambda: (gpu,))
    assert announced(asked(GPT)).endswith("as one process on the GPU: 9 iterations")


def test_fake_tensors_are_over_before_it_is_read() -> None:
    assert announced(asked(GPT, Where(gpus=1, device="fake"))) == ""
