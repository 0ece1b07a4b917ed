"""DeepSpeed's own engine run by ``memplan validate``: processes that meet by gloo, beside the estimate."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from memplan.plan.errors import LackingError, PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.records.readings import World
from memplan.tape.events import Category
from memplan.tape.program import fold_program
from memplan.validate.cluster import Elastic, InTurn
from memplan.validate.launch import launched
from memplan.validate.native import planned
from memplan.validate.run import Where, prepared
from memplan.validate.worker import Task

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not INSTALLED, reason="DeepSpeed is not installed: pip install deepspeed with DS_BUILD_OPS=0"
)

TINY = "--framework deepspeed --layers 3 --vocab 1000 --hidden 64 --heads 4 --seq 32 --mbs 2 --attention eager"
BUCKET = "--reduce-bucket-size 20000 --optimizer-implementation foreach --gpus 2"
LLAMA = f"{TINY} --model llama-3-8b --ffn 176 --kv-heads 2 {BUCKET}"
GPT2 = f"{TINY} --model gpt2 --ffn 256 {BUCKET}"
ZERO3 = (
    "--zero 3 --stage3-prefetch-bucket-size 10000 --stage3-param-persistence-threshold 100 "
    "--stage3-max-live-parameters 40000 --stage3-max-reuse-distance 20000"
)
"""A bucket holds several small tensors, but not the large ones; a few layers are gathered at once."""

CASES = {
    "llama-0": f"{LLAMA} --zero 0",
    "llama-1": f"{LLAMA} --zero 1",
    "llama-2": f"{LLAMA} --zero 2 --gbs 8",
    "llama-3": f"{LLAMA} {ZERO3}",
    "gpt2-0": f"{GPT2} --zero 0 --dtype fp32",
    "gpt2-1": f"{GPT2} --zero 1 --grad-accum-dtype fp32 --gbs 8",
    "gpt2-2": f"{GPT2} --zero 2 --dtype fp32",
    "gpt2-3": f"{GPT2} {ZERO3}",
}
LARGE = 512
"""Storages of so many bytes are scalars, of which the engine makes more than are estimated: losses, norms."""
SCALARS = 8 * LARGE


def plan_of(arguments: str) -> Plan:
    words = arguments.split()
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return read_plan(None, flags).plan


def task_of(plan: Plan, world: World) -> Task:
    found = planned("deepspeed", plan, "cpu")
    warmup = found.least_warmup
    return Task(plan=found.runs, code="deepspeed", world=world, device="cpu", warmup=warmup, steps=1, seconds=60.0)


def peak_of(changes: list[int]) -> int:
    return max(accumulate(changes, initial=0))


@needs_deepspeed
@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_the_estimates(case: str, tmp_path: Path) -> None:
    """Storages of forward and backward by their sizes, one by one, their sum and their peak; then the whole iteration:
    peak, what lies between iterations, and what each category has at the peak."""
    plan = plan_of(CASES[case])
    found = planned("deepspeed", plan, "cpu")
    environment = {**os.environ, "EVENTS": str(tmp_path)}
    content = task_of(plan, "real").model_dump_json().encode()
    worker = "tests.validate.workers.engine"
    outcome = launched(Elastic(2), content, worker=worker, patience=200.0, environment=environment)
    assert outcome.failures == ()
    assert [reading.rank for reading in outcome.readings] == [0, 1]
    for reading in outcome.readings:
        passes = json.loads((tmp_path / f"{reading.rank}.json").read_text())
        for name, pair in passes.items():
            measured, estimated = ([size for size in changes if abs(size) > LARGE] for changes in pair)
            assert Counter(measured) == Counter(estimated), name
            assert (sum(measured), peak_of(measured)) == (sum(estimated), peak_of(estimated)), name
        folded = fold_program(found.program(reading.rank))
        assert reading.requested is not None
        assert reading.static is not None
        assert 0 <= reading.requested - folded.peak <= SCALARS
        assert 0 <= reading.static - folded.static <= SCALARS
        assert reading.apart is None
        assert sum(reading.breakdown.values()) == reading.requested
        for category in Category:
            assert reading.breakdown.get(category.key, 0) == pytest.approx(folded.peak_by[category], abs=SCALARS)
        assert len(reading.losses) == (found.least_warmup + 1) * found.job(0).microbatches
        assert reading.losses[-1] < reading.losses[0]


@needs_deepspeed
@pytest.mark.parametrize("case", ["llama-2", "llama-3"])
def test_a_rank_that_runs_alone(case: str) -> None:
    """Rank of 64 in one process; collectives return what they were given."""
    plan = plan_of(f"{CASES[case].replace('--gpus 2', '--gpus 64').replace('--gbs 8', '')}")
    found = planned("deepspeed", plan, "cpu")
    ranks = found.distinct()
    assert len(ranks) == 1
    outcome = launched(InTurn(ranks), task_of(plan, "emulated").model_dump_json().encode(), patience=200.0)
    assert outcome.failures == ()
    (reading,) = outcome.readings
    folded = fold_program(found.program(reading.rank))
    assert reading.rank == ranks[0]
    assert reading.requested is not None
    assert 0 <= reading.requested - folded.peak <= SCALARS
    assert reading.losses == ()


@needs_deepspeed
def test_the_command() -> None:
    command = [sys.executable, "cli.py", "validate", *CASES["llama-2"].split(), "--with", "deepspeed"]
    more = ["--device", "cpu", "--tolerance", "0.2%", "--no-records", "--json"]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    record: dict[str, Any] = json.loads(done.stdout)
    run = record["run"]
    assert (run["code"], run["world"], record["verdict"]) == ("deepspeed", "real", "agrees")
    assert "deepspeed" in run["versions"]["others"]
    assert any("gloo" in note for note in run["notes"])


@needs_deepspeed
def test_what_names_categories_is_in_deepspeed() -> None:
    """A function or attribute that another release calls otherwise would leave its tensors temporary."""
    from memplan.frameworks.deepspeed.engine_training import KEPT, MAKERS, _package

    sources = [(path.name, path.read_text()) for path in Path(_package()).glob("runtime/**/*.py")]
    for file, function in MAKERS:
        named = any(f"def {function}(" in source for name, source in sources if name == file)
        assert named or function == "<listcomp>", (file, function)
    for name in KEPT:
        assert any(f"self.{name}" in source for _, source in sources), name


@pytest.mark.skipif(INSTALLED, reason="DeepSpeed is installed")
def test_without_deepspeed() -> None:
    with pytest.raises(LackingError, match="memplan validate needs deepspeed, which is not installed: pip install"):
        prepared(plan_of(CASES["llama-2"]), Where(2, code="deepspeed", device="cpu"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{LLAMA} --zero 2 --lora-rank 8", "without adapters"),
        ("--model gpt2 --framework ddp --gpus 2", "runs plans of framework deepspeed, and this one's is ddp"),
        ("--model bigscience-104b --framework megatron-deepspeed --gpus 4", "BigScience's own code"),
        (f"{TINY} --model gpt2 --gpus 2 --zero 2 --optimizer adam8bit", "must be one of sgd, adam, adamw"),
        (f"{LLAMA} --zero 2 --dtype fp16", "must be bf16 or fp32 with --device cpu"),
        (f"{LLAMA} --zero 2 --offload-optimizer cpu", "the host is the device there"),
        (f"{LLAMA} --zero 3 --offload-optimizer nvme", "writes nothing to disks"),
    ],
)
def test_refusals(arguments: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        prepared(plan_of(arguments), Where(2, code="deepspeed", device="cpu"))


@needs_deepspeed
def test_a_kernel_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    plan = plan_of(f"{TINY} --model gpt2 --gpus 2 --zero 2")
    with pytest.raises(LackingError, match="which needs ninja and c\\+\\+ on the path"):
        prepared(plan, Where(2, code="deepspeed", device="cpu"))


def test_fake_tensors_are_refused() -> None:
    with pytest.raises(PlanError, match="must be cuda or cpu with --with deepspeed"):
        prepared(plan_of(CASES["llama-2"]), Where(2, code="deepspeed", device="fake"))
