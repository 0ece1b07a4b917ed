"""What records teach estimates, what they do not, and that they are never in an estimate's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memplan.cli import main
from memplan.device.measured import CONTEXT, NCCL, NOTHING, WORKSPACES, Measured, Measurement
from memplan.estimate import estimate, judged_stages
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.records.database import facts_of, open_database
from memplan.records.known import known_measurements
from memplan.records.place import NAME
from memplan.records.readings import Failure
from memplan.records.record import Record
from memplan.tape.events import Category

from .made import MIB, SHARDED, SINGLE, TWO_STAGES, VERSIONS, record_of

CONTEXT_BYTES = 612 * MIB + 4096
PUBLISHED = (518 + 526 + 2 * (92 + 130) + 18) * MIB // 2
"""On an H100, the middle of the range."""
AMD = {**SINGLE, "gpu": "mi300x"}
"""Nobody has published what its driver takes."""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEMPLAN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def kept(*records: Record, imported: bool = False) -> None:
    with open_database() as database:
        for one in records:
            database.add(one, imported=imported)


def known() -> Measured:
    measured, problem = known_measurements()
    assert not problem
    return measured


def names(record: Record) -> list[str]:
    return [one.name for one in facts_of(record)]


def estimated(capsys: pytest.CaptureFixture[str], flags: dict[str, str], *more: str) -> dict[str, Any]:
    assert main(["estimate", *(f"--{name}={value}" for name, value in flags.items()), *more, "--json"]) in (0, 1)
    captured = capsys.readouterr()
    assert captured.err == ""
    data: dict[str, Any] = json.loads(captured.out)
    return data


# -- what a record teaches ----------------------------------------------------------------------------------


def test_only_what_has_a_name_and_was_measured() -> None:
    assert names(record_of()) == []
    assert names(record_of(context=CONTEXT_BYTES)) == [CONTEXT]
    assert names(record_of(context=CONTEXT_BYTES, workspaces=64 * MIB, seconds=(0.1, 0.2))) == [CONTEXT, WORKSPACES]
    assert names(record_of(context=CONTEXT_BYTES, nccl=5)) == [CONTEXT], "a rank alone has no communicator"
    assert names(record_of(SHARDED, nccl=5)) == [NCCL]
    assert names(record_of(SHARDED, nccl=5, world="emulated")) == []
    assert names(record_of(SHARDED, nccl=5, context=9, world="emulated")) == [CONTEXT]
    assert names(record_of(TWO_STAGES, nccl=5, workspaces=5, code="megatron")) == [NCCL, NCCL], "one for each stage"
    assert names(record_of(TWO_STAGES, nccl=5, context=9, code="torch")) == [CONTEXT], "another's code ran"


@pytest.mark.parametrize(
    "run",
    [
        {"device": "cpu"},
        {"device": "fake", "world": "fake"},
        {"world": "fake"},
        {"failures": (Failure(rank=0, kind="died", message="killed"),)},
    ],
)
def test_nothing_from_what_did_not_run_on_gpus_to_its_end(run: dict[str, Any]) -> None:
    assert names(record_of(SHARDED, context=7, nccl=7, workspaces=7, **run)) == []


def test_nothing_of_a_gpu_that_memplan_does_not_know() -> None:
    record = record_of(context=7)
    assert names(record.model_copy(update={"run": record.run.model_copy(update={"gpu": None})})) == []
    ranks = record_of(SHARDED, context=7).run.ranks
    odd = VERSIONS.model_copy(update={"torch": "nightly"})
    assert names(record_of(context=7, versions=odd)) == []
    mixed = (ranks[0], ranks[1].model_copy(update={"device": "NVIDIA A10G"}))
    assert names(record.model_copy(update={"run": record.run.model_copy(update={"ranks": mixed})})) == []


def test_ranks_that_differ_teach_no_workspaces_and_the_largest_context() -> None:
    record = record_of(SHARDED, workspaces=7, context=7)
    first, second = record.run.ranks
    ranks = (first, second.model_copy(update={"workspaces": 8, "context": 9}))
    facts = facts_of(record.model_copy(update={"run": record.run.model_copy(update={"ranks": ranks})}))
    assert [(one.name, one.bytes) for one in facts] == [(CONTEXT, 9)]


def test_nccl_of_a_part_of_the_ranks_or_of_another_machine_is_not_learned() -> None:
    record = record_of(SHARDED, nccl=7)
    run = record.run
    fewer = record.model_copy(update={"run": run.model_copy(update={"ranks": run.ranks[:1]})})
    assert names(fewer) == []
    assert names(record_of({**SHARDED, "gpus-per-node": "2"}, nccl=7)) == [NCCL]
    assert names(record_of(SHARDED, nccl=7, hosts=("alpha", "beta"))) == [], "the plan had both in one node"
    apart = {**SHARDED, "gpus-per-node": "1"}
    assert names(record_of(apart, nccl=7, hosts=("alpha", "beta"))) == [NCCL]


# -- what an estimate makes of it ---------------------------------------------------------------------------


def test_the_context_that_was_measured_here_is_the_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    before = estimated(capsys, SINGLE)
    record = record_of(context=CONTEXT_BYTES)
    kept(record)
    after = estimated(capsys, SINGLE)
    (stage,) = after["stages"]
    published = before["stages"][0]["beyond_allocated"]["cuda_context"]
    assert published == PUBLISHED
    assert stage["beyond_allocated"]["cuda_context"] == CONTEXT_BYTES
    assert stage["device_bytes"] == before["stages"][0]["device_bytes"] + CONTEXT_BYTES - published
    assert stage["reserved_bytes"] == before["stages"][0]["reserved_bytes"]
    assert after["assumptions"][0] == (
        f"CUDA context of 612.0 MiB as measured on 2026-11-21 by run {record.id} (torch 2.13.0+cu130, CUDA 13.0, "
        "driver 590.48.01); published: 740 to 766 MiB"
    )
    assert estimated(capsys, SINGLE, "--no-records") == before
    with open_database() as database:
        database.delete(record.id)
    assert estimated(capsys, SINGLE) == before, "what is removed is forgotten"


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "h200"},
        {"torch": "2.11"},
        {"framework": "megatron", "gpus": "1"},
        {"env": "CUDA_MODULE_LOADING=EAGER"},
    ],
)
def test_a_context_holds_for_its_gpu_release_and_code(other: dict[str, str]) -> None:
    measured = Measured(facts_of(record_of(context=CONTEXT_BYTES)))
    flags: dict[str, Any] = {**SINGLE, **other}
    if "env" in flags:
        flags["env"] = (flags["env"],)
    plan = read_plan(None, flags).plan
    assert estimate(plan, measured) == estimate(plan)


def test_a_device_reading_where_there_was_none(capsys: pytest.CaptureFixture[str]) -> None:
    before = estimated(capsys, AMD)
    assert before["fits"] is None
    assert [one["code"] for one in before["warnings"]] == ["context-unknown"]
    kept(record_of(AMD, context=300 * MIB))
    after = estimated(capsys, AMD)
    assert after["fits"] is True
    assert after["warnings"] == []
    assert after["stages"][0]["device_bytes"] == after["stages"][0]["reserved_bytes"] + 300 * MIB
    assert after["assumptions"][0].endswith("; none is published")


def test_context_and_nccl_are_of_the_same_kind_of_run() -> None:
    """Kernels that are loaded once communicators exist count as theirs: added to a whole run's context, they would
    count twice."""
    whole = facts_of(record_of(minute=9, context=900 * MIB))
    early = facts_of(record_of(SHARDED, minute=1, context=500 * MIB, nccl=700 * MIB))
    emulated = facts_of(record_of(SHARDED, minute=5, context=800 * MIB, world="emulated"))
    single, sharded = resolve(read_plan(None, SINGLE).plan), resolve(read_plan(None, SHARDED).plan)

    def context(plan: Any, *facts: Measurement) -> int | None:
        found = Measured(facts).context(plan)
        return None if found is None else found.bytes // MIB

    assert context(sharded, *whole, *early, *emulated) == 500
    assert context(sharded, *whole, *emulated) == 900
    assert context(single, *whole, *early) == 900
    assert context(single, *early) == 500, "at least"
    assert context(sharded, *(one for one in early if one.name == CONTEXT), *emulated) == 800


def test_nccl_of_the_same_world(capsys: pytest.CaptureFixture[str]) -> None:
    before = estimated(capsys, TWO_STAGES)
    assert [stage["device_range_bytes"][0] < stage["device_bytes"] for stage in before["stages"]] == [True, True]
    record = record_of(TWO_STAGES, code="megatron", nccl=400 * MIB)
    ranks = tuple(rank.model_copy(update={"nccl": (rank.rank + 1) * 100 * MIB}) for rank in record.run.ranks)
    kept(record.model_copy(update={"run": record.run.model_copy(update={"ranks": ranks})}))
    after = estimated(capsys, TWO_STAGES)
    assert [stage["beyond_allocated"]["nccl"] for stage in after["stages"]] == [200 * MIB, 400 * MIB], "worst of each"
    assert [stage["device_bytes"] for stage in after["stages"]] == [
        stage["device_bytes"] - stage["beyond_allocated"]["nccl"] + more * MIB
        for stage, more in zip(before["stages"], (200, 400), strict=True)
    ]
    assert after["assumptions"][0].startswith(
        "NCCL's buffers of 200.0 MiB to 400.0 MiB, stage by stage, as measured on"
    )
    assert estimated(capsys, {**TWO_STAGES, "mbs": "2"})["stages"][0]["beyond_allocated"]["nccl"] == 200 * MIB
    for change in ({"tp": "1", "pp": "4"}, {"gpus": "8"}, {"gpus-per-node": "2"}, {"env": "NCCL_BUFFSIZE=1048576"}):
        other = estimated(capsys, {**TWO_STAGES, **change})
        assert not {stage["beyond_allocated"]["nccl"] for stage in other["stages"]} & {200 * MIB, 400 * MIB}


def test_workspaces_in_place_of_the_formula() -> None:
    plan = read_plan(None, SINGLE).plan
    (before,) = estimate(plan).stages
    published = 2 * 32 * MIB
    for size in (published, 3 * 32 * MIB, 5 * MIB + 512, 0):
        measured = Measured(facts_of(record_of(workspaces=size)))
        after = estimate(plan, measured)
        assert after.assumptions[0].startswith(f"cuBLAS workspaces of {size / MIB:,.1f} MiB as measured on 2026-11-21")
        assert after.assumptions[0].endswith("; PyTorch's source: 64.0 MiB")
        (stage,) = after.stages
        assert stage.of(Category.WORKSPACES) == size
        assert sum(stage.breakdown) == stage.allocated
        assert stage.requested == before.requested
        if size == published:
            assert replace(after, assumptions=()) == replace(estimate(plan), assumptions=())


def test_a_plan_without_workspaces_of_ones_own_keeps_the_formula() -> None:
    measured = Measured(facts_of(record_of(workspaces=5 * MIB)))
    plan = read_plan(None, {**SINGLE, "dtype": "fp32"}).plan
    assert estimate(plan, measured) == estimate(plan)


def test_the_newest_wins_and_ones_own_before_what_was_imported() -> None:
    def sizes() -> list[int]:
        return [one.bytes for one in known().measurements]

    kept(record_of(minute=5, context=5), record_of(minute=3, context=3))
    assert sizes() == [5]
    kept(record_of(minute=9, context=9), imported=True)
    assert sizes() == [5]
    kept(record_of(minute=7, context=7))
    assert sizes() == [7]
    with open_database() as database:
        for one in database.ids()[1:]:
            database.delete(one)
    assert sizes() == [9]
    (only,) = known().measurements
    assert "by imported run" in only.source


MEASUREMENTS = st.builds(
    Measurement,
    name=st.sampled_from([CONTEXT, NCCL]),
    gpu=st.sampled_from(["h100-80gb", "a10g"]),
    setting=st.sampled_from(["x", "y"]),
    stage=st.none() | st.integers(0, 1),
    bytes=st.integers(0, 9),
    time=st.sampled_from(["2026-11-21T20:00:00Z", "2026-11-22T20:00:00Z"]),
    run=st.sampled_from("abc"),
    versions=st.just("torch 2.13.0"),
    imported=st.booleans(),
)


@given(
    st.lists(MEASUREMENTS, unique_by=lambda one: (one.name, one.gpu, one.setting, one.stage, one.time, one.run)),
    st.randoms(),
)
@settings(deadline=None, max_examples=50)
def test_the_order_of_recording_changes_nothing(found: list[Measurement], chance: Any) -> None:
    """And SQL chooses the same as ``Measured`` does."""
    import sqlite3

    from memplan.records.database import MIGRATIONS
    from memplan.records.known import _measurements

    shuffled = list(found)
    chance.shuffle(shuffled)
    connection = sqlite3.connect(":memory:")
    MIGRATIONS[0](connection)
    rows = [(m.run, m.name, m.gpu, m.setting, m.stage, m.bytes, m.time, m.versions, m.imported) for m in shuffled]
    connection.executemany("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    chosen = Measured(_measurements(connection))
    connection.close()
    assert dict(chosen._by_key) == dict(Measured(tuple(found))._by_key)


# -- never in the way ---------------------------------------------------------------------------------------


def test_a_damaged_database_is_a_warning(capsys: pytest.CaptureFixture[str], own_folder: Path) -> None:
    before = estimated(capsys, SINGLE)
    own_folder.mkdir()
    (own_folder / NAME).write_bytes(b"\x00 not a database" * 100)
    after = estimated(capsys, SINGLE)
    *others, warning = [one for one in after["warnings"] if one not in before["warnings"]]
    assert not others
    assert warning["code"] == "records-unreadable"
    assert str(own_folder / NAME) in warning["message"]
    assert {**after, "warnings": None} == {**before, "warnings": None}
    assert estimated(capsys, SINGLE, "--no-records") == before
    assert main(["estimate", "gpt2-xl-4gpu", "--vary", "mbs=1,2"]) in (0, 1)
    assert main(["suggest-partition", "--model", "gpt2", "--gpu", "h100-80gb", "--mbs", "1", "--json"]) == 0
    assert '"records-unreadable"' in capsys.readouterr().out


def test_without_records_nothing_of_them_is_imported(own_folder: Path) -> None:
    code = (
        "import sys\nfrom memplan.cli import main\nmain(['estimate', 'llama-3-8b', '-q'])\n"
        "found = {'sqlite3', 'memplan.records.record', 'memplan.records.readings'} & set(sys.modules)\n"
        "print(sorted(found), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stderr == "[]\n"
    assert not own_folder.exists(), "and nothing is made"


def test_suggestions_reckon_with_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    kept(record_of(context=2000 * MIB))
    flags = ["--model", "gpt2-xl", "--gpu", "h100-80gb", "--mbs", "1", "--json"]
    assert main(["suggest-partition", *flags]) == 0
    with_records = json.loads(capsys.readouterr().out)
    assert main(["suggest-partition", *flags, "--no-records"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert any("CUDA context of 2,000.0 MiB as measured" in one for one in with_records["assumptions"])
    assert not any("as measured on" in one for one in without["assumptions"])
    contexts = [one["recommended"]["stages"][0]["beyond_allocated"]["cuda_context"] for one in (with_records, without)]
    assert contexts == [2000 * MIB, PUBLISHED]


def test_one_stage_alone_is_as_in_the_whole() -> None:
    record = record_of(TWO_STAGES, code="megatron", nccl=300 * MIB, context=CONTEXT_BYTES)
    measured = Measured(facts_of(record))
    plan = read_plan(None, TWO_STAGES).plan
    for known in (measured, NOTHING):
        for stage in estimate(plan, known).stages:
            (alone,) = judged_stages(resolve(plan), (stage.stage,), known)
            assert alone.device == stage.device


def test_versions_without_driver() -> None:
    record = record_of(context=7, versions=VERSIONS.model_copy(update={"driver": None, "cuda": None}))
    assert facts_of(record)[0].versions == "torch 2.13.0+cu130"
