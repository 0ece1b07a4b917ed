"""``memplan runs``, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.records.database import open_database
from memplan.records.place import NAME
from memplan.records.readings import Failure, Place
from memplan.records.record import Record, read_record, to_json
from memplan.report.runs import device_words, print_run, print_runs
from tests.records.made import MIB, SHARDED, SINGLE, TWO_STAGES, record_of
from tests.report.printing import printed, widest

LARGE = {
    "model": "bigscience-104b-250k",
    "framework": "megatron-deepspeed",
    "gpu": "v100-32gb",
    "gpus": "128",
    "tp": "4",
    "pp": "32",
    "gbs": "128",
    "seq": "2048",
    "dtype": "fp16",
    "recompute": "full",
}
FAILURE = Failure(
    rank=3,
    kind="out-of-memory",
    message="tried to allocate 2.00 GiB",
    when="backward, micro-batch 2, head",
    allocated=30 << 30,
    failing=2 << 30,
    lines=("Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory.\x1b[31m"),
)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def kept() -> list[Record]:
    """Of every kind, the newest first."""
    place = Place(
        entry="layer.3", phase="backward", microbatch=1, net=5, peak=4096, estimated_net=5, estimated_peak=None
    )
    made = [
        record_of(minute=1, context=600 * MIB, workspaces=64 * MIB, seconds=(0.1, 0.12, 0.11), losses=(10.9, 10.2)),
        record_of(TWO_STAGES, minute=2, code="megatron", nccl=400 * MIB, apart=0.04, hosts=("alpha",)),
        record_of(SHARDED, minute=3, world="emulated", apart=-0.011),
        record_of(TWO_STAGES, minute=4, failures=(FAILURE,), apart=-0.5),
        record_of({**SHARDED, "gpu": "b200"}, minute=5, device="cpu"),
        record_of(LARGE, minute=6, world="fake", device="fake", apart=0.5),
    ]
    run = made[1].run
    ranks = (run.ranks[0].model_copy(update={"apart": place}), *run.ranks[1:])
    made[1] = made[1].model_copy(update={"run": run.model_copy(update={"ranks": ranks})})
    with open_database() as database:
        for one in made:
            database.add(one)
    return made[::-1]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["runs", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["runs", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(said(capsys, *arguments, "--json"))


def test_without_runs_it_says_how_to_make_one(capsys: pytest.CaptureFixture[str], own_folder: Path) -> None:
    text = said(capsys)
    assert text.startswith(f"No runs yet in {own_folder / NAME}.\nmemplan validate PLAN --gpus N makes the first")
    assert data(capsys)["runs"] == []
    assert "no run is recorded" in error_of(capsys, "abc")
    assert "no run is recorded" in error_of(capsys, "abc", "--delete")
    assert not own_folder.exists(), "looking makes nothing"


def test_a_rank_that_has_less_than_was_estimated_is_not_apart() -> None:
    """Of ranks that share an optimizer's states the estimate is of the one that has most."""
    place = Place(entry="layer.3", phase="step", microbatch=0, net=0, peak=1, estimated_net=0, estimated_peak=9)
    record = record_of(SHARDED)
    first, second = record.run.ranks
    assert first.allocated is not None
    less = first.model_copy(update={"allocated": first.allocated - MIB, "apart": place})
    for rank, is_said in ((less, False), (first.model_copy(update={"apart": place}), True)):
        run = record.run.model_copy(update={"ranks": (rank, second)})
        shown = record.model_copy(update={"run": run})
        assert ("First apart" in printed(partial(print_run, shown))) is is_said


def test_a_verdict_names_the_framework_that_did_not_run() -> None:
    """A line by itself, as with -q, would else be taken for the plan's own."""
    record = record_of(SHARDED)
    given = record.model_copy(update={"plan": {**record.plan, "framework": "deepspeed"}})
    line = "; of ddp, which ran in place of deepspeed"
    assert line in printed(partial(print_run, given, quiet=True), width=200)
    assert "in place of" not in printed(partial(print_run, record, quiet=True), width=200)


def test_a_run_that_failed_before_it_measured_was_on_as_many() -> None:
    record = record_of(TWO_STAGES, failures=(FAILURE,))
    nothing = record.model_copy(update={"run": record.run.model_copy(update={"ranks": ()})})
    assert device_words(nothing) == device_words(record) == "4 × h100-80gb"


