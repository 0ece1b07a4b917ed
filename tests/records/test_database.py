"""The database under real processes: parallel, killed, without rights, without space, damaged, of another memplan."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan.cli import main
from memplan.plan.errors import PlanError
from memplan.records.database import MIGRATIONS, PATIENCE, InUseError, Unreadable, connected, open_database, shortest
from memplan.records.known import known_measurements
from memplan.records.place import NAME, exists, folder
from memplan.records.record import Record, to_text

from .made import SINGLE, TWO_STAGES, record_of

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs ``code`` with the arguments in ``sys.argv``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def records() -> list[Record]:
    with open_database() as database:
        found = list(database.records())
    assert all(isinstance(one, Record) for one in found)
    return [one for one in found if isinstance(one, Record)]


# -- keeping, finding, removing -----------------------------------------------------------------------------


def test_newest_first_and_by_name(own_folder: Path) -> None:
    kept = [record_of(minute=minute) for minute in (3, 1, 2)]
    other = record_of({**SINGLE, "model": "gpt2-xl", "gpu": "b200"}, minute=4)
    with open_database() as database:
        for one in (*kept, other):
            assert database.add(one)
        assert not database.add(other), "the same again changes nothing"
        assert [to_text(one) for one in database.records() if isinstance(one, Record)] == [
            to_text(one) for one in (other, kept[0], kept[2], kept[1])
        ]
        assert [one.id for one in database.records(gpu="B200")] == [other.id]
        assert [one.id for one in database.records(model="XL")] == [other.id]
        assert not list(database.records(gpu="h100", model="xl"))
        assert database.find(other.id[:7]) == other
        assert database.delete(other.id) == other.id
        assert other.id not in database.ids()
        (facts,) = database.connection.execute("SELECT count(*) FROM facts WHERE run = ?", (other.id,)).fetchone()
        assert facts == 0
    assert own_folder.stat().st_mode & 0o777 == 0o700
    assert (own_folder / NAME).stat().st_mode & 0o777 == 0o600


def test_an_id_stands_for_one_content() -> None:
    record = record_of(minute=1)
    with open_database() as database:
        database.add(record)
        with pytest.raises(PlanError, match="is there already, as a run of 2026-11-21T20:01:00Z"):
            database.add(record_of(minute=2).model_copy(update={"id": record.id}))
        assert database.find(record.id) == record


IDS = st.lists(st.text("0123456789abcdef", min_size=12, max_size=12), unique=True, min_size=1, max_size=30)
ALIKE = st.lists(st.text("01", min_size=12, max_size=12), unique=True, min_size=1, max_size=30)


@given(IDS | ALIKE)
def test_a_shortest_id_is_the_beginning_of_one_alone(ids: list[str]) -> None:
    for one in ids:
        short = shortest(one, ids)
        assert one.startswith(short)
        assert len(short) >= 6
        assert sum(other.startswith(short) for other in ids) == 1
        assert len(short) == 6 or sum(other.startswith(short[:-1]) for other in ids) > 1


@given(ids=ALIKE, prefix=st.text("01", max_size=12))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
def test_a_prefix_names_one_or_is_refused(ids: list[str], prefix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{random.random()}.sqlite3"
    with open_database(path) as database:
        database.connection.executemany(
            "INSERT INTO runs VALUES (?, '2026-11-21T20:15:03Z', 'gpt2', NULL, 0, '')", [(one,) for one in ids]
        )
        beginning = [one for one in ids if one.startswith(prefix)]
        if prefix and len(beginning) == 1:
            assert database.named(prefix).id == beginning[0]
        else:
            with pytest.raises(PlanError, match="give more of it" if prefix and beginning else "the id of no run"):
                database.named(prefix)
    path.unlink()


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_DATA", "~/mine")
    monkeypatch.setenv("HOME", "/home/alice")
    assert folder() == Path("/home/alice/mine")
    monkeypatch.delenv("MEMPLAN_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert folder() == Path("/data/memplan")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert folder() == Path("/home/alice/.local/share/memplan")


def test_an_unreadable_row_hides_no_other() -> None:
    kept, damaged = record_of(minute=1), record_of(minute=2)
    with open_database() as database:
        database.add(kept)
        database.add(damaged)
        database.connection.execute("UPDATE runs SET record = substr(record, 1, 99) WHERE id = ?", (damaged.id,))
        first, second = database.records()
        assert isinstance(first, Unreadable)
        assert "is not JSON" in first.problem
        assert second == kept
        with pytest.raises(PlanError, match=f"run {damaged.id}:[0-9]+: is not JSON"):
            database.find(damaged.id)
        database.delete(damaged.id)
        assert database.ids() == [kept.id]


# -- several processes --------------------------------------------------------------------------------------

WRITER = """
import sys, time
from datetime import datetime, timezone
from memplan.records.database import open_database
from memplan.records.record import read_record
from pathlib import Path
record, count, start = read_record(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3])
import secrets
time.sleep(max(0, start - time.time()))
for _ in range(count):
    with open_database() as database:
        one = record.model_copy(update={"id": secrets.token_hex(6)})
        database.add(one)
    print(one.id, flush=True)
    time.sleep(0.01)
