"""Line ends of Windows, and a byte order mark, mean nothing in any file that is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.plan.library import examples, model_specs

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = {
    "gpt.sh": "megatron",
    "llama.sh": "megatron",
    "bert.sh": "megatron",
    "bigscience.sh": "megatron-deepspeed",
    "ds_zero2.json": "deepspeed",
    "ds_zero3.json": "deepspeed",
    "torchtitan_release_0_2.toml": "torchtitan",
    "torchtitan_summer_2024.toml": "torchtitan",
    "torchtitan_saved.json": "torchtitan",
    "trainer.json": "trainer",
}


def answer(path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    code = main(["estimate", *arguments, "--no-records"])
    out, errors = capsys.readouterr()
    return code, re.sub(r'"source": "[^"]*"', "", out + errors)


def compared(path: Path, given: bytes, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """The file at ``path`` says the same with each way of ending ``given``'s lines."""
    path.write_bytes(given)
    expected = answer(path, capsys, arguments)
    assert expected[0] in (0, 1) or "unknown" in path.name, expected
    for changed in (given.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + given):
        path.write_bytes(changed)
        assert answer(path, capsys, arguments) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_launch_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--model", "gpt2", "--gpus", "8"] if name.endswith(".json") and "titan" not in name else ["--gpus", "64"]
    more += ["--vocab-size", "30522"] if name == "bert.sh" else []
    given = (GOLDEN / "launch" / name).read_bytes().replace(b'DTYPE="fp8"', b"DTYPE=bf16")
    compared(tmp_path / name, given, capsys, ["--from", FORMATS[name], str(tmp_path / name), *more])


@pytest.mark.parametrize("name", ["llama.json", "gpt2-odd.json", "unknown.json"])
def test_configurations(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (GOLDEN / "configs" / name).read_bytes()
    compared(tmp_path / name, given, capsys, ["--model", str(tmp_path / name), "--seq", "64"])


def test_plans_and_specs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    compared(path, examples()["gpt2-xl-4gpu"].read_bytes(), capsys, [str(path)])
    compared(path, model_specs()["gpt2"].read_bytes(), capsys, ["--model", str(path)])
    path = tmp_path / "plan.json"
    compared(path, json.dumps({"model": "gpt2", "batch": {"mbs": 2}}, indent=1).encode(), capsys, [str(path)])


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from memplan.records.record import to_text
    from tests.records.made import record_of

    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    path = tmp_path / "record.json"
    path.write_bytes(to_text(record_of()).replace("\n", "\r\n").encode())
    assert main(["runs", "--import", str(path)]) == 0, capsys.readouterr().err
