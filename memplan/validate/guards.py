"""The two kinds of process that stand between a run and its workers: ``python -m memplan.validate.guards``.

``keep DIRECTORY``: the keeper starts the run's processes, and sees to it that none outlives the run, whoever of them or
of their ancestors is killed. What it is to run is in ``keeper.json``: ``commands``, one after the other until one
fails; ``grace``, seconds between SIGTERM and SIGKILL; ``shared``, the names in ``/dev/shm`` before. Standard input
comes from the process that started it: ``t`` ends the run, ``k`` ends it without grace, and the end of the stream says
that this process is gone, so that the folder is removed, too. It adopts whatever loses its parent below it, so nobody
gets away by forking twice. If the keeper itself is killed, its command, the ranks' guards and their workers follow by
``PR_SET_PDEATHSIG``.

``guard DIRECTORY MODULE [RANK]``: runs one rank's worker and tells how it ended. It stands between the elastic launcher
and the worker because the launcher does not tell when, and of what, which rank died. Without ``RANK`` it is the
environment's.

Both import nothing that takes time or memory.

Processes as Linux shows them: which belong to a run, and how all of them are ended.

Only the standard library, since what guards a run is to be up in milliseconds. Elsewhere than on Linux nothing is found
in ``/proc``, and only the process groups are ended.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from .run_files import LAUNCHER_LOG, RankFiles, read_json, workers_in, write_json, write_whole

MARKER = "MEMPLAN_RUN"
"""An environment variable of every process of a run: the run's folder."""
PROC = Path("/proc")
PAUSE = 0.02
"""Seconds between two looks at processes that are about to end."""
LONGEST_DEATH = 30.0
"""Seconds after SIGKILL before a process counts as one that cannot be ended: a driver takes several to give back
hundreds of GB of pinned memory, and one that is stuck does not return at all."""

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
"""``PR_SET_PDEATHSIG`` and ``PR_SET_CHILD_SUBREAPER`` of ``linux/prctl.h``."""
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """SIGKILL comes when the process that started this one ends, however it ends."""
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes below this one that lose their parent become its own children, and not init's."""
    _control(_SET_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    if _LIBRARY is not None:
        _LIBRARY.prctl(option, value, 0, 0, 0)


def descendants(process: int) -> list[int]:
    """Living processes below ``process``, without itself."""
    children: dict[int, list[int]] = {}
    for pid in all_processes():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = list(children.get(process, ()))
    while waiting:
        found.append(waiting.pop())
        waiting.extend(children.get(found[-1], ()))
    return [pid for pid in found if is_alive(pid)]


def marked(mark: str) -> list[int]:
    """Living processes whose environment has the mark ``mark``, without the one that asks."""
    entry = f"{MARKER}={mark}".encode()
    return [pid for pid in all_processes() if pid != os.getpid() and entry in _environment(pid)]


def all_processes() -> Iterable[int]:
    try:
        return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return ()


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


def _status(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third on: state, parent, …; the name before them can hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    status = _status(pid)
    return int(status[1]) if status else None


def is_alive(pid: int) -> bool:
    """Whether it runs; what has ended and only waits for its parent does not."""
    status = _status(pid)
    return bool(status) and status[0] not in "ZX"


def send(pids: Iterable[int], which: signal.Signals) -> None:
    """``which`` to each of them that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, which)


def end_all(
    find: Callable[[], list[int]], grace: float, *, hurried: Callable[[], bool] = lambda: False
) -> tuple[int, ...]:
    """Ends what ``find`` finds until it finds nothing: SIGTERM, and SIGKILL to who is left after ``grace`` seconds or
    once ``hurried`` says so. Returns the processes that cannot be ended."""
    deadline = time.monotonic() + grace
    told: set[int] = set()
    while left := find():
        if time.monotonic() >= deadline or hurried():
            break
        send(set(left) - told, signal.SIGTERM)
        told.update(left)
        time.sleep(PAUSE)
    deadline = time.monotonic() + LONGEST_DEATH
    while (left := find()) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(PAUSE)
    return tuple(left)


FOLDER = Path("/dev/shm")


def shared_now(folder: Path = FOLDER) -> frozenset[str]:
    """Names of what is there."""
    try:
        return frozenset(file.name for file in folder.iterdir())
    except OSError:
        return frozenset()


class SharedMemory:
    """The files in ``/dev/shm`` that a run makes (NCCL's, and PyTorch's tensors between processes), noticed while it
    lives and removed when it has ended. A file is the run's own if one of its processes has it open or mapped, or wrote
    its own number into the name (PyTorch's ``torch_PID_…``). Others' files are never touched."""

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


def guard(arguments: list[str]) -> int:
    """``DIRECTORY MODULE [RANK]``; the worker's exit code, as a shell has it."""
    die_with_parent()
    directory, module, *rest = arguments
    rank = int(rest[0] if rest else os.environ["RANK"])
    files = RankFiles(Path(directory), rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with files.log.open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-u", "-m", module, directory, str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_worker_prepares,
        )

    def terminate(number: int, frame: FrameType | None) -> None:
        worker.terminate()

    signal.signal(signal.SIGTERM, terminate)
    write_whole(files.pid, str(worker.pid).encode())
    code = worker.wait()
    write_json(files.end, {"code": code, "at": time.monotonic()})
    return code if code >= 0 else 128 - code


def _worker_prepares() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a training process fills a disk


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
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_command_prepares
            )
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


def _command_prepares() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def keep(arguments: list[str]) -> int:
    """``DIRECTORY``; 1 if a command failed, or 0."""
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and its end is noticed
    return Keeper(Path(arguments[0])).run()


if __name__ == "__main__":
    raise SystemExit({"guard": guard, "keep": keep}[sys.argv[1]](sys.argv[2:]))
