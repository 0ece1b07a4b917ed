"""Snapshots: written as PyTorch's memory viewer reads them, read without being trusted, and beside a plan."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memplan.cli import main
from memplan.estimate import estimate
from memplan.explain import compare_snapshot, written_snapshot
from memplan.explain.pickles import PickleReader, UnreadableError
from memplan.explain.snapshot import read_snapshot
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category

SMALL = {"model": "gpt2", "framework": "single", "mbs": "2", "seq": "256", "gpu": "a100-40gb"}


def plan_of(**flags: str) -> Plan:
    return read_plan(None, {**SMALL, **flags}).plan


def written(**flags: str) -> bytes:
    return written_snapshot(resolve(plan_of(**flags)))


def plain(data: bytes) -> Any:
    return PickleReader(data, lambda found: found, lambda into, items: into.extend(items)).read()


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 2**31), inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@given(values, st.integers(2, 5))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert plain(pickle.dumps(value, protocol)) == value


@given(st.binary(max_size=300), st.integers(0, 5))
@settings(max_examples=300)
def test_any_other_bytes_end_in_one_error(data: bytes, cut: int) -> None:
    whole = pickle.dumps({"segments": [{"a": [1, 2, "x" * 9]}], "b": (1, 2.5)}, 4)
    for one in (data, b"\x80\x04" + data, whole[: len(whole) * cut // 5], whole[:20] + data + whole[20:]):
        error = refused(one)
        assert error is None or "\n" not in error


def refused(data: bytes) -> str | None:
    try:
        plain(data)
    except UnreadableError as error:
        return str(error)
    return None


class Bad:
    """What a hostile pickle does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


HOSTILE = {
    "a call": b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
    "protocol 0": b"cos\nsystem\n(S'ls'\ntR.",
    "an instance": b"\x80\x02(X\x01\x00\x00\x00aios\nsystem\n.",
    "a build": b"\x80\x02}}b.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "a memo far away": b"\x80\x02]r\xff\xff\xff\xffj\xff\xff\xff\xfe.",
    "a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "a long number": b"\x80\x02\x8b" + struct.pack("<I", 1 << 30) + b"a.",
    "a buffer": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "nothing": b"\x80\x04",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(HOSTILE[name])
    assert main(["explain", str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"{file}: {'has no' if name == 'protocol 0' else 'is no memory snapshot'}")
    assert told.err.count("\n") == 1


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for protocol in range(6):
        with pytest.raises(PlanError):
            read_snapshot(pickle.dumps({"segments": [Bad(mark)]}, protocol))
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bad(mark)))
    assert mark.exists(), "the test's own pickle does nothing"


def test_lists_in_lists_end_in_one_error() -> None:
    """More values than memory: each opcode of one byte makes a list."""
    began = time.process_time()
    with pytest.raises(UnreadableError):
        plain(b"\x80\x04" + b"]" * 3_000_000 + b".")
    assert time.process_time() - began < 20


@pytest.mark.parametrize("cut", [10, 1000, 100_000])
def test_cut_off_files(cut: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="damaged or cut off"):
        read_snapshot(written()[:-cut])


