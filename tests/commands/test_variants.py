"""Which plans one command estimates, and what it calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.commands.estimate import read_variants
from memplan.plan.errors import PlanError
from memplan.plan.read import ReadPlan


def answered(source: str | None, flags: dict[str, str], compare: list[str], vary: list[str]) -> dict[str, ReadPlan]:
    """``read_variants``, where none is refused."""
    variants = read_variants(source, flags, compare, vary)
    plans = {name: read for name, read in variants.items() if isinstance(read, ReadPlan)}
    assert list(plans) == list(variants)
    return plans


def test_every_combination_of_values_has_its_name() -> None:
    variants = answered("llama-3-8b", {"seq": "512"}, [], ["optimizer=adamw,adam8bit", "mbs=1,2"])
    assert list(variants) == [
        "optimizer=adamw mbs=1",
        "optimizer=adamw mbs=2",
        "optimizer=adam8bit mbs=1",
        "optimizer=adam8bit mbs=2",
    ]
    last = variants["optimizer=adam8bit mbs=2"]
    assert (last.plan.optimizer.name, last.plan.batch.mbs, last.plan.batch.seq) == ("adam8bit", 2, 512)
    assert str(last.origins["batch.mbs"]) == "--vary mbs"
    assert str(last.origins["batch.seq"]) == "--seq"


def test_plans_are_compared_with_the_same_flags(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: llama-3-8b\nbatch: {mbs: 4}\n")
    mine = str(tmp_path / "mine.yaml")
    variants = answered("llama-3-8b", {"seq": "512"}, [mine], [])
    assert list(variants) == ["llama-3-8b", mine]
    assert [read.plan.batch.seq for read in variants.values()] == [512, 512]
    assert [read.plan.batch.mbs for read in variants.values()] == [1, 4]
    assert len(answered("llama-3-8b", {}, [mine], ["mbs=1,2"])) == 4


def test_flags_alone_are_a_plan_only_if_they_name_a_model() -> None:
    assert list(answered(None, {"seq": "512"}, ["llama-3-8b"], [])) == ["llama-3-8b"]
    assert list(answered(None, {"model": "gpt2"}, ["llama-3-8b"], [])) == ["flags", "llama-3-8b"]


def test_values_that_are_lists_are_separated_by_semicolons() -> None:
    one = answered("llama-3-8b", {}, [], ["partition=uniform,parameters"])
    assert [read.plan.pipeline.partition for read in one.values()] == ["uniform", "parameters"]
    two = answered("llama-3-8b", {}, [], ["partition=0,4,8;0,5,8"])
    assert [read.plan.pipeline.partition for read in two.values()] == [(0, 4, 8), (0, 5, 8)]
    three = answered("llama-3-8b", {}, [], ["cutoffs=10,20"])
    assert [read.plan.loss.cutoffs for read in three.values()] == [(10, 20)]
    four = answered("llama-3-8b", {}, [], ["env=A=1,A=2"])
    assert [read.plan.environment for read in four.values()] == [{"A": "1"}, {"A": "2"}]


@pytest.mark.parametrize("assignment", ["tp", "tp=", "tp=1,,2", "=1", "nothing=1"])
def test_other_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(PlanError, match=r"^--vary: "):
        read_variants("llama-3-8b", {}, [], [assignment])


def test_frameworks_are_compared_like_with_like(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed shards as FSDP does unless somebody says how, and each row says what is sharded and kept in fp32."""
    job = [
        "estimate",
        "--model",
        "llama-3-8b",
        "--layers",
        "2",
        "--gpus",
        "8",
        "--vary",
        "framework=fsdp,deepspeed,ddp",
    ]
    assert main([*job, "--json"]) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert [one["plan"]["layout"]["zero"] for one in variants] == [0, 3, 0]
    codes = [[notice["code"] for notice in one["warnings"]] for one in variants]
    assert ["like-with-like" in one for one in codes] == [False, True, False]
    said = answered(None, {"model": "llama-3-8b", "gpus": "8"}, [], ["framework=fsdp,deepspeed", "zero=0"])
    assert [read.plan.layout.zero for read in said.values()] == [0, 0]
    assert main(job) == 0
    shown = capsys.readouterr().out
    assert "framework=fsdp       all sharded; fp32 parameters\n" in shown
    assert "framework=deepspeed  all sharded; bf16 parameters with fp32 copies\n" in shown
    assert "framework=ddp        nothing sharded; only bf16 parameters\n" in shown


def test_a_refused_value_stands_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are answered; the first of them is what they are compared with, and the exit code is 2."""
    job = ["estimate", "--model", "gpt2", "--framework", "megatron", "--gpus", "2", "--gpu", "h100", "--vary"]

    def run(*more: str) -> tuple[str, str]:
        assert main([*job, *more]) == 2
        shown, told = capsys.readouterr()
        return shown, told

    refusal = "hardware.gpus = 2: must be a multiple of tp x pp x cp = 3 x 1 x 1 = 3"
    shown, told = run("tp=3,1,2")
    words = " ".join(shown.split())
    assert all(part in words for part in ("tp=3 refused tp=1 fits", f"tp=3 refused --gpus: {refusal}", "tp=2: saves "))
    assert told.startswith(f"--gpus: {refusal}")
    assert told.count("\n") == 1
    shown, told = run("tp=3,1,2", "--json")
    first, *others = json.loads(shown)["variants"]
    assert first == {"name": "tp=3", "refused": told.removesuffix("\n"), "fits": None, "verdict": None}
    assert told.startswith(f"--gpus: {refusal}")
    assert [(one["name"], one["verdict"]) for one in others] == [("tp=1", "fits"), ("tp=2", "fits")]
    shown, again = run("tp=3,1,2", "--csv")
    assert [line.partition(",")[0] for line in shown.splitlines()] == ["variant", "tp=1", "tp=2"]
    assert run("tp=3") == ("", told)
    assert again == told


@pytest.mark.parametrize("plan", ["gpt2.yaml", "first.sh"])
def test_set_is_of_the_compared_scripts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    """Of a plan, which takes none, and of a script that lies beside it."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2.yaml").write_text("model: gpt2\nbatch: {mbs: 1, seq: 128}\n")
    for name, hidden in (("first.sh", 512), ("second.sh", 1024)):
        words = f"--num-layers $LAYERS --hidden-size {hidden} --num-attention-heads 8 --seq-length 512"
        words += " --max-position-embeddings 512 --micro-batch-size 1 --vocab-size 1000 --tokenizer-type NullTokenizer"
        Path(name).write_text(f"torchrun --nproc_per_node 1 pretrain_gpt.py {words}\n")
    assert main(["estimate", plan, "--compare", "second.sh", "--set", "LAYERS=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    assert [one["plan"]["model"]["layers"] for one in found] == [3 if plan == "first.sh" else 12, 3]
