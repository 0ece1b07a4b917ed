"""Writing a user's file: whatever is at its name stays the kind of thing that it was."""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import memplan
from memplan.cli import main
from memplan.commands import output
from memplan.commands.output import check_writable, write_whole
from memplan.plan.errors import PlanError
from memplan.records.record import read_record, to_text
from tests.records.made import record_of

PACKAGE = Path(memplan.__file__).parent
ROOT = PACKAGE.parent
OLD = b"what was there"


# -- a generator of targets ---------------------------------------------------------------------------------


class Target(NamedTuple):
    """Something that a user may name as a file to write."""

    name: str
    kind: str
    file: Path | None
    """The regular file that ends up with the content, if one does."""
    reader: int | None = None
    """A descriptor that gives what was written, of a pipe."""


KINDS = ("absent", "regular", "device", "fifo", "descriptor", "pipe", "folder", "socket", "no folder")
REFUSED = ("folder", "socket", "no folder")


def made(kind: str, folder: Path, chance: random.Random) -> Target:
    """A new target of ``kind`` in ``folder``."""
    path = folder / chance.choice(["plan.yaml", "a b", "-x", "ü", ".hidden"])
    if kind == "absent":
        return Target(str(path), kind, path)
    if kind == "regular":
        path.write_bytes(OLD)
        path.chmod(chance.choice([0o444, 0o400, 0o600, 0o640, 0o755, 0o777]))
        return Target(str(path), kind, path)
    if kind == "device":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            return Target("/dev/null", kind, None)
        return Target(str(path), kind, None)
    if kind == "fifo":
        os.mkfifo(path, 0o600)
        return Target(str(path), kind, None, os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    if kind == "descriptor":
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(file, OLD)
        return Target(chance.choice([f"/dev/fd/{file}", f"/proc/self/fd/{file}"]), kind, path)
    if kind == "pipe":
        reader, writer = os.pipe()
        return Target(f"/dev/fd/{writer}", kind, None, reader)
    if kind == "folder":
        path.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path = folder / "nowhere" / "plan.yaml"
    return Target(str(path), kind, None)


def linked(target: Target, folder: Path, chance: random.Random) -> Target:
    """``target``, perhaps behind links to it, absolute or not, or in a folder that is a link."""
    name = target.name
    for number in range(chance.choice([0, 0, 1, 2])):
        link = folder / f"link{number}"
        relative = os.path.relpath(name, folder) if chance.random() < 0.5 and name.startswith(str(folder)) else name
        link.symlink_to(relative)
        name = str(link)
    if chance.random() < 0.3 and name.startswith(str(folder)):
        (folder.parent / f"{folder.name} linked").symlink_to(folder)
        name = str(folder.parent / f"{folder.name} linked" / Path(name).relative_to(folder))
    return target._replace(name=name)


def state(folder: Path) -> dict[str, tuple[int, bytes, str]]:
    """What lies in ``folder``: mode with kind, content, where a link goes."""
    found = {}
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
        found[path.name] = mode, content, str(path.readlink()) if stat.S_ISLNK(mode) else ""
    return found


def descriptors() -> int:
    """How many are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def refusal(function: Callable[[], object]) -> str:
    """The line with which ``function`` refuses; empty where it does not."""
    try:
        function()
    except PlanError as error:
        return str(error)
    return ""


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those made in a test are closed at its end."""
    kept: list[socket.socket] = []
    real = socket.socket

    def keeping(*arguments: int) -> socket.socket:
        kept.append(real(*arguments))
        return kept[-1]

    monkeypatch.setattr(socket, "socket", keeping)
    yield
    for one in kept:
        one.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("sockets")
def test_whatever_is_there_stays_what_it_is(kind: str, tmp_path: Path) -> None:
    for seed in range(25):
        chance = random.Random(f"{kind} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        target = linked(made(kind, folder, chance), folder, chance)
        before, open_before = state(folder), descriptors()
        force, content = chance.random() < 0.5, chance.randbytes(chance.choice([0, 1, 5000]))
        refused = kind in REFUSED or (kind == "regular" and not force)
        results: list[bool] = []
        check = partial(check_writable, target.name, force=force)
        write = partial(write_whole, target.name, content, force=force)
        for function in (check, lambda write=write, results=results: results.append(write())):
            assert state(folder) == before, seed
            line = refusal(function)
            assert bool(line) == refused, (seed, line)
            assert not line or line.startswith(target.name)
            assert ("--overwrite" in line) == (refused and kind == "regular"), line
        assert results == ([] if refused else [kind in ("absent", "regular")])
        assert descriptors() == open_before, "nothing is left open"
        after = state(folder)
        if not refused and target.file is not None:
            expected = OLD + content if kind == "descriptor" else content
            assert target.file.read_bytes() == expected, seed
            mode = before[target.file.name][0] if target.file.name in before else after[target.file.name][0]
            after.pop(target.file.name)
            before.pop(target.file.name, None)
            assert stat.S_ISREG(mode)
            assert target.file.stat().st_mode == mode, seed
        assert after == before, seed
        if target.reader is not None:
            assert (os.read(target.reader, 9999) if content or kind == "fifo" else b"") == content


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            write_whole(str(tmp_path / str(mask)), b"x", force=False)
        finally:
            os.umask(before)
        assert (tmp_path / str(mask)).stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "")])
