"""``memplan validate`` as a command: what it refuses before anything is started, in one line and with the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.cli import main
from memplan.commands.validate import _silent
from memplan.records.readings import Failure
from tests.records.made import record_of

FAKE = ["validate", "--model", "gpt2", "--layers", "2", "--seq", "64", "--device", "fake"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "tpu"], "--device: tpu must be one of cuda, cpu, fake; did you mean cpu?"),
        (["--tolerance", "0"], "--tolerance: 0 must be a percentage above 0 and below 100, as 3%"),
        (["--tolerance", "ten"], "--tolerance: ten must be a percentage above 0 and below 100, as 3%"),
        (["--steps", "0"], "--steps: 0 must be from 1 to 1000"),
        (["--warmup", "-1"], "--warmup: -1 must be from 1 to 1000"),
        (["--timeout", "0"], "--timeout: 0 must be more than 0"),
        (["--nnodes", "2"], "--rdzv-endpoint: is needed with --nnodes"),
        (["--nnodes", "2", "--rdzv-endpoint", "node1"], "--rdzv-endpoint: node1 must be the host and port of"),
        (["--node-rank", "0"], "--node-rank: 0 must be from 0 to 0, with --nnodes and --rdzv-endpoint"),
        (["--gpus", "0"], "--gpus: hardware.gpus = 0: must be at least 1"),
        (
            ["--framework", "ddp", "--zero", "3"],
            "layout.zero = 3: must be at most 1 with framework ddp; deepspeed has ZeRO-",
        ),
        (["--optimizer", "lion"], "optimizer.name = lion: must be one of sgd, adam, adamw, adafactor"),
    ],
)
def test_wrong_input(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAKE, *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert line in error
    assert error.count("\n") == 1


def test_more_gpus_than_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan's own number of GPUs is the number of ranks; ``--gpus`` says how many there are here."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("model: {base: gpt2, layers: 2}\nframework: ddp\nhardware: {gpus: 2}\n")
    assert main(["validate", str(plan), "--gpus", "4", "--device", "cpu"]) == 2
    assert "--gpus: 4 is more than the 2 ranks of the plan" in capsys.readouterr().err


def test_ranks_in_turn_are_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of those that torchrun started would run all of them, on the same GPU."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("model: {base: gpt2, layers: 2}\nframework: ddp\nhardware: {gpus: 4}\n")
    started = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main(["validate", str(plan), "--gpus", "2", "--device", "cpu"]) == 2
    assert "--gpus: 2 is fewer than the 4 ranks of the plan" in capsys.readouterr().err


def test_a_rank_that_failed_says_so_where_another_reports(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(rank=5, kind="out-of-memory", message="Tried to allocate 20.00 GiB.")
    assert _silent(record_of(failures=(failure,))) == 1
    assert capsys.readouterr().err == "memplan: rank 5, out of memory: Tried to allocate 20.00 GiB.\n"
    assert _silent(record_of()) == 0
    assert capsys.readouterr().err == ""


def test_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["validate", "--model", "gpt2", "--gpus", "1"]) == 3
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "--device fake" in error


def test_a_record_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text("mine")
    assert main([*FAKE, "--record", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert file.read_text() == "mine"


@pytest.mark.usefixtures("here")
def test_a_run_is_kept_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    file = tmp_path / "run.json"
    assert main([*FAKE, "--record", str(file), "-q"]) == 0
    assert capsys.readouterr().out.startswith("Agrees: requested ")
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert "gpt2" in listed
    assert "agrees" in listed
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "another"))
    assert main(["runs", "--import", str(file)]) == 0


@pytest.mark.usefixtures("here")
def test_a_plan_of_another_framework_says_what_runs_and_nothing_is_kept_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    flags = ["--framework", "deepspeed", "--zero", "1", "--gpus", "2", "--no-records"]
    assert main([*FAKE, *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torch-native code runs in place of deepspeed: DDP and ZeroRedundancyOptimizer;")
    assert not (tmp_path / "data").exists()


def test_adapters_of_megatrons_modules_run_on_no_code_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """DDP ran without them, and agreed with its own estimate."""
    flags = ["--framework", "megatron", "--lora-rank", "8", "--lora-targets", "linear_qkv", "--device", "fake"]
    assert (
        main(["validate", "--model", "llama-3-8b", "--gpus", "1", "--mbs", "1", "--gbs", "1", "--seq", "64", *flags])
        == 2
    )
    assert "lora.rank = 8: is not run in place of megatron" in capsys.readouterr().err