def test_shapes_that_are_not_pytorchs() -> None:
    wrong: list[Any] = [
        1,
        [],
        {},
        {"segments": 1},
        {"segments": [1]},
        {"segments": [], "device_traces": [[{"action": 3}]]},
    ]
    for value in wrong:
        with pytest.raises(PlanError, match="memory snapshot"):
            read_snapshot(pickle.dumps(value))
    with pytest.raises(PlanError, match="memory snapshot"):
        read_snapshot(b'{"segments": [{"device": "x"}]}')
    deep = b"[" * 100_000
    with pytest.raises(PlanError, match="memory snapshot"):
        read_snapshot(deep)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"env": ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)},
        {"framework": "fsdp", "gpus": "4"},
        {"framework": "megatron", "gpus": "2", "pp": "2", "gbs": "8"},
    ],
    ids=["single", "expandable", "fsdp", "pipeline"],
)
def test_what_is_written_is_what_estimate_says(flags: Any) -> None:
    """Read with this package's reader, and with PyTorch's own functions."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = written(**flags)
    estimated = estimate(plan_of(**flags))
    runs = read_snapshot(data)
    assert len(runs) == len(estimated.stages)
    for run, stage in zip(runs, estimated.stages, strict=True):
        assert run.reserved == stage.reserved
        assert run.peak >= sum(stage.breakdown) - stage.breakdown[Category.BLOCK_ROUNDING]
        assert run.unknown == 0
    whole = pickle.loads(data)
    assert f"segments: {len(whole['segments'])}" in viz.segsum(whole)
    assert "cudaMalloc" in viz.trace(whole)
    assert read_snapshot(viz.trace_plot(whole).encode()) == runs
    assert read_snapshot(json.dumps(whole).encode()) == runs


def test_a_plan_beside_itself_is_the_same_to_the_last_tensor() -> None:
    told, failed = compare_snapshot(written(), plan_of())
    assert failed is None
    assert told.by == told.matched
    assert sum(told.by) == told.planned == told.run.peak
    assert (told.only_planned, told.only_ran) == ((), ())
    assert told.parting is not None
    assert told.parting.planned is None


def test_the_first_place_where_another_attention_parts() -> None:
    told, _ = compare_snapshot(written(attention="eager", seq="1024"), plan_of(seq="1024"))
    assert told.parting is not None
    assert told.parting.planned is not None
    assert told.run.peak > told.planned
    assert any("attention_dropout" in one.what for one in told.only_ran)
    assert told.matched[Category.PARAMETERS] == told.by[Category.PARAMETERS]
    assert told.matched[Category.OPTIMIZER_STATES] == told.by[Category.OPTIMIZER_STATES]


def test_a_trace_that_begins_late_knows_what_was_there() -> None:
    """It begins with the loss of the second iteration: what was there is freed later, or lies in the segments."""
    whole = pickle.loads(written())
    (run,) = read_snapshot(pickle.dumps(whole))
    trace = whole["device_traces"][0]
    begin = max(at for at, one in enumerate(trace) if one["frames"] and "log_prob" in one["frames"][0]["name"])
    whole["device_traces"] = [trace[begin:]]
    (late,) = read_snapshot(pickle.dumps(whole))
    assert late.entries < run.entries // 2
    assert late.peak == run.peak
    assert 0 < late.unknown < run.peak


def test_a_failed_request_is_explained() -> None:
    whole = pickle.loads(written())
    size = 2 * 256 * 50257 * 4
    frames = [{"name": "forward", "filename": "transformers/loss/loss_utils.py", "line": 26}]
    oom = {"action": "oom", "device_free": 1 << 20, "size": size, "stream": 0, "frames": frames}
    whole["device_traces"][0].append(oom)
    told, failed = compare_snapshot(pickle.dumps(whole), plan_of())
    assert failed is not None
    assert failed.candidates
    assert all(one.size == -(-size // 512) * 512 for one in failed.candidates)
    assert failed.reported.message.free == 1 << 20
    assert told.run.failed[0].allocated > 0


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.pickle"
    words = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["estimate", *words, "--snapshot", str(file), "--no-records"]) == 0
    assert main(["estimate", *words, "--snapshot", str(file), "--no-records"]) == 2
    assert main(["estimate", *words, "--snapshot", str(file), "--vary", "mbs=1,2"]) == 2
    capsys.readouterr()
    assert main(["explain", str(file), *words, "-q", "--no-records"]) == 0
    assert "(0.0 %)" in capsys.readouterr().out
    assert main(["explain", str(file), *words, "--json", "--no-records"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run_peak_bytes"] == told["plan_peak_bytes"]
    assert told["parting"]["plan"] is None
    assert main(["explain", str(file), "--no-records"]) == 0
    assert "At the peak" in capsys.readouterr().out
    assert main(["explain", str(file), *words, "--stage", "7"]) == 2
    assert "must be a stage from 0 to 0" in capsys.readouterr().err