"""


def template(folder: Path) -> Path:
    file = folder / "record.json"
    file.write_text(to_text(record_of(TWO_STAGES, code="megatron", context=5)))
    return file


def test_parallel_writers_lose_nothing(tmp_path: Path) -> None:
    """They make the database, its tables and their records at the same moment."""
    file, count = template(tmp_path), 12
    writers = [started(WRITER, file, count, time.time() + 3) for _ in range(4)]
    written: list[str] = []
    for writer in writers:
        out, error = writer.communicate(timeout=120)
        assert (writer.returncode, error) == (0, "")
        written += out.split()
    assert len(set(written)) == 4 * count
    assert sorted(one.id for one in records()) == sorted(written)


def check(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        orphans = connection.execute("SELECT count(*) FROM facts WHERE run NOT IN (SELECT id FROM runs)").fetchone()
    connection.close()
    assert orphans == (0,)


def test_killed_writers_leave_whole_records(tmp_path: Path, own_folder: Path) -> None:
    """What a writer had reported before it was killed is there, at most one record more, and all are whole."""
    file, chance, rounds = template(tmp_path), random.Random(7), 5
    written: list[str] = []
    for _ in range(rounds):
        writers = [started(WRITER, file, 100_000, 0) for _ in range(2)]
        says = [writer.stdout.fileno() for writer in writers]  # type: ignore[union-attr]
        said = [os.read(one, 13).decode() for one in says]
        time.sleep(chance.uniform(0, 0.15))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        for first, writer in zip(said, writers, strict=True):
            written += (first + writer.communicate(timeout=60)[0]).split()
    found = [one.id for one in records()]
    assert set(written) <= set(found)
    assert len(found) <= len(written) + 2 * rounds
    assert len(written) > 2 * rounds, "some were killed behind their first record"
    check(own_folder / NAME)


HALFWAY = """
import sys, time
from memplan.records.database import open_database
with open_database() as database:
    connection = database.connection
    connection.execute("PRAGMA cache_size = 5")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE runs SET record = 'half', model = 'half'")
    for number in range(200):
        row = (f"{number:012x}", "2027-01-01T00:00:00Z", "half", 0, "x" * 5000)
        connection.execute("INSERT INTO runs VALUES (?, ?, ?, NULL, ?, ?)", row)
    print("halfway", flush=True)
    time.sleep(60)
