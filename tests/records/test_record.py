"""A record and its file: whole, or one line that says what is wrong with it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memplan.plan.errors import PlanError
from memplan.records.readings import Failure, Moment, Place, RankReading, Run, Versions
from memplan.records.record import (
    LARGEST,
    MOST_PARTS,
    Record,
    differences,
    from_json,
    from_text,
    judged,
    read_record,
    to_json,
    to_text,
    verdict_of,
    worst,
)
from memplan.records.sharing import shareable, shared_text

from .made import MIB, SINGLE, TWO_STAGES, estimate_json, record_of, run_of

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = st.none() | st.integers(0, 2**60)
WORDS = st.text(max_size=12)
MOMENTS = st.builds(Moment, name=WORDS, requested=SIZES, allocated=SIZES, reserved=SIZES, end=SIZES)
PLACES = st.builds(
    Place,
    entry=WORDS,
    phase=WORDS,
    microbatch=st.integers(0, 9),
    net=st.integers(-(2**60), 2**60),
    peak=st.integers(0, 2**60),
    estimated_net=SIZES,
    estimated_peak=SIZES,
)
RANKS = st.builds(
    RankReading,
    rank=st.integers(0, 2**20),
    stage=st.integers(0, 3),
    host=WORDS,
    device=WORDS,
    parameters=st.integers(0, 2**60),
    requested=SIZES,
    allocated=SIZES,
    reserved=SIZES,
    device_bytes=SIZES,
    static=SIZES,
    context=SIZES,
    nccl=SIZES,
    workspaces=SIZES,
    moments=st.lists(MOMENTS, max_size=2).map(tuple),
    breakdown=st.dictionaries(WORDS, st.integers(0, 2**60), max_size=3),
    seconds=st.lists(st.floats(0, 1e6), max_size=3).map(tuple),
    losses=st.lists(st.floats(), max_size=3).map(tuple),
    apart=st.none() | PLACES,
)
FAILURES = st.builds(
    Failure,
    rank=st.none() | st.integers(0, 7),
    kind=st.sampled_from(["out-of-memory", "error", "died", "timeout", "interrupted"]),
    message=WORDS,
    lines=st.lists(WORDS, max_size=2).map(tuple),
)
RUNS = st.builds(
    Run,
    world=st.sampled_from(["real", "emulated", "fake"]),
    code=st.sampled_from(["torch", "megatron", "deepspeed"]),
    device=st.sampled_from(["cuda", "cpu", "fake"]),
    gpu=st.none() | st.just("h100-80gb"),
    versions=st.builds(Versions, memplan=WORDS, python=WORDS, torch=WORDS, others=st.dictionaries(WORDS, WORDS)),
    ranks=st.lists(RANKS, max_size=3).map(tuple),
    failures=st.lists(FAILURES, max_size=2).map(tuple),
)


def written(record: Record) -> Any:
    """As plain values in which NaN equals NaN."""
    return json.loads(to_text(record))


@given(RUNS)
@settings(deadline=None)
def test_what_is_written_reads_back(run: Run) -> None:
    record = record_of().model_copy(update={"run": run})
    again = from_text(to_text(record), "here")
    assert written(again) == written(record)
    losses = [(rank.losses, other.losses) for rank, other in zip(run.ranks, again.run.ranks, strict=True)]
    assert all(
        a == b or (math.isnan(a) and math.isnan(b)) for one, other in losses for a, b in zip(one, other, strict=True)
    )
    without = [rank.model_copy(update={"losses": ()}) for rank in run.ranks]
    assert without == [rank.model_copy(update={"losses": ()}) for rank in again.run.ranks]


def test_it_is_json_for_everybody() -> None:
    record = record_of(losses=(2.0, math.nan, math.inf, -math.inf))
    data = json.loads(to_text(record), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["run"]["ranks"][0]["losses"] == [2.0, "NaN", "Infinity", "-Infinity"]
    assert data["schema"] == 1


def test_the_estimate_stays_as_it_was_printed() -> None:
    record = record_of(TWO_STAGES, code="megatron")
    assert to_json(record)["estimate"] == estimate_json(TWO_STAGES)
    assert written(from_text(to_text(record), "here"))["estimate"] == estimate_json(TWO_STAGES)


def changed(path: str, value: Any, *, delete: bool = False) -> dict[str, Any]:
    data = written(record_of())
    *parents, last = path.split(".")
    inner: Any = data
    for name in parents:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    if delete:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("id", "XYZ", "mine.json: id = XYZ: string should match pattern '^[0-9a-f]{12}$'"),
        ("time", "2026-1-1T1:1:1Z", "mine.json: time = 2026-1-1T1:1:1Z: must be as 2026-11-21T20:15:03Z"),
        ("tolerance", 7, "mine.json: tolerance = 7: must be less than 1"),
        ("verdict", "fine", "mine.json: verdict = fine: must be 'agrees', 'differs', 'failed' or 'nothing measured'"),
        ("run.world", "dream", "mine.json: run.world = dream: must be 'real', 'emulated' or 'fake'"),
        ("run.ranks.0.rank", "0", "mine.json: run.ranks.0.rank = 0: must be a whole number"),
        ("run.ranks.0.stage", -1, "mine.json: run.ranks.0.stage = -1: must be greater than or equal to 0"),
        ("run.ranks.0.new", 1, "mine.json: run.ranks.0.new: is not a field of a record"),
        ("run.ranks", 1, "mine.json: run.ranks = 1: must be a valid array"),
        ("run", None, "mine.json: run = null: must be an object"),
        ("estimate.stages", [], "mine.json: estimate.stages = []: tuple should have at least 1 item after validation"),
        ("estimate.schema", 2, "mine.json: estimate.schema = 2: must be 1"),
        ("estimate.plan.model.name", 3, "mine.json: estimate.plan.model.name = 3: must be text"),
        ("schema", 2, "mine.json: schema = 2: was written by a newer memplan: this one reads records up to schema 1"),
        ("schema", True, "mine.json: schema = true: must be 1"),
        ("schema", "1", "mine.json: schema = 1: must be 1"),
        ("command", "another", "mine.json: sha256 = "),
        ("run.ranks.0.requested", 1, "mine.json: sha256 = "),
        ("sha256", None, "mine.json: sha256 = null: does not fit the content"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(path: str, value: Any, line: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_json(changed(path, value), "mine.json")
    assert str(caught.value).startswith(line), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["id", "run.versions", "run.ranks.0.host", "estimate.plan", "hardware.nodes", "sha256"]
)
def test_what_is_missing_is_named(path: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_json(changed(path, None, delete=True), "mine.json")
    assert str(caught.value).startswith(f"mine.json: {path}: "), str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"schema": 1}', '{"schema": 1, "run": NaN}', "[" * 100_000, '{"a": 1}\x00', "\ud800"],
)
def test_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_text(text, "mine.json")
    assert str(caught.value).startswith("mine.json")
    assert "\n" not in str(caught.value)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_cut_or_flipped_file_never_reads(data: st.DataObject) -> None:
    text = TEXT
    at = data.draw(st.integers(0, len(text) - 2))
    damaged = data.draw(st.sampled_from([text[:at], text[:at] + text[at + 1 :], text[:at] + "7" + text[at + 1 :]]))
    try:
        read = from_text(damaged, "mine.json")
    except PlanError:
        return
    assert written(read) == json.loads(text), "only what changes nothing is let through, as a blank"


TEXT = to_text(record_of())


def test_files_that_are_no_records(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    with pytest.raises(PlanError, match=r"mine\.json: no such file"):
        read_record(file)
    with pytest.raises(PlanError, match="is a directory; name a file in it"):
        read_record(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not UTF-8"):
        read_record(file)
    file.write_text(TEXT)
    assert to_text(read_record(file)) == TEXT


# -- differences and verdicts -------------------------------------------------------------------------------


def test_the_verdict_follows_from_the_furthest_stage() -> None:
    assert record_of(apart=0.01).verdict == "agrees"
    assert record_of(apart=0.05).verdict == "differs"
    assert record_of(apart=-0.05).verdict == "differs"
    failure = Failure(rank=0, kind="out-of-memory", message="tried to allocate 2 GiB")
    assert record_of(failures=(failure,)).verdict == "failed"
    run = run_of(SINGLE).model_copy(update={"ranks": ()})
    assert verdict_of(run, differences(record_of().estimate, run), 0.03) == "nothing measured"


def test_allocated_is_judged_and_the_most_loaded_rank_counts() -> None:
    run = run_of(TWO_STAGES)
    first, *others = run.ranks
    assert first.allocated is not None
    run = run.model_copy(update={"ranks": (first.model_copy(update={"allocated": first.allocated + 7 * MIB}), *others)})
    found = differences(record_of(TWO_STAGES).estimate, run)
    assert [(one.stage, one.reading, one.bytes) for one in judged(found)] == [
        (0, "allocated", -7 * MIB),
        (1, "allocated", 0),
    ]
    furthest = worst(found)
    assert furthest is not None
    assert furthest.part == pytest.approx(-7 * MIB / (first.allocated + 7 * MIB))


def test_requested_is_judged_where_a_device_has_no_statistics() -> None:
    run = run_of(SINGLE)
    ranks = tuple(rank.model_copy(update={"allocated": None}) for rank in run.ranks)
    found = differences(record_of().estimate, run.model_copy(update={"ranks": ranks}))
    assert [one.reading for one in judged(found)] == ["requested"]


# -- what is shared -----------------------------------------------------------------------------------------


def test_a_shared_file_names_no_host_and_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    failure = Failure(
        rank=1, kind="died", message="rank 1 on beta.cluster died (beta)", lines=("alice@beta:/home/alice",)
    )
    record = record_of(
        TWO_STAGES,
        hosts=("alpha.cluster", "beta.cluster"),
        failures=(failure,),
        command="memplan validate /home/alice/plans/a.yaml --rdzv-endpoint alpha:29500",
    )
    text = shared_text(record)
    for private in ("alice", "alpha", "beta", "cluster"):
        assert private not in text
    shared = from_text(text, "here")
    assert [rank.host for rank in shared.run.ranks] == ["node-0", "node-0", "node-1", "node-1"]
    assert shared.command == "memplan validate ~/plans/a.yaml --rdzv-endpoint node-0:29500"
    assert shared.run.failures[0].message == "rank 1 on node-1 died (node-1)"
    assert (shared.id, shared.time, shared.verdict) == (record.id, record.time, record.verdict)
    assert written(shared)["estimate"] == written(record)["estimate"]
    assert to_text(shareable(shared)) == text, "shared again it is the same"


def test_a_host_called_as_something_else_changes_nothing_else() -> None:
    shared = shareable(record_of(TWO_STAGES, code="megatron", hosts=("megatron", "cuda")))
    assert (shared.run.code, shared.run.device, shared.ran.framework) == ("megatron", "cuda", "megatron")


def test_records_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import memplan.records.database, memplan.records.known, memplan.records.sharing\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- sizes ----------------------------------------------------------------------------------------------------


def integers(value: Any, path: str = "") -> list[str]:
    """Where whole numbers stand in a record's JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, item in inner for place in integers(item, f"{path}.{key}".lstrip("."))]
    return [path] if type(value) is int else found


