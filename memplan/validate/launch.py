"""Starts the processes of a run, guards them, and answers with what they measured or why they failed.

    memplan → keeper → PyTorch's elastic launcher → a guard for each rank → its worker

Nothing of this but the launcher and the workers imports torch. The files in which they speak to each other are those of
``run_files``; what outlives whom is said in ``guards``.

The run's folder is made in the temporary directory, locked while the run lives, and always removed: by the run itself;
by its keeper, if the run is killed; and by the next run of the same user, if both were.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..plan.errors import LackingError, one_line
from ..records.readings import Failure, RankReading
from ..values import dataclass
from .cluster import Way
from .failing import failures_of, hung, late, launcher_failed, silent_ranks, unable_to_die
from .guards import (
    KILL,
    LONGEST_DEATH,
    MARKER,
    SETTINGS,
    TERMINATE,
    SharedMemory,
    end_all,
    is_alive,
    marked,
    send,
    shared_now,
)
from .run_files import KEEPER_LOG, TASK, Progress, Watch, ranks_in, workers_in, write_json, write_whole

PREFIX = "memplan-run-"
LOCK = "lock"
TEMPORARY = "tmp"
"""What the workers have as ``TMPDIR``, so that what libraries leave there goes with the folder."""
LEAST_FREE = 16 << 20
"""Bytes: room for what the ranks print and measure."""
YOUNG = 60.0
"""Seconds that a folder may exist before it has a lock."""


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new one; what runs of this user left behind goes. ``LackingError`` where none can be made."""
    _remove_left_ones()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise _unusable(_temporary(), error.strerror or str(error)) from None
    try:
        yield from _locked(folder)
    finally:
        _remove(folder)


def _locked(folder: Path) -> Iterator[Path]:
    try:
        (folder / TEMPORARY).mkdir()
        unlocked = folder / f"{LOCK}-to-be"
        unlocked.write_text(socket.gethostname(), encoding="utf-8")
        lock = os.open(unlocked, os.O_RDWR)
    except OSError as error:
        raise _unusable(str(folder.parent), error.strerror or str(error)) from None
    try:
        with suppress(OSError):  # on a file system without locks the folder of a killed run stays
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / LOCK)
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE:
            raise _unusable(str(folder.parent), f"{free:,} bytes are free, and {LEAST_FREE:,} are wanted")
        yield folder
    finally:
        os.close(lock)


def _unusable(where: str, why: str) -> LackingError:
    return LackingError(
        one_line(
            f"memplan validate cannot keep its run's files in {where}: {why}; set TMPDIR to a folder that has room"
        )
    )


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "a temporary folder"


def _remove(folder: Path) -> None:
    """A process that could not be ended may still write: what is left then goes with the next run."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _remove_left_ones() -> None:
    """Folders of runs whose every guard was killed, and what still runs of them."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                if folder.stat().st_uid == os.getuid() and _is_left(folder):
                    end_all(lambda mark=str(folder): marked(mark), 0)  # type: ignore[misc]
                    _remove(folder)


def _is_left(folder: Path) -> bool:
    """Whether nobody holds its lock, nor can be about to, nor has it from another machine, whose locks cannot always
    be seen from here. A lock that is there was held when it got its name."""
    if not (folder / LOCK).exists():
        return time.time() - folder.stat().st_mtime > YOUNG
    lock = os.open(folder / LOCK, os.O_RDWR)
    try:
        if os.read(lock, 1 << 10).decode(errors="replace") != socket.gethostname():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """How often the process was asked to end."""

    def __init__(self) -> None:
        self.count = 0

    def notice(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def check(self) -> None:
        """``KeyboardInterrupt`` if it was, which the command line turns into exit code 130."""
        if self.count:
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Signals are counted within, and raised as ``KeyboardInterrupt`` at the end if nobody did. Outside the main thread
    Python has no handlers, and nothing is counted. What ignores a signal (``nohup``) goes on ignoring it."""
    noticed = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield noticed
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, noticed.notice) for number in heard}
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    noticed.check()


WORKER = "memplan.validate.worker"
PATIENCE = 600.0
"""Seconds in which no rank begins anything, before the run counts as hung."""
STARTING = 600.0
"""Seconds until the first of its ranks starts: other machines may be late, and torch be on a slow file system."""
GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL: all that they leave is in the folder, or known."""
LOOK = 0.05
SETTLING = 0.3
"""Seconds after the first sign of a failure, in which others that fail by themselves say so."""
TRACEBACK_SETTLING = 1.0
"""And after a traceback, in which the rank that printed it ends."""
STACKS = 2.0
"""Seconds that hung ranks have to print where they stand."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run."""

    readings: tuple[RankReading, ...]
    failures: tuple[Failure, ...]
    """Who failed first comes first; who failed because of another is left out."""


Watcher = Callable[[tuple[Progress, ...]], None]


def launched(
    way: Way,
    task: bytes,
    *,
    worker: str = WORKER,
    patience: float = PATIENCE,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
    watch: Watcher = lambda progress: None,
) -> Outcome:
    """Runs ``worker``, a module, ``way``; ``task`` is what the workers find in ``task.json``. ``python -m worker FOLDER
    RANK`` is what each is called as.

    ``patience`` and ``limit`` are seconds without any progress, and in all. ``environment`` is this process's, if left
    out. ``watch`` is called twenty times a second. ``KeyboardInterrupt`` on Ctrl-C, SIGTERM and SIGHUP, when all have
    ended; ``LackingError`` where a folder cannot be made.
    """
    with interrupts() as interrupted, run_folder() as folder:
        write_whole(folder / TASK, task)
        given = _environment(way, folder, dict(os.environ if environment is None else environment))
        run = _Run(folder, way.commands(folder, worker), given, interrupted)
        try:
            return run.outcome(patience, limit, watch)
        finally:
            run.end()


def _environment(way: Way, folder: Path, given: dict[str, str]) -> dict[str, str]:
    """Of all processes of the run. GPUs are counted as ``devices`` does, where they are looked at before."""
    temporary = folder / TEMPORARY
    fixed = {MARKER: str(folder), "TMPDIR": str(temporary), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    return {**way.environment(given), **_package_path(given), **fixed, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _package_path(given: Mapping[str, str]) -> dict[str, str]:
    """Where memplan is a checkout that nobody installed, its workers find it, too."""
    root = Path(__file__).parents[2]
    if str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), given.get("PYTHONPATH"))))}


