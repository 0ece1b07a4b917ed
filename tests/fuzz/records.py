"""Records that somebody has changed: files that are imported, and rows of the database."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import suppress
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

from memplan.records.place import NAME
from memplan.records.record import CHECKSUM, Record, to_text
from tests.records.made import MIB, SHARDED, SINGLE, TWO_STAGES, record_of

from .commands import ended, own_records, refused
from .driver import Target

WORDS = (
    "", " ", "x", "gpt2", "h100-80gb", "megatron", "fsdp", "[/x]", "[bold]b[/bold]", ":smile:",
    "\x1b[31mred\x1b]0;title\x07",
    "\x9b2J", "\u202eevil", "a\nb", "\r", "\x7f", "\0", "\ud800", "\u3000", "😀" * 30, "é" * 300, "w" * 20_000, "{}",
    "2026-11-21T20:15:03Z", "0000-00-00T00:00:00Z", "9999-12-31T23:59:59Z", "0123456789ab", "NaN", "Infinity", "2.13.0",
    "999.999", "../../x",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 8, 512, MIB, 2**31, 2**40, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 10**4000,
    0.5, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


@cache
def _seeds() -> tuple[str, ...]:
    made: tuple[Record, ...] = (
        record_of(minute=1, context=600 * MIB, workspaces=64 * MIB, seconds=(0.1, 0.12), losses=(10.9, float("nan"))),
        record_of(TWO_STAGES, minute=2, code="megatron", nccl=400 * MIB, apart=0.04, hosts=("alpha", "beta")),
        record_of(SHARDED, minute=3, world="emulated", apart=-0.011),
        record_of(SINGLE, minute=4, world="fake", device="fake"),
    )
    return tuple(to_text(one) for one in made)


def _value(random: Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and what only some programs write."""
    match random.randrange(9 if depth < 3 else 5):
        case 0 | 1:
            return random.choice(NUMBERS)
        case 2 | 3:
            return random.choice(WORDS)
        case 4:
            return random.choice((None, True, False))
        case 5:
            return [_value(random, depth + 1) for _ in range(random.choice((0, 1, 3)))]
        case 6:
            return {random.choice(WORDS): _value(random, depth + 1) for _ in range(random.choice((0, 1, 3)))}
        case 7:
            return f"{NESTED}{random.choice((3, 100, 195, 400, 950, 5000, 50_000))}{random.choice('[{')}"
        case _:
            return [random.choice((0, {}, [], ""))] * random.choice((10, 1000, 50_000))


NESTED = "nested: "
"""Begins a text that stands for so many lists or objects in one another: more than Python itself can write."""


def _with_nested(text: str) -> str:
    def nested(found: re.Match[str]) -> str:
        depth, is_list = int(found[1]), found[2] == "["
        return ("[" if is_list else '{"a":') * depth + "0" + ("]" if is_list else "}") * depth

    return re.sub(rf'"{NESTED}(\d+)([\[{{])"', nested, text, count=1)


def _places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of everything in ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


def _changed(random: Random, data: Any) -> Any:
    """``data`` with another value at some place, or without one, or with one more."""
    places = _places(data)
    if len(places) > 5000:  # large enough: what is there thousands of times is one object
        return data
    path = random.choice(places[1:])
    at = data
    for key in path[:-1]:
        at = at[key]
    old, same_kind = at[path[-1]], random.random() < 0.7
    if same_kind and isinstance(old, (int, float)):
        at[path[-1]] = random.choice(NUMBERS)
    elif same_kind and isinstance(old, str):
        at[path[-1]] = random.choice(WORDS)
    elif same_kind and isinstance(old, dict):
        old[random.choice((*WORDS, *old))] = _value(random)
    elif same_kind and isinstance(old, list):
        old.extend((old[:1] or [_value(random)]) * random.choice((1, 3, 2000)))
    elif random.random() < 0.3:
        del at[path[-1]]
    else:
        at[path[-1]] = _value(random)
    return data


class Imported(NamedTuple):
    """The content of a file."""

    content: bytes


def made_import(random: Random) -> Imported:
    """An exported record, changed in a few places, mostly with a checksum that fits."""
    data = json.loads(random.choice(_seeds()))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = _changed(random, data)
    if random.random() < 0.9:
        data.pop(CHECKSUM, None)
        written = _with_nested(json.dumps(data, sort_keys=True, separators=(",", ":")))
        data[CHECKSUM] = sha256(written.encode()).hexdigest()
    text = _with_nested(json.dumps(data, ensure_ascii=random.random() < 0.8))
    content = text.encode(errors="surrogatepass")
    if random.random() < 0.1:
        at = random.randrange(len(content))
        content = content[:at] + random.choice((b"", b"\xff", b"\0", b"9" * 5000, b"1e999")) + content[at + 1 :]
    return Imported(content)


def import_it(case: Imported) -> object:
    """What is kept can be listed, shown, exported and imported again; what is not, is refused in a line."""
    with own_records() as folder:
        file = folder / "record.json"
        file.write_bytes(case.content)
        kept = ended("runs", "--import", str(file), codes=(0, 2))
        if kept.code:
            assert kept.err.startswith(str(file)), kept.err
            raise refused(kept)
        listed = ended("runs", codes=(0,))
        assert "unreadable" not in listed.out, listed.out
        (run,) = json.loads(ended("runs", "--json", codes=(0,)).out)["runs"]
        ended("runs", run["id"], codes=(0,))
        ended("runs", run["id"], "-q", codes=(0,))
        again = json.loads(ended("runs", run["id"], "--json", codes=(0,)).out)
        assert again["id"] == run["id"]
        ended("runs", "--gpu", "h100", "--model", "gpt2", codes=(0,))
        estimated = ended("estimate", "--model", "gpt2", "--gpu", "h100-80gb", "-q", codes=(0,))
        shared = folder / "shared.json"
        ended("runs", run["id"], "--export", str(shared), codes=(0,))
        ended("runs", run["id"], "--delete", codes=(0,))
        ended("runs", "--import", str(shared), codes=(0,))
        return estimated


