"""``memplan export`` as a user runs it, and what it wrote as the next command reads it."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.formats import WRITTEN, target
from memplan.frameworks import framework

EXAMPLES = {
    "bert-5.1b-zero3": "deepspeed",
    "bigscience-104b-250k": "megatron-deepspeed",
    "gpt2-xl-4gpu": "device-map",
    "gpt2-xl-8gpu": "device-map",
    "llama-3-405b-1024gpu": "megatron",
}
"""Those of a framework that has a configuration; ``llama-3-8b`` is plain PyTorch."""


def ran(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def estimated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = ran([*arguments, "--json"], capsys)
    assert code in (0, 1), err
    return dict(json.loads(out))


@pytest.mark.parametrize(("name", "to"), EXAMPLES.items())
def test_examples_read_back_by_the_command_that_is_told(
    name: str, to: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a file"
    code, out, err = ran(["export", name, "--output", str(file)], capsys)
    assert (code, out) == (0, "")
    told = err.strip().partition("estimate it with: ")[2]
    first, command, *arguments = shlex.split(told)
    assert (first, command) == ("memplan", "estimate")
    assert str(file) in arguments
    before, again = estimated(["estimate", name], capsys), estimated([command, *arguments], capsys)
    for key in ("stages", "peak_bytes", "fits", "capacity_bytes", "headroom_bytes"):
        assert again[key] == before[key], key
    if framework(before["plan"]["framework"]).configuration != "device-map":
        content = file.read_text(encoding="utf-8")
        assert (f"# {told}" in content) == (to in ("megatron", "megatron-deepspeed"))
    again_told = ran(["export", *arguments, "--to", to], capsys)[1]
    assert again_told.splitlines()[4:] == file.read_text(encoding="utf-8").splitlines()[4:]


def test_scripts_are_read_without_a_warning_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("llama-3-405b-1024gpu", "bigscience-104b-250k"):
        file = tmp_path / f"{name}.sh"
        main(["export", name, "-o", str(file), "-q"])
        told = file.read_text(encoding="utf-8").splitlines()[3]
        arguments = shlex.split(told.removeprefix("# memplan "))
        codes = {warning["code"] for warning in estimated([*arguments, "--strict"], capsys)["warnings"]}
        assert codes == {warning["code"] for warning in estimated(["estimate", name], capsys)["warnings"]}


def test_standard_input_and_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = b"model: gpt2\nframework: deepspeed\nlayout: {zero: 2, dp: 4}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plan)))
    code, out, err = ran(["export", "-", "--to", "deepspeed", "--mbs", "3"], capsys)
    assert code == 0
    assert json.loads(out)["train_micro_batch_size_per_gpu"] == 3
    assert err == "estimate it with: memplan estimate --from deepspeed FILE --model gpt2 --gpus 4\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(out.encode())))
    code, again, err = ran(["export", "--from", "deepspeed", "-", "--model", "gpt2", "--gpus", "4", "-q"], capsys)
    assert (code, again, err) == (0, out, "")


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(["export", "llama-3-405b-1024gpu", "--to", "megatron", "--json"], capsys)
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["to"] == "megatron"
    assert said["arguments"]["PARALLEL"]["--pipeline-model-parallel-size"] == "16"
    assert said["arguments"]["PARALLEL"]["--sequence-parallel"] is True
    assert said["environment"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert said["read_back"][:4] == ["memplan", "estimate", "--from", "megatron"]
    assert said["text"] == ran(["export", "llama-3-405b-1024gpu"], capsys)[1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["llama-3-8b"], "what else the plan says: framework = single: has no configuration of its own, but Python"),
        (["gpt2-xl-4gpu", "--to", "deepspeed"], "example gpt2-xl-4gpu:12: framework = device-map: must be deepspeed"),
        (["gpt2-xl-4gpu", "--to", "megatrn"], "--to: megatrn must be megatron, megatron-deepspeed, deepspeed, tor"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["llama-3-405b-1024gpu", "--gpus", "1000"], "--gpus: hardware.gpus = 1000: must be a multiple of tp x pp"),
        (
            ["llama-3-405b-1024gpu", "--gpus-per-node", "3"],
            "hardware.gpus = 1024: must be a multiple of hardw",
        ),
        (["bigscience-104b-250k", "--schedule", "gpipe"], "--schedule: pipeline.schedule = gpipe: cannot be said in"),
        (
            ["llama-3-8b-8gpu", "--framework", "deepspeed", "--zero", "2", "--lora-rank", "8", "--to", "deepspeed"],
            "--lora-rank: lora.rank = 8: cannot be said in a ds_config.json, which would be read without it",
        ),
        (["llama-3-405b-1024gpu", "--set", "a=b"], "--set: belongs to --from"),
        (["llama-3-405b-1024gpu", "-o", "no/such/folder.sh"], "no/such/folder.sh: there is no folder no/such"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(["export", *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err


def test_a_file_is_written_whole_or_not_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text("mine", encoding="utf-8")
    assert ran(["export", "llama-3-405b-1024gpu", "-o", str(file)], capsys)[0] == 2
    assert file.read_text(encoding="utf-8") == "mine"
    assert ran(["export", "llama-3-405b-1024gpu", "-o", str(file), "--force", "--ep", "2"], capsys)[0] == 2
    assert file.read_text(encoding="utf-8") == "mine"
    assert ran(["export", "llama-3-405b-1024gpu", "-o", str(file), "--force"], capsys)[0] == 0
    assert file.read_text(encoding="utf-8").startswith("#!/bin/bash")
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]


def test_every_target_has_its_name() -> None:
    assert [target(name).name for name in WRITTEN] == list(WRITTEN)


@pytest.mark.parametrize(
    ("name", "program"), [("llama-3-405b-1024gpu", "torchrun"), ("bigscience-104b-250k", "python")]
)
def test_a_shell_makes_the_arguments_of_it(
    name: str, program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    odd = ["--model-name", "it's $HOME `x` \\ #\n--tp", "--env", "MINE=a 'b' $c"]
    said = json.loads(ran(["export", name, *odd, "--json"], capsys)[1])
    script = f'{program}() {{ printf \'%s\\0\' "$MINE" "$@"; }}\n{said["text"]}'
    shell = subprocess.run(
        ["bash", "-s", "--", "--mine", "1 2"], input=script, capture_output=True, text=True, cwd=tmp_path
    )
    assert shell.stderr == ""
    mine, *words = shell.stdout.split("\0")[:-1]
    assert mine == "a 'b' $c"
    given: list[str] = []
    for arguments in said["arguments"].values():
        for argument, value in arguments.items():
            given += [argument] if value is True else [argument, *([value] if isinstance(value, str) else value)]
    at = words.index("pretrain_gpt.py")
    assert words[at + 1 :] == [*given, "--mine", "1 2"]
    assert [path.name for path in tmp_path.iterdir()] == (["ds_config.json"] if program == "python" else [])
