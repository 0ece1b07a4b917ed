"""Shared memory that processes leave behind when they are killed: NCCL's, and PyTorch's tensors between processes.

A file in ``/dev/shm`` is a run's own if one of its processes has it open or mapped, or wrote its own number into the
name (PyTorch's ``torch_PID_…``). Others' files are never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from .processes import PROC

FOLDER = Path("/dev/shm")


def shared_now(folder: Path = FOLDER) -> frozenset[str]:
    """Names of what is there."""
    try:
        return frozenset(file.name for file in folder.iterdir())
    except OSError:
        return frozenset()


class SharedMemory:
    """The files that a run makes, noticed while it lives and removed when it has ended."""

    def __init__(self, before: Collection[str], folder: Path = FOLDER) -> None:
        """``before``: the names that were there before it began."""
        self._before = frozenset(before)
        self._folder = folder
        self._own: set[str] = set()
        self._pids: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """``pids``: processes of the run. What they have mapped is only looked up while there are names that are new
        and whose they are is not known."""
        pids = tuple(pids)
        self._pids.update(map(str, pids))
        unknown = shared_now(self._folder) - self._before - self._own
        if not unknown:
            return
        named = {name for name in unknown if self._pids.intersection(name.split("_"))}
        self._own |= named
        if unknown - named:
            for pid in pids:
                self._own |= unknown & self._used(pid)

    def _used(self, pid: int) -> set[str]:
        """Names that ``pid`` has open or mapped."""
        folder, process = f"{self._folder}/", PROC / str(pid)
        used: set[str] = set()
        with suppress(OSError):
            for line in (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                used.add(line.partition(folder)[2])
        with suppress(OSError):
            for file in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(str(file.readlink()).partition(folder)[2])
        return used

    def remove(self) -> None:
        """To be called when all of the run's processes have ended."""
        self.look(())
        for name in self._own:
            with suppress(OSError):
                (self._folder / name).unlink()
