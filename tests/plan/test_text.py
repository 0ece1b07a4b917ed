"""Reading a user's file: what a pipe gives, whoever writes to it and however; one line for what cannot be read."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.plan import text
from memplan.plan.errors import PlanError
from memplan.plan.library import model_specs
from memplan.plan.text import LARGEST, folder_of, read_bytes
from memplan.records.record import to_text
from tests.records.made import record_of

ROOT = Path(__file__).resolve().parent.parent.parent

CONFIGURATION = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
SCRIPT = (
    "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --bf16 "
    "--max-position-embeddings 64 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 999\n"
)
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}'
JOB = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 128\nlocal_batch_size = 1\n'
BATCH = "model: gpt2\nbatch: {gbs: 4}\n"

READERS = {
    "estimate": (["estimate", "FILE", "-q"], "model: gpt2\n"),
    "vary": (["estimate", "FILE", "-q", "--vary", "mbs=1,2"], "model: gpt2\n"),
    "compare": (["estimate", "gpt2-xl-4gpu", "-q", "--compare", "FILE"], "model: gpt2\n"),
    "init": (["init", "--model", "FILE"], model_specs()["gpt2"].read_text()),
    "model": (["estimate", "--model", "FILE", "--vary", "mbs=1,2"], model_specs()["gpt2"].read_text()),
    "config.json": (["estimate", "--model", "FILE", "--vary", "mbs=1,2"], json.dumps(CONFIGURATION)),
    "device map": (
        ["estimate", "--model", "gpt2", "--framework", "device-map", "--device-map", "FILE", "-q"],
        '{"0": "0-11"}',
    ),
    "megatron": (["estimate", "--from", "megatron", "FILE", "--gpus", "2", "--vary", "mbs=1,2"], SCRIPT),
    "explained": (["estimate", "--from", "megatron", "FILE", "--gpus", "2", "--explain-args"], SCRIPT),
    "deepspeed": (["estimate", "--from", "deepspeed", "FILE", "--model", "gpt2", "--gpus", "2", "-q"], DEEPSPEED),
    "torchtitan": (["estimate", "--from", "torchtitan", "FILE", "--gpus", "8", "-q"], JOB),
    "trainer": (["estimate", "--from", "trainer", "FILE", "--model", "gpt2", "-q"], '{"bf16": true}'),
    "suggest": (["suggest-partition", "FILE", "--gpu", "h200", "--gpus", "2", "--framework", "ddp", "-q"], BATCH),
    "export": (["export", "FILE", "--framework", "deepspeed", "-q"], "model: gpt2\n"),
    "import": (["runs", "--import", "FILE"], ""),
}
"""What reads a file that the user names, and a file that suits it."""


@pytest.fixture(autouse=True)
def own_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))


def command(reader: str, name: str) -> tuple[list[str], bytes]:
    arguments, content = READERS[reader]
    return [name if one == "FILE" else one for one in arguments], (content or to_text(record_of())).encode()


def piped(content: bytes) -> str:
    """The name of a pipe as a shell's ``<(…)`` makes one."""
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "wb") as file:  # noqa: PTH123
            file.write(content)

    threading.Thread(target=write, daemon=True).start()
    return f"/dev/fd/{reader}"


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_a_pipe(reader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, content = command(reader, "FILE")
    name = piped(content)
    assert main([name if one == "FILE" else one for one in arguments]) in (0, 1), capsys.readouterr().err


@pytest.fixture
def nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Names that no reader can read, and what is said of each."""
    monkeypatch.setattr(text, "PATIENCE", 0.05)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        names = {
            "fifo": "is a pipe that gave nothing for 0.05 s",
            "link": "is a pipe that gave nothing for 0.05 s",
            "loop": "cannot be read: too many levels of symbolic links",
            "socket": "is not a regular file",
            "folder": "is a directory; name a file in it",
        }
        yield {
            **{str(tmp_path / name): said for name, said in names.items()},
            f"/dev/fd/{reader}": "is a pipe that gave nothing for 0.05 s",
            "/dev/zero": "is not a regular file",
            "./a\0b": "cannot be read: ",
            "./" + "x" * 300: "cannot be read: file name too long",
            "./nowhere": "no such file",
        }
    for end in (reader, writer):
        os.close(end)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_the_rest_in_a_line(
    reader: str, nothing_to_read: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in nothing_to_read.items():
        if reader in ("model", "config.json", "init") and name.endswith("/folder"):
            said = "is a folder without config.json"
        began = time.monotonic()
        assert main(command(reader, name)[0]) == 2, name
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert said in lines[0], (reader, lines)
        assert time.monotonic() - began < 8


def test_the_patience_is_as_documented() -> None:
    assert text.PATIENCE == 10
    assert "10 s" in (ROOT / "README.md").read_text(encoding="utf-8")


# -- how a pipe is written to -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_is_what_is_read(seed: int, tmp_path: Path) -> None:
    """In whatever pieces, with whatever pauses, of however many writers one after the other."""
    chance = random.Random(seed)
    content = chance.randbytes(chance.choice([0, 1, 4096, 65536, 65537, 300_000]))
    path, is_fifo = tmp_path / "fifo", chance.random() < 0.5
    os.mkfifo(path)
    reader, end = os.pipe()

    def write() -> None:
        time.sleep(chance.choice([0, 0.05]))
        file = os.open(path, os.O_WRONLY) if is_fifo else end
        at = 0
        while at < len(content):
            size = chance.choice([1, 1000, 70_000])
            os.write(file, content[at : at + size])
            at += min(size, len(content) - at) if size < 70_000 else len(content[at : at + size])
            if chance.random() < 0.02:
                time.sleep(0.02)
        os.close(file)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert read_bytes(path if is_fifo else Path(f"/dev/fd/{reader}")) == content
    writer.join()


def test_an_endless_pipe_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"is larger than a plan can be \(1 MiB\)"):
        read_bytes(Path(piped(bytes(3 * LARGEST))))
    assert len(read_bytes(Path(piped(bytes(LARGEST))))) == LARGEST


def test_a_named_pipe_is_read_anew_and_another_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for content in (b"first", b"second"):
        threading.Thread(target=fifo.write_bytes, args=(content,), daemon=True).start()
        assert read_bytes(fifo) == content
    name = piped(b"once")
    assert [read_bytes(Path(name)) for _ in range(3)] == [b"once"] * 3
    assert folder_of(Path(name)) == Path()
    assert folder_of(fifo) == tmp_path


def test_what_is_no_file_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a device may move it: a tape rewinds."""
    opened: list[object] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(path) or real(path, *more))
    for path in (Path("/dev/zero"), Path("/dev")):
        with pytest.raises(PlanError):
            read_bytes(path)
    assert not opened
    assert stat.S_ISREG(os.stat(__file__).st_mode)  # noqa: PTH116
    read_bytes(Path(__file__))
    assert opened
