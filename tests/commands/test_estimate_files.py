"""``memplan estimate --csv`` and ``--plot``."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from memplan.cli import main

PIPELINE = ["--model=gpt2", "--framework=megatron", "--gpus=2", "--pp=2", "--gbs=4", "--gpu=h100", "--no-records"]


def test_csv_has_the_figures_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *PIPELINE, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main(["estimate", *PIPELINE, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(rows) == len(whole["stages"]) == 2
    for row, stage in zip(rows, whole["stages"], strict=True):
        assert int(row["device_bytes"]) == stage["device_bytes"]
        assert int(row["capacity_bytes"]) == whole["capacity_bytes"]
        assert row["peak.module"] == stage["peak"]["module"]
        assert {int(row[f"breakdown.{key}"]) for key in stage["breakdown"]} == set(stage["breakdown"].values())
        assert row["moments.evaluation"] == str(stage["moments"]["evaluation"])
        assert row["modules"].split(" ") == stage["modules"]


def test_csv_of_variants_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *PIPELINE, "--vary", "mbs=1,2", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["variant"], row["stage"]) for row in rows] == [
        ("mbs=1", "0"), ("mbs=1", "1"), ("mbs=2", "0"), ("mbs=2", "1")
    ]  # fmt: skip


@pytest.mark.parametrize("variants", [[], ["--vary", "mbs=1,2"]])
def test_csv_in_a_file_is_what_it_prints(
    variants: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "stages.csv"
    for words in (["--csv"], ["--csv", "-"], ["--csv=-"]):
        assert main(["estimate", *PIPELINE, *variants, *words]) == 0
    printed = capsys.readouterr().out
    assert main(["estimate", "--csv", str(out), *PIPELINE, *variants]) == 0
    told = capsys.readouterr().out
    assert printed == 3 * out.read_text(encoding="utf-8")
    assert "variant," not in told
    assert f"Written:{out}" in "".join(told.split())
    assert main(["estimate", "--csv", str(out), *PIPELINE, *variants]) == 2
    assert "is there already; --overwrite replaces it" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_of_the_stages(ending: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"stages.{ending}"
    assert main(["estimate", *PIPELINE, "--plot", str(out)]) == 0
    assert f"Written:{out}" in "".join(capsys.readouterr().out.split())
    assert out.read_bytes().startswith(start)
    if ending == "svg":
        text = out.read_text(encoding="utf-8")
        assert all(part in text for part in ("gpt2: device memory by stage", "activations", "live tensors of stage"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--csv", "--json"], "--csv and --json exclude each other"),
        (["--csv", "--detail", "0"], "--detail prints text; leave out --json and --csv"),
        (["--plot", "x.pdf"], "must end in .svg or .png"),
        (["--plot", "x.svg", "--vary", "mbs=1,2"], "--plot shows one plan"),
        (["--plot", "x.html", "--html", "x.html"], "is the file of --html, too"),
        (["--html", "-"], "--html: - is no file's name here; standard output is /dev/stdout"),
        (["--html", "x.pdf"], "--html: x.pdf must end in .html or .htm"),
        (["--overwrite"], "--overwrite: is for --csv, --html, --plot and --snapshot"),
        (["--csv", "x.csv", "--plot", "x.csv"], "is the file of --csv, too"),
        (["--csv", "x.csv", "--detail", "0"], "--detail prints text; leave out --json and --csv"),
    ],
)
def test_what_is_refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *PIPELINE, *words]) == 2
    assert line in capsys.readouterr().err