@pytest.mark.parametrize("call", ["write", "fsync", "close", "fchmod", "replace"])
@pytest.mark.parametrize("there", [True, False])
def test_what_fails_at_any_point_leaves_everything_as_it_was(
    failure: BaseException, call: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    if there:
        path.write_bytes(OLD)
    elif call == "fchmod":
        return
    before = state(tmp_path)
    real = getattr(os, call)

    def failing(*arguments: object, **more: object) -> object:
        if call == "write":
            monkeypatch.undo()
            os.write(arguments[0], b"half")  # type: ignore[arg-type]
        elif call == "close":
            real(*arguments)
        raise failure

    monkeypatch.setattr(os, call, failing)
    expected = PlanError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as raised:
        write_whole(str(path), b"content", force=True)
    monkeypatch.undo()
    assert state(tmp_path) == before
    if expected is PlanError:
        assert str(raised.value) == f"{path}: cannot be written: {os.strerror(failure.errno).lower()}"  # type: ignore[attr-defined]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:7]))
    write_whole(str(tmp_path / "x"), bytes(range(256)), force=False)
    assert (tmp_path / "x").read_bytes() == bytes(range(256))


def test_a_fifo_waits_for_its_reader_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    got: list[bytes] = []
    timer = threading.Timer(0.2, lambda: got.append(path.read_bytes()))
    timer.start()
    write_whole(str(path), b"x" * 200_000, force=False)
    timer.join()
    assert got == [b"x" * 200_000]
    monkeypatch.setattr(output, "PATIENCE", 0.1)
    with pytest.raises(PlanError, match=r"fifo: cannot be written: is a pipe that nothing read for 0\.1 s"):
        write_whole(str(path), b"x", force=False)


@pytest.mark.parametrize(
    "name", ["a\0b", "x" * 300, "loop", "/dev/fd/9" + 30 * "9", "/dev/fd/987654", "~nobody-here/x"]
)
def test_names_that_cannot_be_written_are_a_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for function in (check_writable, lambda name, force: write_whole(name, b"x", force=force)):
        with pytest.raises(PlanError) as error:
            function(name, force=True)  # type: ignore[operator]
        assert "--overwrite" not in str(error.value)
        assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


# -- every command that writes ------------------------------------------------------------------------------

WRITERS = {
    "init": ["init", "FILE", "--model", "gpt2"],
    "export": ["export", "gpt2-xl-4gpu", "-q", "-o", "FILE"],
    "runs": ["runs", "RUN", "--export", "FILE"],
    "suggest-partition": ["suggest-partition", "gpt2-xl-4gpu", "--top", "1", "-q", "--write", "FILE"],
}


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("kind", ["device", "fifo", "pipe", "regular", "folder"])
def test_every_command_writes_in_that_way(
    command: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    record = tmp_path / "record.json"
    record.write_text(to_text(record_of()))
    assert main(["runs", "--import", str(record)]) == 0
    folder = tmp_path / "here"
    folder.mkdir()
    target = made(kind, folder, random.Random(1))
    arguments = [{"FILE": target.name, "RUN": read_record(record).id}.get(one, one) for one in WRITERS[command]]
    before = state(folder)
    assert main(arguments) == (2 if kind in ("regular", "folder") else 0)
    assert ("--overwrite" in capsys.readouterr().err) == (kind == "regular")
    if target.reader is not None:
        assert len(os.read(target.reader, 1 << 16)) > 100
    assert state(folder) == before


def test_no_other_place_writes_a_users_file() -> None:
    """Others write files of memplan's own: a run's folder, the cache of traces, the database, the details of a fault;
    and a closed standard stream is /dev/null."""
    own = {"commands/output.py", "records/database.py", "trace/cache.py", "faults.py", "streams.py"}
    own |= {f"validate/{name}.py" for name in ("guards", "launch", "run_files")}
    writes = re.compile(r"\.write_(text|bytes)\(|mkstemp|TemporaryFile|O_CREAT|open\([^)]*[\"'][wax]b?\+?[\"']")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if writes.search(path.read_text(encoding="utf-8"))
    }
    assert found == own


STREAMS = """
memplan() { "$@" export gpt2-xl-4gpu -q -o "$to"; }
to=/dev/stdout; memplan "$@" > redirected; tail -c 1 redirected | od -An -c
echo first > both; memplan "$@" >> both; head -1 both; tail -n +2 both | cmp - redirected && echo same
memplan "$@" | head -c 1 > /dev/null; echo ${PIPESTATUS[0]}
to=/dev/fd/9; memplan "$@" 9> >(cat > process); sleep 0.3; cmp process redirected && echo same
to=/dev/full; memplan "$@"; echo $?
"""


def test_streams_of_a_shell(tmp_path: Path) -> None:
    command = ["bash", "-c", STREAMS, "bash", sys.executable, "-m", "memplan.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.stdout.split() == ["\\n", "first", "same", "0", "same", "2"], done.stdout + done.stderr
    assert done.stderr == "/dev/full: cannot be written: no space left on device\n"
