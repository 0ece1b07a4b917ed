"""Folders that cannot be made, and folders that nobody needs any more."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from memplan.plan.errors import LackingError
from memplan.validate import launch as module
from memplan.validate.launch import PREFIX, run_folder

ROOT = Path(__file__).parents[2]
MAKE = "from memplan.validate.launch import run_folder\nwith run_folder(): print('made')"


def test_made_and_removed(place: Path) -> None:
    with run_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "tmp" / "deep").mkdir()
    assert list(place.iterdir()) == []


def test_removed_on_an_error(place: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_folder():
        1 / 0  # noqa: B018
    assert list(place.iterdir()) == []


def test_nowhere_to_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the folder was writable when Python looked, and is not any more."""
    monkeypatch.setattr(tempfile, "tempdir", str(place / "gone"))
    with pytest.raises(LackingError, match=r"cannot keep its run's files in .*gone: No such file or directory; set"):
        run_folder().__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_not_writable(place: Path) -> None:
    place.chmod(0o500)
    with pytest.raises(LackingError, match="Permission denied"):
        run_folder().__enter__()
    place.chmod(0o700)


def with_small_disk(options: str, program: str, place: Path) -> subprocess.CompletedProcess[str]:
    """What ``program`` says where ``place`` is a file system of its own; mounting needs a user namespace."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    program = f"import tempfile; tempfile.tempdir = {str(place)!r}\n{program}"  # and not the working directory instead
    script = f'mount -t tmpfs -o {options} none "$TMPDIR" && exec "$PYTHON" -c "$PROGRAM"'
    given = {"TMPDIR": str(place), "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "PROGRAM": program}
    command = [unshare, "-Urm", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given}, cwd=ROOT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=1m", "1,0[0-9,]+ bytes are free, and 16,777,216 are wanted"),
        ("size=64m,nr_inodes=1", "No space left on device"),
        ("ro", "Read-only file system"),
    ],
)
def test_full_or_read_only(place: Path, options: str, said: str) -> None:
    answer = with_small_disk(options, MAKE, place)
    last = answer.stderr.strip().splitlines()[-1]
    assert last.startswith("memplan.plan.errors.LackingError: memplan validate cannot keep its run's files in ")
    assert re.search(said, last), last
    assert "made" not in answer.stdout


def old(folder: Path) -> None:
    long_ago = time.time() - 2 * module.YOUNG
    os.utime(folder, (long_ago, long_ago))


HOLDER = """
import signal, sys, time
from memplan.validate import launch
at = {"begun": "mkdir", "unlocked": "rename", "locked": "_unusable"}[sys.argv[1]]
def stop(*_): print(flush=True); time.sleep(60)
if at == "_unusable":
    with launch.run_folder(): stop()
setattr(launch.Path, at, stop)
with launch.run_folder(): pass
"""


@pytest.mark.parametrize("killed", [True, False])
def test_folders_of_killed_runs_go_and_others_stay(place: Path, killed: bool) -> None:
    """Killed with SIGKILL before the folder has its lock, between, and after; alone a folder without lock can be of a
    run that is about to begin, so that its age decides."""
    here = socket.gethostname()
    (place / f"{PREFIX}elsewhere").mkdir()
    (place / f"{PREFIX}elsewhere" / "lock").write_text(f"{here}2", encoding="utf-8")
    (place / "others").mkdir()
    folders: dict[str, str] = {}
    holders = []
    for stage in ("begun", "unlocked", "locked"):
        before = set(place.iterdir())
        environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, stage], env=environment, stdout=subprocess.PIPE)
        holders.append(holder)
        assert holder.stdout is not None
        holder.stdout.readline()
        (folders[stage],) = {path.name for path in set(place.iterdir()) - before}
        if killed:
            holder.kill()
            holder.wait()
    try:
        with run_folder() as folder:
            kept = {path.name for path in place.iterdir() if path != folder}
        stay = ("begun", "unlocked") if killed else ("begun", "unlocked", "locked")
        assert kept == {"others", f"{PREFIX}elsewhere", *(folders[stage] for stage in stay)}
        for name in kept:
            old(place / name)
        with run_folder() as folder:
            kept = {path.name for path in place.iterdir() if path != folder}
        assert kept >= {"others", f"{PREFIX}elsewhere"}
        assert (folders["locked"] in kept) is not killed
        assert not killed or len(kept) == 2
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    for path in place.iterdir():
        shutil.rmtree(path)


def test_those_in_use_stay(place: Path) -> None:
    with run_folder() as first:
        old(first)
        with run_folder() as second:
            assert first.exists()
            assert second != first


FILL = """
import os
from memplan.validate.launch import launched
from memplan.validate.cluster import InTurn
outcome = launched(InTurn((0,)), b'["fills the disk"]', worker="tests.validate.workers.plain")
print(outcome.failures[0].message, os.listdir(tempfile.tempdir))
"""


def test_filled_while_it_runs(place: Path) -> None:
    """Not even why can be written then; the answer says so, and the folder goes."""
    answer = with_small_disk("size=20m", FILL, place)
    said = f"there is no room left in {place}, where the run keeps its files (TMPDIR) []\n"
    assert answer.stdout.endswith(said), answer
