"""``memplan estimate --from``: what the command line makes of a launch file."""

# ruff: noqa: E501 (tables of scripts, arguments and the lines that they get)

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.cli import main

from ..formats.launch.scripts import BIGSCIENCE, GPT, script

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``memplan`` in a folder with launch files: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "train.sh").write_text(GPT)
    (tmp_path / "bigscience.sh").write_text(BIGSCIENCE)
    (tmp_path / "forked.sh").write_text(script(arguments="--my-own 1 --bf16"))
    (tmp_path / "odd.sh").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "plan.yaml").write_text("model: gpt2\nframework: single\n")
    (tmp_path / "small.sh").write_text(script(arguments="--my-own 1"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--from", "megatron"], "--from: needs a file, as memplan estimate --from megatron train.sh --gpus 64"),
        (["--from"], "--from: needs a value: the framework whose launch file PLAN is, megatron, megatron-bridge, megatron-deepspeed, deepspeed, torchtitan, trainer or accelerate"),
        (["--from", "torchtitan"], "--from: needs a file, as memplan estimate --from torchtitan llama3_8b.toml --gpus 64"),
        (["--from", "torchtitan", "x"], "x: no such file"),
        (["--from", "fairseq", "x"], "--from: fairseq must be megatron, megatron-bridge, megatron-deepspeed, deepspeed, torchtitan, trainer or accelerate"),
        (["--from", "megatron", "nothere.sh"], "nothere.sh: no such file"),
        (["--from", "megatron", "train.sh", "--set", "X"], "--set: X must be NAME=value"),
        (["--from", "megatron", "train.sh", "--vocab-size", "0"], "--vocab-size: 0 must be at least 1"),
        (["--from", "megatron", "small.sh", "--strict"], "small.sh:2: --my-own: is not an argument of megatron"),
        (["--from", "megatron", "train.sh", "--tp", "1", "--pp", "32"], "hardware.gpus = 16: must be a multiple of tp x pp x cp = 1 x 32 x 1"),
        (["--from", "megatron", "train.sh", "--vocab-size", "9", "--vocab", "9"], "--vocab-size: says the same as --vocab; give one of them"),
        (["--from", "megatron", "train.sh", "--detail", "99"], "--detail: 99 must be a stage from 0 to 3"),
        (["--from", "megatron", "train.sh", "--detail", "0", "--json"], "--detail prints text; leave out --json"),
        (["--from", "megatron", "train.sh", "--explain-args", "--vary", "mbs=1,2"], "--explain-args shows arguments; leave out"),
        (["odd.sh"], "odd.sh: starts no training that can be read"),
        (["--from", "megatron", "plan.yaml"], "plan.yaml:1: is a plan, not a launch file; leave out --from"),
        (["--from", "megatron", "train.sh", "--set", "GPU_PER_NODE=7", "--strict"], "--set: GPU_PER_NODE is nowhere in train.sh"),
        (["nowhere.py", "--set", "CONFIG=x"], "nowhere.py: no such file"),
        (["--model", "gpt2", "--strict"], "--strict: belongs to --from, which reads a launch file"),
        (["--model", "gpt2", "--vocab-size", "9"], "--vocab-size: belongs to --from, which reads a launch file; --vocab is"),
        (["--from", "megatron", "train.sh", "--set", "GPUS_PER_NODE=7"], "hardware.gpus = 14: must be a multiple of tp x pp x cp"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(run: Run, arguments: list[str], line: str) -> None:
    code, out, error = run("estimate", *arguments)
    assert (code, out) == (2, "")
    assert error.count("\n") == 1
    assert line in error


def test_arguments_explained(run: Run) -> None:
    code, out, error = run("estimate", "--from", "megatron", "train.sh", "--explain-args")
    assert (code, error) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "Arguments in train.sh" in out
    assert [line for line in out.splitlines() if line.startswith("--num-layers ") and "model.layers = 24" in line]
    code, out, _ = run("estimate", "--from", "megatron", "train.sh", "--explain-args", "-q")
    assert (code, out.count("\n")) == (0, 1)
    assert out == "17 arguments: 14 modelled, 3 irrelevant\n"


def test_arguments_explained_as_json(run: Run) -> None:
    _, out, _ = run("estimate", "--from", "megatron", "small.sh", "--explain-args", "--json")
    explained = {row["argument"]: row for row in json.loads(out)["arguments"]}
    assert explained["--num-layers"] == {
        "argument": "--num-layers", "value": "2", "from": "small.sh:2", "table": "modelled", "became": "model.layers = 2",
    }  # fmt: skip
    assert explained["--my-own"]["table"] == "unknown"
    assert len(json.loads(out)["warnings"]) == 1


def test_an_estimate_of_a_script(run: Run) -> None:
    code, out, error = run("estimate", "--from", "megatron-deepspeed", "bigscience.sh", "--json", "--gpu", "a100-80gb")
    assert error == ""
    estimate = json.loads(out)
    assert code == (0 if estimate["fits"] else 1)
    assert len(estimate["stages"]) == 8
    assert estimate["plan"]["model"]["name"] == "pretrain_gpt"
    assert "variable-unset" in {warning["code"] for warning in estimate["warnings"]}


def test_scripts_side_by_side_and_flags_over_them(run: Run) -> None:
    arguments = ("estimate", "--from", "megatron-deepspeed", "bigscience.sh")
    code, out, error = run(*arguments, "--vary", "mbs=1,2", "--json")
    assert (code, error) == (0, "")
    assert out
    code, out, _ = run(*arguments, "--layers", "22", "--json")
    assert json.loads(out)["plan"]["model"]["layers"] == 22


def test_a_variable_that_the_script_does_not_mention(run: Run) -> None:
    _, out, _ = run("estimate", "--from", "megatron", "train.sh", "--set", "GPU_PER_NODE=7", "--json")
    messages = [warning["message"] for warning in json.loads(out)["warnings"]]
    assert "GPU_PER_NODE is nowhere in train.sh, so that --set GPU_PER_NODE changes nothing" in messages
    _, out, _ = run("estimate", "--from", "megatron", "train.sh", "--set", "GPUS_PER_NODE=8", "--json")
    assert "variable-unused" not in [warning["code"] for warning in json.loads(out)["warnings"]]


def test_variants_of_a_launch_file_keep_its_warnings(run: Run) -> None:
    _, out, _ = run("estimate", "--from", "megatron", "forked.sh", "--vary", "mbs=1,2", "--json")
    for variant in json.loads(out)["variants"]:
        assert next(warning["code"] for warning in variant["warnings"]) == "argument-unknown"
    _, out, _ = run("estimate", "--from", "megatron", "forked.sh", "--compare", "plan.yaml", "--json")
    launched, plan = json.loads(out)["variants"]
    assert "argument-unknown" in [warning["code"] for warning in launched["warnings"]]
    assert "argument-unknown" not in [warning["code"] for warning in plan["warnings"]]


def test_a_batch_that_the_script_leaves_open_follows_the_flags(run: Run) -> None:
    _, out, _ = run("estimate", "--from", "megatron", "forked.sh", "--vary", "mbs=1,2", "--tp", "2", "--json")
    batches = [variant["plan"]["batch"] for variant in json.loads(out)["variants"]]
    assert [(batch["mbs"], batch["gbs"]) for batch in batches] == [(1, 4), (2, 8)]
    _, out, _ = run("estimate", "--from", "megatron", "forked.sh", "--gbs", "24", "--json")
    assert json.loads(out)["plan"]["batch"]["gbs"] == 24


def test_recompute_that_saves_nothing_is_told(run: Run) -> None:
    flags = ["--from", "megatron", "forked.sh", "--gpu", "h100-80gb", "--json"]
    selective = ["--recompute", "selective", "--recompute-modules", "core_attn,layernorm"]
    for backend, told in (("auto", 2), ("unfused", 1)):
        _, out, _ = run(
            "estimate", *flags, *selective, "--seq", "256", "--positions-max", "256", "--attention-backend", backend
        )
        found = [w["message"] for w in json.loads(out)["warnings"] if w["code"] == "recompute-without-gain"]
        assert len(found) == told, out
    _, out, _ = run("estimate", *flags)
    read = json.loads(out)
    assert "recompute-without-gain" not in [warning["code"] for warning in read["warnings"]]
    assert any("attention back end fused (cuDNN" in text for text in read["assumptions"])