class _Run:
    """The processes of one run, from their start to their end."""

    def __init__(
        self, folder: Path, commands: list[list[str]], environment: dict[str, str], interrupted: Interrupts
    ) -> None:
        self._folder = folder
        self._interrupted = interrupted
        self._shared_before = sorted(shared_now())
        self._watch = Watch(folder)
        self._undying: tuple[int, ...] = ()
        settings = {"commands": commands, "grace": GRACE, "shared": self._shared_before}
        write_json(folder / SETTINGS, settings)
        with (folder / KEEPER_LOG).open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "memplan.validate.guards", "keep", str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that Ctrl-C in a terminal reaches this process alone
            )

    def outcome(self, patience: float, limit: float | None, watch: Watcher) -> Outcome:
        """Waits until all have ended, or one failed."""
        deadline = None if limit is None else time.monotonic() + limit
        problem: Failure | None = None
        while self._runs():
            self._interrupted.check()
            self._watch.look()
            watch(self._watch.progress)
            if self._failed():
                break
            waits = patience if self._watch.started else max(patience, STARTING)
            if self._watch.quiet_for() > waits:
                problem = self._hung(waits)
                break
            if deadline is not None and time.monotonic() > deadline:
                problem = late(self._watch.progress, limit or 0.0)
                break
            time.sleep(LOOK)
        told = time.monotonic()
        self.end()
        self._watch.look()
        return self._answer(told, problem)

    def _runs(self) -> bool:
        return self._keeper.poll() is None

    def _failed(self) -> bool:
        """Whether a rank failed; if so, others have had a moment to say what they know."""
        if not self._watch.anyone_failed():
            if not self._watch.tracebacks:
                return False
            self._settle(TRACEBACK_SETTLING, self._watch.anyone_failed)
        self._settle(SETTLING, lambda: False)
        return True

    def _settle(self, seconds: float, enough: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not enough() and self._runs() and not self._interrupted.count:
            time.sleep(LOOK)
            self._watch.look()

    def _hung(self, patience: float) -> Failure:
        """``faulthandler`` prints the stack of a process that gets SIGABRT."""
        ours = set(marked(str(self._folder))).intersection(workers_in(self._folder))
        send(ours, signal.SIGABRT)
        self._settle(STACKS, lambda: not any(is_alive(pid) for pid in ours))
        return hung(self._folder, self._watch.progress, patience)

    def _answer(self, told: float, problem: Failure | None) -> Outcome:
        readings = tuple(
            RankReading.model_validate_json(files.result.read_bytes())
            for files in ranks_in(self._folder)
            if files.result.exists()
        )
        failures = (problem,) if problem else failures_of(self._folder, told, self._watch.tracebacks)
        if not failures and self._keeper.returncode:
            failures = (launcher_failed(self._folder, self._keeper.returncode),)
        if not failures:
            failures = silent_ranks(self._folder)
        if self._undying:
            failures = (*failures, unable_to_die(self._undying))
        return Outcome(readings, failures)

    def end(self) -> None:
        """All processes end, and with them ports and shared memory. A second Ctrl-C takes away their grace."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._tell(TERMINATE)
        asked, deadline = self._interrupted.count, time.monotonic() + GRACE + 2 * LONGEST_DEATH
        while self._runs() and time.monotonic() < deadline:
            if self._interrupted.count > max(asked, 1):
                self._tell(KILL)
            time.sleep(LOOK)
        if self._runs():
            self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._sweep()

    def _tell(self, word: bytes) -> None:
        assert self._keeper.stdin is not None
        try:
            os.write(self._keeper.stdin.fileno(), word)
        except BrokenPipeError:  # it has ended
            return

    def _sweep(self) -> None:
        """What the keeper left behind, which is something only if it was killed itself."""
        left = marked(str(self._folder))
        self._undying = end_all(lambda: marked(str(self._folder)), 0) if left else ()
        if self._keeper.returncode < 0:
            shared = SharedMemory(self._shared_before)
            shared.look([*left, *workers_in(self._folder)])
            shared.remove()
