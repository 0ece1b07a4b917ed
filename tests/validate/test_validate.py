"""``memplan validate`` on a CPU: real processes that meet by gloo, and ranks that are played one by one.

On fake tensors without a process of its own: ``tests/trace/test_run.py`` starts those.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.validate.cluster import Elastic
from memplan.validate.launch import launched
from memplan.validate.native import native
from memplan.validate.worker import Task

ROOT = Path(__file__).parents[2]
LLAMA = "--model llama-3-8b --layers 4 --vocab 2048 --hidden 256 --ffn 512 --heads 4 --kv-heads 2 --seq 128"
GPT = "--model gpt2 --layers 2 --hidden 256 --heads 4 --ffn 1024 --vocab 4096 --seq 128 --attention eager --dtype fp32"
TITAN = f"{LLAMA} --framework fsdp --fsdp-code torchtitan"
CASES = {
    "pp2": f"{TITAN} --gpus 2 --pp 2 --gbs 4",
    "pp2-tp2": f"{TITAN} --gpus 4 --pp 2 --tp 2 --gbs 4",
    "fsdp2": f"{LLAMA.replace('--layers 4', '--layers 2')} --framework fsdp --gpus 2 --dtype fp32 --attention eager",
    "ddp2": f"{GPT} --framework ddp --gpus 2",
    "zero1": f"{GPT} --framework ddp --zero 1 --gpus 2",
}
NEAR = 0.005


def run(arguments: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "cli.py", "validate", *arguments.split(), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def validated(arguments: str, *more: str) -> dict[str, Any]:
    done = run(arguments, "--json", "--no-records", *more)
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def estimated(record: dict[str, Any], stage: int) -> int:
    (found,) = [one["requested_bytes"] for one in record["estimate"]["stages"] if one["stage"] == stage]
    return int(found)


EACH_TIME = "fsdp2"
"""The command runs ``ddp2``, too, and ranks of a pipeline are played; ZeRO's are beside what was recorded of real
processes in ``tests/trace/test_ddp.py``. These are slow."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == EACH_TIME else [pytest.mark.slow]) for case in CASES]
)
def test_real_processes(case: str) -> None:
    """Each rank's storages are what PyTorch's own tracker sees in the same process, the most loaded rank of each stage
    needs what was estimated, and what all train gets better at it."""
    words = CASES[case].split()
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    found = native(read_plan(None, flags).plan)
    task = Task(plan=found.runs, world="real", device="cpu", warmup=3, steps=1, seconds=60.0)
    content = task.model_dump_json().encode()
    outcome = launched(Elastic(found.ranks), content, worker="tests.validate.workers.tracked", patience=120.0)
    assert outcome.failures == ()
    assert [reading.rank for reading in outcome.readings] == list(range(found.ranks))
    for reading in outcome.readings:
        tracker, beside = reading.moments
        assert beside.requested == pytest.approx(tracker.requested, rel=NEAR), reading.rank
        assert sum(reading.breakdown.values()) == reading.requested
    for folded in estimate(found.runs).stages:
        most = max(reading.requested or 0 for reading in outcome.readings if reading.stage == folded.stage)
        assert most == pytest.approx(folded.requested, rel=NEAR)
    losses = [reading.losses for reading in outcome.readings if reading.losses]
    assert losses
    assert all(own[-1] < own[0] - 0.1 for own in losses)


def test_the_command() -> None:
    record = validated(f"{CASES['ddp2']} --device cpu --warmup 1 --tolerance 0.5%")
    ranks = record["run"]["ranks"]
    assert record["run"]["world"] == "real"
    assert record["verdict"] == "agrees"
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["requested"] == pytest.approx(estimated(record, 0), rel=NEAR) for rank in ranks)


def test_ranks_that_are_played() -> None:
    """One rank of each stage, alone; what others would have computed means nothing."""
    record = validated(f"{TITAN} --gpus 4 --pp 2 --tp 2 --gbs 4 --device cpu --emulate --warmup 1 --tolerance 0.5%")
    ranks = record["run"]["ranks"]
    assert record["run"]["world"] == "emulated"
    assert [rank["rank"] for rank in ranks] == [0, 2]
    for rank in ranks:
        assert rank["requested"] == pytest.approx(estimated(record, rank["stage"]), rel=NEAR)
        assert rank["losses"] == []


@pytest.mark.usefixtures("here")
def test_categories_of_two_moments_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of GPT-2 on 64 tokens: most is requested in the optimizer's step over the embedding (102.2 MiB of
    temporaries), and most is allocated in another moment, beside workspaces. With 1,024 tokens both are one moment, and
    nothing is to be said."""
    told = "estimated when most are allocated (482.3 MiB requested then)"
    flags = ["validate", "--model", "gpt2", "--layers", "2", "--mbs", "1", "--device", "fake", "--no-records"]
    assert main([*flags, "--seq", "64"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    assert main([*flags, "--seq", "1024"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured" in shown
    assert "when most are allocated" not in shown


@pytest.mark.usefixtures("here")
def test_fake_tensors_of_a_stage_alone_need_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{TITAN} --gpus 4 --pp 2 --tp 2 --gbs 4 --device fake --stage 1 --json --no-records"
    assert main(["validate", *words.split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    record = json.loads(captured.out)
    assert record["run"]["device"] == "fake"
    assert record["verdict"] == "agrees"
    (rank,) = record["run"]["ranks"]
    assert (rank["stage"], rank["requested"]) == (1, estimated(record, 1))


@pytest.mark.slow  # two agents of two processes; test_launch_together joins two machines in every run
def test_of_two_machines_the_first_reports() -> None:
    """Two commands that meet, as on two machines with a rank each: one has the readings of both."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        meeting = f"localhost:{probe.getsockname()[1]}"
    words = f"{CASES['ddp2']} --device cpu --warmup 1 --nnodes 2 --rdzv-endpoint {meeting} --json --no-records"
    command = [sys.executable, "cli.py", "validate", *words.split()]
    pipe = subprocess.PIPE
    machines = [subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    told = [machine.communicate(timeout=300) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0]
    (report,) = [out for out, _ in told if out]
    (silent,) = [errors for out, errors in told if not out]
    assert silent.strip() == "memplan: the machine of the first rank tells how it went"
    assert [rank["rank"] for rank in json.loads(report)["run"]["ranks"]] == [0, 1]