"""


def test_a_half_written_transaction_is_rolled_back(own_folder: Path) -> None:
    """The killed process had already written pages into the file: its journal takes them back."""
    kept = record_of()
    with open_database() as database:
        database.add(kept)
    before = (own_folder / NAME).read_bytes()
    writer = started(HALFWAY)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "halfway\n"
    writer.kill()
    writer.communicate(timeout=60)
    assert (own_folder / NAME).read_bytes() != before
    assert (own_folder / f"{NAME}-journal").stat().st_size > 0
    assert records() == [kept]
    check(own_folder / NAME)


def test_a_writer_that_takes_too_long_is_said_to(own_folder: Path) -> None:
    with open_database() as database:
        database.add(record_of())
        database.connection.execute("BEGIN IMMEDIATE")
        with open_database(patience=0.1) as other:
            assert len(other.ids()) == 1, "reading goes on"
            with pytest.raises(PlanError, match=r"runs\.sqlite3: is in use by another process"):
                other.add(record_of())
        database.connection.execute("ROLLBACK")


def test_a_database_that_is_kept_locked_is_waited_for_once(own_folder: Path) -> None:
    """Not once for every record in the list, and for five seconds at most."""
    assert PATIENCE == 5.0
    with open_database() as database:
        for minute in range(50):
            database.add(record_of(minute=minute))
    with open_database() as holder, open_database(patience=0.2) as reader:
        found = reader.records()
        assert isinstance(next(found), Record)
        holder.connection.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(InUseError, match=r"runs\.sqlite3: is in use by another process; try again later"):
            list(found)
        with pytest.raises(InUseError), open_database(patience=0.2) as other:
            other.ids()
        assert time.monotonic() - began < 8
        holder.connection.execute("ROLLBACK")
    assert len(records()) == 50


@pytest.mark.parametrize("value", [None, 7, 1.5, b"\x1b[31m\xff", "\x1b[31m", ""])
@pytest.mark.parametrize("column", ["id", "time", "model", "gpu", "imported", "record"])
def test_a_changed_column_hides_no_other_row(
    column: str, value: object, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, changed = record_of(minute=1), record_of(minute=2)
    with open_database() as database:
        database.add(kept)
        database.add(changed)
        names = "id, time, model, gpu, imported, record"
        connection = database.connection
        for statement in (f"CREATE TABLE loose AS SELECT {names} FROM runs", "DROP TABLE facts", "DROP TABLE runs"):
            connection.execute(statement)
        connection.execute("ALTER TABLE loose RENAME TO runs")
        connection.execute(f"UPDATE runs SET {column} = ? WHERE id = ?", (value, changed.id))
        found = list(database.records())
        assert kept in found
        unreadable = [one for one in found if isinstance(one, Unreadable)]
        assert len(unreadable) == (column in ("id", "time", "record"))
    assert main(["runs", "--no-color"]) == 0
    shown = capsys.readouterr().out
    assert kept.id[:6] in shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert shown.count("cannot be read") == len(unreadable)


# -- migrations ---------------------------------------------------------------------------------------------

MIGRATOR = """
import sys, time
from pathlib import Path
from memplan.records.database import MIGRATIONS, connected
def slow(connection):
    connection.execute("ALTER TABLE runs ADD COLUMN note TEXT")
    time.sleep(0.3)
    connection.execute("CREATE TABLE migrated (process TEXT)")
    connection.execute("INSERT INTO migrated VALUES (?)", (sys.argv[2],))
time.sleep(max(0, float(sys.argv[3]) - time.time()))
with connected(Path(sys.argv[1]), migrations=(*MIGRATIONS, slow)) as connection:
    print(connection.execute("SELECT process FROM migrated").fetchall(), flush=True)
"""


def test_two_that_migrate_at_once_migrate_once(own_folder: Path) -> None:
    kept = record_of()
    with open_database() as database:
        database.add(kept)
    path, start = own_folder / NAME, time.time() + 2
    done = [started(MIGRATOR, path, name, start) for name in ("one", "two", "three")]
    said = {process.communicate(timeout=60) for process in done}
    assert len(said) == 1
    assert next(iter(said))[0] in [f"[('{name}',)]\n" for name in ("one", "two", "three")]
    with pytest.raises(PlanError, match=r"was written by a newer memplan \(version 2; this one knows 1\): upgrade"):
        records()
    measured, problem = known_measurements()
    assert not measured.measurements
    assert "was written by a newer memplan" in problem


def test_a_migration_that_fails_leaves_the_old_tables(own_folder: Path) -> None:
    kept = record_of()
    with open_database() as database:
        database.add(kept)

    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE facts")
        connection.execute("SELECT * FROM nowhere")

    with pytest.raises(PlanError, match="no such table"), connected(own_folder / NAME, migrations=(*MIGRATIONS, fails)):
        pass
    assert records() == [kept]
    check(own_folder / NAME)


def test_a_process_killed_before_the_tables_were_made(own_folder: Path) -> None:
    own_folder.mkdir()
    (own_folder / NAME).touch()
    assert not exists(own_folder / NAME)
    assert known_measurements() == known_measurements()
    with open_database() as database:
        assert database.add(record_of())


# -- what cannot be read or written -------------------------------------------------------------------------


def test_what_is_no_database_is_left_alone(own_folder: Path) -> None:
    own_folder.mkdir()
    path = own_folder / NAME
    path.write_text("my diary, " * 1000)
    with pytest.raises(PlanError, match=r"runs\.sqlite3: is damaged \(file is not a database\); nothing was changed"):
        records()
    assert path.read_text() == "my diary, " * 1000
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE diary (text)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(PlanError, match="is a database of another program; MEMPLAN_DATA names another directory"):
        records()
    assert path.read_bytes() == before


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_said_and_nothing_is_written(seed: int, own_folder: Path) -> None:
    with open_database() as database:
        for minute in range(6):
            database.add(record_of(minute=minute, context=7))
    path, chance = own_folder / NAME, random.Random(seed)
    content = bytearray(path.read_bytes())
    start = [0, 16, 100, 4096][seed] if seed < 4 else chance.randrange(len(content))
    content[start : start + 600] = chance.randbytes(min(600, len(content) - start))
    path.write_bytes(content)
    problems = []
    try:
        with open_database() as database:
            problems = [one.problem for one in database.records() if isinstance(one, Unreadable)]
            database.find(database.ids()[0])
    except PlanError as error:
        problems.append(str(error))
    problems += [problem for _, problem in [known_measurements()] if problem]
    assert problems or seed >= 4
    assert all(problem.startswith(str(path)) and "\n" not in problem for problem in problems)
    assert path.read_bytes() == content


def as_somebody(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` without the rights to write everywhere that a superuser has."""
    drop = "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
    done = started(code.replace("try:\n", f"{drop}try:\n"), *arguments)
    out, error = done.communicate(timeout=60)
    return subprocess.CompletedProcess([], done.returncode, out, error)