def with_everything() -> Record:
    """A record in which every field that can be a number is one."""
    place = Place(entry="head", phase="forward", microbatch=0, net=1, peak=2, estimated_net=1, estimated_peak=2)
    moment = Moment(name="step", requested=1, allocated=2, reserved=3, end=4)
    readings = {"device_bytes": 7, "context": 1, "nccl": 2, "workspaces": 3, "moments": (moment,), "apart": place}
    failure = Failure(rank=1, kind="died", message="", allocated=1, reserved=2, failing=3)
    record = record_of(TWO_STAGES, code="megatron", failures=(failure,))
    ranks = tuple(rank.model_copy(update=readings) for rank in record.run.ranks)
    return record.model_copy(update={"run": record.run.model_copy(update={"ranks": ranks})})


def test_no_number_of_a_record_is_larger_than_64_bits() -> None:
    """Of the estimate and the plan what is read; the rest is kept as it is."""
    data = written(with_everything())
    unread, refused = set(), 0
    for path in integers({key: value for key, value in data.items() if key != "schema"}):
        for value in (2**63, -(2**63), 10**400):
            *parents, last = path.split(".")
            other: Any = json.loads(json.dumps(data))
            at = other
            for name in parents:
                at = at[int(name)] if isinstance(at, list) else at[name]
            at[last if isinstance(at, dict) else int(last)] = value
            del other["sha256"]
            with pytest.raises(PlanError) as caught:
                from_json(other, "mine.json")
            if caught.value.field == "sha256":
                unread.add(re.sub(r"\.\d+", "", path))
            else:
                assert caught.value.field.startswith(path), (path, str(caught.value))
                assert len(str(caught.value)) < 200
                refused += 1
    assert refused > 300
    assert not {path for path in unread if not path.startswith(("plan.", "estimate."))}
    assert not {path for path in unread if path.startswith("estimate.stages.breakdown")}
    assert "estimate.stages.requested_bytes" not in unread
    assert "estimate.capacity_bytes" in unread


def test_a_file_is_limited_in_bytes_and_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    data = written(record_of())
    for content, said in (
        (b" " * LARGEST + b"{}", r"is larger than a record can be \(8 MiB\): at least 8,388,610 bytes"),
        (b"[" * MOST_PARTS + b"{", r"has more parts than a record can have \(100,000\)"),
        (json.dumps({**data, "plan": {"x": [{}] * MOST_PARTS}}).encode(), "has more parts"),
    ):
        file.write_bytes(content)
        with pytest.raises(PlanError, match=said):
            read_record(file)


@pytest.mark.slow
def test_the_largest_files_take_less_than_500_mb(tmp_path: Path) -> None:
    """As many numbers as there is room for, which take most memory of all that may be many."""
    file = tmp_path / "mine.json"
    data = written(record_of())
    del data["sha256"]
    data["plan"] = {"x": [0] * ((LARGEST - 100_000) // 3)}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["sha256"] = sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(data, separators=(",", ":")))
    code = (
        "import resource, sys; from memplan.cli import main; code = main(['runs', '--import', sys.argv[1]]);"
        "print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMPLAN_DATA": str(tmp_path / "data")}
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    exit_code, rss = map(int, done.stdout.split()[-2:])
    assert exit_code == 0
    assert rss < 500
