"""Plans far beyond what anybody trains are answered at once or refused in one line, and many of them need no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from memplan import caches
from memplan.allocator.replay import replay
from memplan.commands import app
from memplan.estimate import allocator_settings, estimate, programs_of
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.program import Action

TINY = "--model gpt2 --hidden 64 --heads 1 --seq 16"
TITAN = "--model llama-3-8b --framework fsdp --fsdp-code torchtitan --seq 2048"
ANSWERED = [
    "--model gpt2 --framework megatron --pp 4 --gpus 4 --gbs 2147483648 --seq 128",
    "--model llama-2-7b --framework megatron --pp 8 --vpp 2 --gpus 8 --gbs 2147483648 --seq 128",
    "--model gpt2 --framework megatron-deepspeed --pp 4 --gpus 4 --gbs 2147483648",
    f"{TITAN} --pp 8 --gpus 8 --gbs 16384",
    f"{TINY} --framework ddp --gpus 2 --layers 1024 --bucket-cap-mb 0.001",
]
REFUSED = {
    "--model gpt2 --layers 10000": "--layers: model.layers = 10000: must be at most 1,024",
    "--model gpt2 --layers 1000 --framework megatron --pp 1000": "--pp: layout.pp = 1000: must be at most 128",
    "--model gpt2 --layers 1024 --framework megatron --pp 128 --vpp 8 --gpus 128": "makes 1,024 virtual stages",
    f"{TITAN} --pp 8 --gpus 8 --gbs 1000000": "--gbs: batch.gbs = 1000000: gives 1,000,000 micro-batches",
    f"{TITAN} --pp 8 --gpus 8 --gbs 1000000 --schedule gpipe": "--gbs: batch.gbs = 1000000: gives 1,000,000",
    "--model gpt2 --framework megatron-deepspeed --pp 4 --gpus 4 --gbs 1000000 --schedule gpipe": "at most 128 TiB",
    "--model gpt2 --gpu h100-80gb --env CUBLAS_WORKSPACE_CONFIG=:99999999999:99999999": "than 1 TiB",
}


@pytest.mark.parametrize("flags", ANSWERED)
def test_an_extreme_plan_is_answered_soon_and_in_little_memory(flags: str, tmp_path: Path) -> None:
    """Seconds of the processor, of a machine that may be slow: much less than playing every micro-batch takes."""
    limited = ["bash", "-c", 'ulimit -v 500000 && exec "$@"', "bash"]  # KiB
    command = [*limited, sys.executable, "-m", "memplan.cli", "estimate", *flags.split(), "--json"]
    folder = Path(__file__).resolve().parents[1]
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, (tmp_path / "errors").read_text()) == (0, "")
    assert used.ru_utime < 8


@pytest.mark.parametrize("flags", REFUSED)
def test_beyond_what_can_be_folded_one_line_names_the_limit(flags: str) -> None:
    with pytest.raises(PlanError) as refused:
        app.run_command(["estimate", *flags.split(), "--json"])
    assert REFUSED[flags] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("flags", "stage"), [("pp=4", 3), ("pp=4 vpp=2", 3), ("pp=1", 0)])
def test_reports_that_fill_segments_are_those_that_are_played(
    flags: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's last stage keeps a report for every micro-batch: counted by the segment, or held one by one."""
    given = dict(one.split("=") for one in flags.split())
    gpus = given["pp"]
    fields = {
        **given,
        "model": "gpt2",
        "layers": "8",
        "framework": "megatron",
        "gpus": gpus,
        "gbs": "40000",
        "seq": "64",
    }
    plan = resolve(read_plan(None, fields).plan)
    program = programs_of(plan, Options())[stage]
    counted = replay((program,), allocator_settings(plan), ())
    few = [one for one in program.order.shortened if one.what == "begin_all"]
    assert [one.microbatch > 30000 for one in few] == [True]

    one_by_one = [Action("begin", 0, -1 - number, "report") for number in range(few[0].microbatch)]
    actions = [*one_by_one, *(one for one in program.order.shortened if one.what != "begin_all")]
    monkeypatch.setattr(type(program.order), "shortened", actions)
    assert replay((program,), allocator_settings(plan), ()) == counted


def test_what_functions_keep_of_earlier_plans_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimated(number: int) -> None:
        framework = ("ddp", "fsdp", "megatron", "single")[number % 4]
        sizes = {"layers": str(2 + number), "hidden": "64", "heads": "1", "gpus": "1" if framework == "single" else "2"}
        estimate(read_plan(None, {"model": "gpt2", "framework": framework, "seq": "16", **sizes}).plan)

    monkeypatch.setattr(caches, "PLANS", 4)
    monkeypatch.setattr(caches, "_plans", count(1))
    caches.forget()
    assert caches.kept() == 0
    for number in (1, 2, 3):
        estimated(number)
    three = caches.kept()
    estimated(4)  # forgets the three before it
    after = caches.kept()
    caches.forget()
    estimated(4)
    assert caches.kept() == after < three