ADDS = """
import difflib, os, sqlite3, sys
os.environ["MEMPLAN_DATA"] = sys.argv[1]
from pathlib import Path
from memplan.plan.errors import PlanError
from memplan.records.database import open_database
from memplan.records.known import known_measurements
from memplan.records.record import read_record
record = read_record(Path(sys.argv[2]))
try:
    with open_database() as database:
        print("read", len(database.ids()))
        database.add(record.model_copy(update={"id": "0123456789ab"}))
except PlanError as error:
    print(error)
print(known_measurements()[1])
"""


@pytest.fixture
def open_folder() -> Path:  # type: ignore[misc]
    """One that everybody can enter, unlike pytest's own."""
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="memplan-test-"))
    made.chmod(0o755)
    yield made
    for path in (made, *made.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(made)


def test_a_read_only_folder(open_folder: Path) -> None:
    file, data = open_folder / "record.json", open_folder / "data"
    file.write_text(to_text(record_of()))
    data.mkdir(0o555)
    done = as_somebody(ADDS, data, file)
    assert done.stdout.splitlines() == [
        f"{data / NAME}: cannot be made: permission denied; MEMPLAN_DATA names another directory",
        "",
    ], done.stderr
    data.chmod(0o755)
    with open_database(data / NAME) as database:
        database.add(record_of())
    (data / NAME).chmod(0o444)
    data.chmod(0o555)
    done = as_somebody(ADDS, data, file)
    assert done.stdout.splitlines() == [
        "read 1",
        f"{data / NAME}: cannot be written: it, or its directory, is read-only; MEMPLAN_DATA names another directory",
        "",
    ], done.stderr


def test_a_folder_that_nobody_may_enter(open_folder: Path) -> None:
    file, data = open_folder / "record.json", open_folder / "data"
    file.write_text(to_text(record_of()))
    data.mkdir(0o700)
    (data / NAME).write_text("x")
    data.chmod(0)
    done = as_somebody(ADDS, data, file)
    assert done.stdout.count("permission denied") == 2, done.stdout + done.stderr


def test_a_file_in_place_of_the_folder(own_folder: Path) -> None:
    own_folder.write_text("")
    with pytest.raises(PlanError, match="cannot be made: file exists"):
        records()
    assert known_measurements()[1] == ""


FULL = """
import os, sys, subprocess
folder, file, code = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
done = subprocess.run([sys.executable, "-c", code, folder, file], capture_output=True, text=True)
print(done.stdout, done.stderr, end="")
"""


def can_mount() -> bool:
    """A file system of one's own, in a namespace of one's own."""
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="needs unshare and user namespaces")
def test_a_full_disk(tmp_path: Path) -> None:
    file = template(tmp_path)
    folder = tmp_path / "small"
    folder.mkdir()
    code = ADDS.replace('"0123456789ab"})', '"0123456789ab", "command": "x" * 200_000})')
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", FULL, str(folder), str(file), code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "read 0", done.stdout + done.stderr
    assert lines[1].startswith(f"{folder / NAME}: cannot be written: no space is left"), done.stdout + done.stderr


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
"""


def test_a_file_that_may_not_grow(tmp_path: Path, own_folder: Path) -> None:
    kept = record_of()
    with open_database() as database:
        database.add(kept)
    code = ADDS.replace('"0123456789ab"})', '"0123456789ab", "command": "x" * 200_000})')
    done = started(LIMITED + code, own_folder, template(tmp_path))
    out, error = done.communicate(timeout=60)
    assert out.splitlines()[:2] == [
        "read 1",
        f"{own_folder / NAME}: cannot be read or written: disk I/O error; MEMPLAN_DATA names another directory",
    ], out + error
    assert records() == [kept]
    check(own_folder / NAME)
