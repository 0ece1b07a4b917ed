"""Whose a file in shared memory is; the folder is one of the test's own."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from memplan.validate.guards import SharedMemory, shared_now


def names(folder: Path) -> list[str]:
    return sorted(shared_now(folder))


def test_own_and_others(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(b"x")
    memory = SharedMemory(shared_now(tmp_path), tmp_path)
    for name in ("torch_77_1_0", "torch_777_1_0", "mapped", "open", "others"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with (tmp_path / "open").open() as opened, (tmp_path / "mapped").open("r+b") as file:
        with mmap.mmap(file.fileno(), 4096):
            file.close()
            memory.look([77, os.getpid()])
        assert not opened.closed
    memory.remove()
    assert names(tmp_path) == ["before", "others", "torch_777_1_0"]


def test_numbers_are_remembered(tmp_path: Path) -> None:
    """Of a process that was seen before it made its file."""
    memory = SharedMemory((), tmp_path)
    memory.look([77])
    (tmp_path / "torch_77_5_1").touch()
    memory.remove()
    assert names(tmp_path) == []


def test_no_shared_memory(tmp_path: Path) -> None:
    memory = SharedMemory(shared_now(tmp_path / "none"), tmp_path / "none")
    memory.look([os.getpid()])
    memory.remove()