@pytest.mark.parametrize(
    ("flags", "world", "words"),
    [
        (SINGLE, "real", "0.5 s (median of 1, slowest rank)"),
        ({**SINGLE, "gbs": "64"}, "real", "0.5 s (median of 1, slowest rank, 2 of 32 micro-batches)"),
        (SHARDED, "emulated", "0.5 s (median of 1, slowest rank, without what ranks send one another)"),
    ],
)
def test_seconds_say_what_they_lack(flags: dict[str, str], world: str, words: str) -> None:
    record = record_of(flags, world=world, seconds=(0.5,))
    assert words in printed(partial(print_run, record), width=120)


def test_notes_are_shown() -> None:
    made = record_of(TWO_STAGES, code="megatron")
    run = made.run.model_copy(update={"notes": ("apex is not installed", "a second one")})
    text = printed(lambda console: print_run(made.model_copy(update={"run": run}), console), 100)
    assert "\nNotes\n  apex is not installed\n  a second one\n" in text
    assert "Notes" not in printed(lambda console: print_run(made, console), 100)


def test_the_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = kept()
    monkeypatch.setenv("COLUMNS", "160")
    lines = said(capsys).splitlines()
    assert lines[0].split() == [
        "run",
        "ended,",
        "UTC",
        "model",
        "framework",
        "layout",
        "ran",
        "on",
        "difference",
        "verdict",
    ]
    assert [line[:6] for line in lines[2:8]] == [one.id[:6] for one in made]
    assert " ".join(lines[2].split()[1:]) == (
        "2026-11-21 20:06 bigscience-104b-250k megatron-deepspeed by torch tp 4 · pp 32 fake tensors −33.3 % differs"
    )
    assert " ".join(lines[3].split()[3:]) == "gpt2 ddp dp 2 2 × b200 0.0 % agrees"
    assert " ".join(lines[4].split()[3:]) == "gpt2 megatron by torch tp 2 · pp 2 4 × h100-80gb failed"
    assert " ".join(lines[5].split()[3:]) == "gpt2 ddp dp 2 h100-80gb, emulated +1.1 % agrees"
    assert " ".join(lines[6].split()[3:]) == "gpt2 megatron tp 2 · pp 2 4 × h100-80gb −3.8 % differs"
    assert " ".join(lines[7].split()[3:]) == "gpt2 single h100-80gb 0.0 % agrees"
    assert [one["id"] for one in data(capsys)["runs"]] == [one.id for one in made]
    assert [one["id"] for one in data(capsys, "--gpu", "B200")["runs"]] == [made[1].id]
    assert [one["id"] for one in data(capsys, "--model", "104b", "--gpu", "v100")["runs"]] == [made[0].id]
    assert (
        said(capsys, "--model", "llama") == "No run is of that GPU and model; the 6 runs are listed by: memplan runs\n"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("colour", [False, True])
def test_it_keeps_to_the_width(width: int, colour: bool) -> None:
    made = kept()
    ids = [one.id for one in made]
    text = printed(lambda console: print_runs(made, ids, console), width, colour=colour)
    assert widest(text) <= width
    assert all(id_[:6] in text for id_ in ids)
    for one in made:
        text = printed(lambda console, one=one: print_run(one, console), width, colour=colour)  # type: ignore[misc]
        assert widest(text) <= width
        assert one.id in text
        assert "\x1b[31m" not in text or colour
        assert not any(line.endswith(" ") for line in text.splitlines()) or colour


def test_one_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _, failed, emulated, two, single = kept()
    monkeypatch.setenv("COLUMNS", "160")
    text = said(capsys, single.id[:6])
    assert text.startswith(
        "Agrees: allocated 0.0 % from measured, tolerance 3 %\ngpt2 · single · mbs 2 · gbs 2 · seq 256"
    )
    for part in ("CUDA context 600 MiB", "cuBLAS workspaces 64 MiB", "0.11 s (median of 3", "loss 10.9 → 10.2 in 2"):
        assert part in text
    assert f"run {single.id}, 2026-11-21 20:01:00 UTC: memplan validate --model gpt2\n" in text

    lines = said(capsys, two.id).splitlines()
    assert lines[0] == "Differs: allocated −3.8 % from measured on stage 1, tolerance 3 %"
    row = next(line.split() for line in lines if line.split()[:2] == ["0", "requested"])
    assert len(row) == 7
    measured, estimated, change = (float(figure.replace("−", "-").replace(",", "")) for figure in row[2:5])
    assert estimated - measured == pytest.approx(change, abs=0.11)
    assert "  layer.3, backward, micro-batch 1, on rank 0: peak 4,096 bytes, estimated nothing" in lines
    assert "  NCCL's buffers 400 MiB on stage 1" in lines

    text = said(capsys, failed.id)
    assert text.startswith(
        "Failed: rank 3, out of memory in backward, micro-batch 2, head: tried to allocate 2.00 GiB\n"
    )
    assert "(allocated 30.00 GiB, asked for 2.00 GiB)" in text
    assert "CUDA out of memory.\\x1b[31m" in text, "what a rank printed colours nothing"
    assert said(capsys, emulated.id, "-q") == "Agrees: allocated +1.1 % from measured, tolerance 3 %\n"
    assert said(capsys, fake.id).count("  allocated  ") == 32
    assert data(capsys, two.id) == to_json(two)


def test_a_row_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    damaged, *others = kept()
    with open_database() as database:
        database.connection.execute("UPDATE runs SET record = '{' WHERE id = ?", (damaged.id,))
    text = said(capsys)
    assert "unreadable" in text
    assert f"{damaged.id[:6]} cannot be read: " in " ".join(text.split())
    assert all(one.id[:6] in text for one in others)
    assert "is not JSON" in data(capsys)["runs"][0]["unreadable"]
    assert "is not JSON" in error_of(capsys, damaged.id)
    assert said(capsys, damaged.id[:8], "--delete") == f"removed run {damaged.id}\n"
    assert len(data(capsys)["runs"]) == len(others)


def test_from_one_machine_to_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kept()
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    assert said(capsys, made[4].id[:7], "--export", files[0]) == f"{files[0]}: run {made[4].id}, to share\n"
    assert said(capsys, made[5].id, "--export", files[1])
    assert "is there already; --overwrite replaces it" in error_of(capsys, made[4].id, "--export", files[0])
    said(capsys, made[4].id, "--export", files[0], "--overwrite")
    assert "alpha" not in Path(files[0]).read_text()
    assert read_record(Path(files[0])).id == made[4].id

    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "another"))
    assert said(capsys, "--import", *files) == "".join(
        f"{file}: run {record.id} is kept\n" for file, record in zip(files, made[4:], strict=True)
    )
    assert said(capsys, "--import", files[0]) == f"{files[0]}: run {made[4].id} was there already\n"
    assert [one["id"] for one in data(capsys)["runs"]] == [one.id for one in made[4:]]
    Path(files[1]).write_text(Path(files[1]).read_text().replace("gpt2", "gpt3"))
    (tmp_path / "another" / NAME).unlink()
    assert "sha256 = " in error_of(capsys, "--import", *files)
    assert data(capsys)["runs"] == [], "all of them or none"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["abc", "--gpu", "h100"], "ID names one run; leave out --gpu, --model and --import"),
        (["--export", "x.json"], "--export needs a run: memplan runs ID"),
        (["--delete"], "--delete needs a run: memplan runs ID"),
        (["abc", "--delete", "--export", "x.json"], "--delete exclude one another"),
        (["--import", "nowhere.json"], "nowhere.json: no such file"),
        (["--overwrite"], "--overwrite: is for --export and --html"),
        (["--gpus", "8"], "--gpus: is not a flag of memplan runs; did you mean --gpus?"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert line in error_of(capsys, *arguments)


def test_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    first = record_of(minute=1).model_copy(update={"id": "aaaaaaaa0000"})
    second = record_of(minute=2).model_copy(update={"id": "aaaaaaaa1111"})
    with open_database() as database:
        database.add(first)
        database.add(second)
    assert "begins the ids of 2 runs, aaaaaaaa1, aaaaaaaa0: give more of it" in error_of(capsys, "aaaa")
    assert data(capsys, "AAAAAAAA0")["id"] == first.id
    assert "aaaaaaaa0" in said(capsys)
    assert "zz is the id of no run; the newest is aaaaaaaa1" in error_of(capsys, "zz")


def test_into_a_pipe_that_takes_ascii() -> None:
    kept()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "memplan.cli", "runs"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"-33.3 %" in done.stdout
    assert SINGLE["model"].encode() in done.stdout


def test_a_run_that_ended_before_anything_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(rank=None, kind="timeout", message="no rank began within 600 s")
    record = record_of(failures=(failure,))
    record = record.model_copy(update={"run": record.run.model_copy(update={"ranks": ()})})
    with open_database() as database:
        database.add(record)
    assert said(capsys, record.id).startswith("Failed: the run, timeout: no rank began within 600 s\ngpt2 · single")
    assert "failed" in said(capsys)
    assert data(capsys)["runs"][0]["measured_bytes"] is None
