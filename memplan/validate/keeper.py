"""Keeps a run's processes: starts them, and sees to it that none outlives the run, whoever of them or of their
ancestors is killed. ``python -m memplan.validate.keeper DIRECTORY``.

What it is to run is in ``keeper.json``: ``commands``, one after the other until one fails; ``grace``, seconds between
SIGTERM and SIGKILL; ``shared``, the names in ``/dev/shm`` before. Standard input comes from the process that started
it: ``t`` ends the run, ``k`` ends it without grace, and the end of the stream says that this process is gone, so that
the folder is removed, too. It adopts whatever loses its parent below it, so nobody gets away by forking twice. If the
keeper itself is killed, its command, the ranks' guards and their workers follow by ``PR_SET_PDEATHSIG``.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from .processes import adopt_orphans, descendants, die_with_parent, end_all
from .rank_files import LAUNCHER_LOG, read_json, workers_in
from .shared_memory import SharedMemory

SETTINGS = "keeper.json"
TERMINATE, KILL = b"t", b"k"
LOOK = 0.05
"""Seconds between two looks at the command."""
SHARED_LOOK = 1.0
"""And at shared memory."""


class _Input:
    """What the parent says."""

    def __init__(self) -> None:
        self.stop = False
        self.hurry = False
        self.gone = False

    def listen(self, seconds: float) -> None:
        """Waits for a word of the parent's, ``seconds`` at most."""
        if self.gone:
            time.sleep(seconds)
            return
        if not select.select([0], [], [], seconds)[0]:
            return
        said = os.read(0, 16)
        self.gone = not said
        self.hurry = self.hurry or KILL in said
        self.stop = True

    def hurries(self) -> bool:
        self.listen(0)
        return self.hurry


class Keeper:
    def __init__(self, directory: Path) -> None:
        settings = read_json(directory / SETTINGS) or {}
        self.directory = directory
        self.commands: list[list[str]] = settings["commands"]
        self.grace: float = settings["grace"]
        self.shared = SharedMemory(settings["shared"])
        self.input = _Input()
        self._looked = 0.0

    def run(self) -> int:
        """1 if a command failed, or 0."""
        try:
            return int(not all(self._succeeds(command) for command in self.commands))
        finally:
            self._end_tree()
            self.shared.look(workers_in(self.directory))  # some may have come and gone between two looks
            self.shared.remove()
            if self.input.gone:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _succeeds(self, command: list[str]) -> bool:
        with (self.directory / LAUNCHER_LOG).open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_prepare)
        while process.poll() is None:
            self.input.listen(LOOK)
            if self.input.stop:
                return False
            self._look_at_shared_memory()
        self._end_tree()
        return process.returncode == 0

    def _look_at_shared_memory(self) -> None:
        if time.monotonic() - self._looked > SHARED_LOOK:
            self.shared.look(descendants(os.getpid()))
            self._looked = time.monotonic()

    def _end_tree(self) -> None:
        self.shared.look(descendants(os.getpid()))
        end_all(lambda: _reaped(descendants(os.getpid())), self.grace, hurried=self.input.hurries)
        _reaped([])


def _reaped(pids: list[int]) -> list[int]:
    """``pids``, after those who have ended are gone for good."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return pids


def _prepare() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def main(arguments: list[str]) -> int:
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and its end is noticed
    return Keeper(Path(arguments[0])).run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