# -- the database -------------------------------------------------------------------------------------------

COLUMNS = ("id", "time", "model", "gpu", "imported", "record")
FACTS = ("run", "name", "gpu", "setting", "stage", "bytes", "time", "versions", "imported")


class Tampered(NamedTuple):
    """Statements for the database, and bytes to write into it."""

    statements: tuple[tuple[str, tuple[Any, ...]], ...]
    damage: tuple[tuple[float, bytes], ...]


def _column(random: Random) -> Any:
    """What SQLite may hold in a column of any type."""
    value = random.choice((None, "word", "number", b"", b"\x1b[31m\xff", b"x" * 5000, 2**62, -1, 1.5, float("inf")))
    if value == "word":
        return random.choice(WORDS).replace("\ud800", "?")
    if value == "number":
        return random.choice([one for one in NUMBERS if not isinstance(one, int) or abs(one) < 2**63])
    return value


def made_tampering(random: Random) -> Tampered:
    statements: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(random.choice((1, 1, 2, 4))):
        table, columns = random.choice((("runs", COLUMNS), ("runs", COLUMNS), ("facts", FACTS)))
        column, which = random.choice(columns), random.choice(("1", "2", "1, 2"))
        match random.randrange(8):
            case 0:
                text = f"CAST(x'{random.randbytes(9).hex()}' AS TEXT)"  # mostly no UTF-8
                statements.append((f"UPDATE {table} SET {column} = {text} WHERE rowid IN ({which})", ()))
            case 1:
                change = f"substr({column}, 1, {random.randrange(300)})"
                statements.append((f"UPDATE {table} SET {column} = {change} WHERE rowid IN ({which})", ()))
            case 2:
                statements.append(
                    (f"UPDATE {table} SET {column} = CAST({column} AS BLOB) WHERE rowid IN ({which})", ())
                )
            case 3:
                statements.append((f"INSERT INTO {table} ({column}) VALUES (?)", (_column(random),)))
            case _:
                statements.append((f"UPDATE {table} SET {column} = ? WHERE rowid IN ({which})", (_column(random),)))
    damage = ()
    if random.random() < 0.15:
        statements += [(random.choice(SCHEMA), ()) for _ in range(2)]
    if random.random() < 0.2:
        damage = tuple((random.random(), random.randbytes(random.choice((1, 40, 3000)))) for _ in range(2))
    return Tampered(tuple(statements), damage)


SCHEMA = (
    "DROP TABLE facts", "DROP TABLE runs", "ALTER TABLE runs RENAME COLUMN model TO name", "PRAGMA user_version = 7",
    "PRAGMA user_version = -1", "PRAGMA application_id = 1", "CREATE TABLE more (x)", "DROP INDEX runs_by_time",
    "PRAGMA journal_mode = WAL", "PRAGMA user_version = 0",
)  # fmt: skip


def tamper(case: Tampered) -> object:
    """Rows that are as they were are listed, others said to be unreadable; nothing is written by reading."""
    with own_records() as folder:
        for number, text in enumerate(_seeds()[:3]):
            (folder / f"{number}.json").write_text(text)
        ended("runs", "--import", *(str(folder / f"{number}.json") for number in range(3)), codes=(0,))
        path = folder / "data" / NAME
        _apply(case, path)
        before = path.read_bytes()
        is_ours = not any(statement in SCHEMA for statement, _ in case.statements)
        is_sound = is_ours and not case.damage
        codes = (0,) if is_sound else (0, 2)
        listed = ended("runs", codes=codes)
        runs = json.loads(ended("runs", "--json", codes=(0,)).out)["runs"] if listed.code == 0 else []
        if is_sound:
            ids = [run["id"] for run in runs if "unreadable" not in run]
            assert json.loads(_seeds()[2])["id"] in ids, "the row that nobody touched"
        for run in runs[:6]:
            ended("runs", "--", run["id"] or "nothing", codes=(0, 2))
        ended("estimate", "--model", "gpt2", "--gpu", "h100-80gb", "-q", codes=(0,))
        assert not is_ours or path.read_bytes() == before, "reading has changed it"
        for run in runs if is_sound else ():
            if run["id"].strip():
                ended("runs", "--delete", "--", run["id"], codes=(0,))
        return listed


def _apply(case: Tampered, path: Any) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    for table, columns in (("runs", COLUMNS), ("facts", FACTS)):  # without what keeps other values out
        names = ", ".join(columns)
        connection.execute(f"CREATE TABLE other AS SELECT {names} FROM {table}")
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"CREATE TABLE {table} ({names})")
        connection.execute(f"INSERT INTO {table} SELECT {names} FROM other ORDER BY rowid")
        connection.execute("DROP TABLE other")
    connection.execute("CREATE INDEX runs_by_time ON runs (time, id)")
    for statement, values in case.statements:
        with suppress(sqlite3.Error):  # by then there may be no such table
            connection.execute(statement, values)
    connection.close()
    content = bytearray(path.read_bytes())
    for where, damage in case.damage:
        at = int(where * len(content))
        content[at : at + len(damage)] = damage
    path.write_bytes(content)


TARGETS = (
    Target("record-imports", made_import, import_it, lambda case: f"{case.content[:20000]!r}"),
    Target("record-databases", made_tampering, tamper),
)
