"""Stages of torchtitan's Llama traced by PyTorch's own schedules, beside estimates: pass by pass, layer by layer."""

from __future__ import annotations

import pytest

from memplan.plan.errors import PlanError
from memplan.tape.events import Category, fold
from memplan.tape.program import static
from memplan.trace.comparison import Row
from memplan.trace.framework import job_of_plan
from memplan.trace.recording import BACKWARD, BETWEEN, FORWARD, LOSS, REDUCE, Traced

from .titan_cases import GROUPED, ONE_SEQUENCE, WIDE_HEADS, found, plan_of

FULL, OPERATORS = {"recompute": "full"}, {"recompute-per-operator": "true"}
THREE = {"layers": "4", "pp": "3", "gbs": "24"}
"""One layer, two, and one: embedding and head count as layers."""
OLD = {"ends-apart": "false"}
CHUNKS = {"layers": "4", "pp": "2", "vpp": "2"}
FP32 = {"dtype": "fp32"}
WHOLE = {"loss": "plain", "return-outputs": "true"}
CASES: dict[str, tuple[dict[str, str], int]] = {
    "1f1b-first": ({**GROUPED, **THREE, **OLD, "gbs": "32"}, 0),
    "1f1b-middle-full": ({**GROUPED, **THREE, "gbs": "32", **FULL}, 1),
    "1f1b-last-operators": ({**WIDE_HEADS, **THREE, "gbs": "36", **OPERATORS}, 2),
    "1f1b-last-old": ({**WIDE_HEADS, **THREE, **OLD, "gbs": "36", "return-outputs": "false"}, 2),
    "1f1b-first-every-second": ({**GROUPED, "layers": "4", "pp": "2", "gbs": "16", **FULL, "recompute-every": "2"}, 0),
    "gpipe-first-full": ({**ONE_SEQUENCE, **THREE, "gbs": "8", "schedule": "gpipe", **FULL}, 0),
    "gpipe-middle": ({**GROUPED, **THREE, "schedule": "gpipe", "fsdp-replicas": "2"}, 1),
    "gpipe-last-outputs": ({**GROUPED, **THREE, **OLD, "schedule": "gpipe"}, 2),
    "interleaved-first": ({**GROUPED, "layers": "4", "pp": "2", "vpp": "2", "gbs": "24"}, 0),
    "interleaved-middle": ({**ONE_SEQUENCE, "layers": "6", "pp": "3", "vpp": "2", "gbs": "12", **FULL}, 1),
    "interleaved-last-bf16": (
        {**GROUPED, "layers": "4", "pp": "2", "vpp": "2", "gbs": "16", "fsdp-reduce": "bf16"},
        1,
    ),
    "1f1b-tp-first": ({**GROUPED, **THREE, "gbs": "32", "tp": "2"}, 0),
    "1f1b-tp-middle-full": ({**WIDE_HEADS, **THREE, "gbs": "36", "tp": "2", **FULL}, 1),
    "1f1b-tp-last-operators": ({**ONE_SEQUENCE, **THREE, "gbs": "16", "tp": "2", **OPERATORS}, 2),
    "1f1b-tp-first-replicas": ({**ONE_SEQUENCE, **THREE, "gbs": "16", "tp": "2", "fsdp-replicas": "2", **FULL}, 0),
    "gpipe-tp-first-bf16": ({**WIDE_HEADS, **THREE, "tp": "2", "schedule": "gpipe", "fsdp-reduce": "bf16"}, 0),
    "gpipe-tp-last-outputs": ({**GROUPED, **THREE, "tp": "4", "schedule": "gpipe", "return-outputs": "true"}, 2),
    "gpipe-tp-last-gathered": ({**WIDE_HEADS, **THREE, "gbs": "36", "tp": "2", "schedule": "gpipe", **WHOLE}, 2),
    "interleaved-tp-first": ({**GROUPED, **CHUNKS, "gbs": "24", "tp": "2", **OPERATORS}, 0),
    "interleaved-tp-middle": ({**ONE_SEQUENCE, **CHUNKS, "layers": "6", "pp": "3", "gbs": "12", "tp": "2", **FULL}, 1),
    "interleaved-tp-last-apart": (
        {**WIDE_HEADS, "layers": "4", "pp": "2", "vpp": "3", "gbs": "24", "tp": "2"},
        1,
    ),
    "one-shard": ({**GROUPED, "layers": "2", "pp": "2", "gbs": "6", "dp": "1"}, 1),
    "one-shard-replicas": ({**GROUPED, "layers": "2", "pp": "2", "gbs": "8", "dp": "2", "fsdp-replicas": "2"}, 0),
    "one-shard-tp-first": ({**GROUPED, "layers": "4", "pp": "2", "gbs": "4", "dp": "1", "tp": "2"}, 0),
    "one-shard-tp-last": ({**GROUPED, **OLD, "layers": "4", "pp": "2", "gbs": "4", "dp": "1", "tp": "2"}, 1),
    "one-shard-fp32-tp": ({**WIDE_HEADS, "layers": "2", "pp": "2", "gbs": "6", "dp": "1", "tp": "2", **FP32}, 1),
    "one-shard-interleaved-tp": ({**ONE_SEQUENCE, **CHUNKS, "gbs": "4", "dp": "1", "tp": "2", **FULL}, 0),
}


SLOW = {
    *("1f1b-tp-middle-full", "1f1b-tp-first-replicas", "gpipe-tp-first-bf16", "interleaved-middle"),
    *("interleaved-tp-first", "one-shard-tp-first", "one-shard-fp32-tp", "one-shard-replicas"),
}
"""Each thing that they combine is in another case."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_trace_equals_estimate(name: str) -> None:
    """To the byte: named points, each pass with what the schedule does until the next, and each layer of it."""
    flags, stage = CASES[name]
    case = found(flags, stage)
    comparison, traced = case.comparison, case.traced
    assert comparison.furthest == 0
    for row in comparison.rows:
        assert row.estimated is not None, row
        assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
        for category in (Category.GATHERED_PARAMETERS, Category.COMMUNICATION_BUFFERS):
            assert row.traced.net_by[category] == row.estimated.net_by[category], row
    assert all(point.estimated == point.traced for point in comparison.points)
    assert traced.setup.net_by == static(case.program).net_by
    counts = {what: sum(one.what == what for one in traced.passes) for what in (FORWARD, LOSS, BACKWARD, REDUCE)}
    plan, chunks = plan_of(flags), int(flags.get("vpp", 1))
    count = plan.microbatches
    assert counts[FORWARD] == counts[BACKWARD] == chunks * count
    assert counts[REDUCE] == chunks
    assert counts[LOSS] == (count if stage == plan.layout.pp - 1 else 0)
    whole = [row for row in comparison.rows if row.entry.startswith("stage ")]
    assert len(whole) == sum(counts.values())
    layers = [row.entry for row in comparison.rows if row.entry.startswith("layer.")]
    names = [name for name in case.program.entries if name.startswith("layer.")]
    assert sorted(set(layers)) == sorted(names)


def test_an_embedding_alone_is_waited_for_when_it_is_sent() -> None:
    """The collective holds its input (b, s, h) until its part of the output is sent, behind the pass: there alone a
    trace holds more than the estimate, whose pass ends it. Each pass with what follows it is the same."""
    flags = {**GROUPED, "pp": "2", "gbs": "16", "tp": "2", "partition": "0,1,6"}
    case = found(flags)
    sent = 2 * 64 * 192 * 2
    apart = {(row.entry, row.phase): _differs(row) for row in case.comparison.rows if any(_differs(row))}
    assert apart == {("embedding", FORWARD): (sent, 0)}
    points = {point.name: point.traced - (point.estimated or 0) for point in case.comparison.points}
    assert {name: size for name, size in points.items() if size} == {"after the first forward": sent}
    alone = found({**flags, "tp": "1"})
    assert not alone.comparison.furthest


def _differs(row: Row) -> tuple[int, int]:
    assert row.estimated is not None
    return row.traced.net - row.estimated.net, row.traced.peak - row.estimated.peak


def test_a_stage_has_only_its_own_modules() -> None:
    flags, stage = CASES["1f1b-middle-full"]
    traced = found(flags, stage).traced
    modules = {place.module.split(".")[0] for place in traced.recording.places}
    assert modules == {"", "layers"}
    layers = {place.module.split(".")[1] for place in traced.recording.places if place.module.startswith("layers")}
    assert layers == {"1", "2"}
    assert any(place.recompute for place in traced.recording.places)
    assert {BETWEEN, REDUCE} <= {place.phase for place in traced.recording.places}


def test_json_and_back() -> None:
    flags, stage = CASES["1f1b-first"]
    traced = found(flags, stage).traced
    again = Traced.from_json(traced.to_json())
    assert again.passes == traced.passes
    assert again.entries == traced.entries
    assert fold(again.recording.events) == fold(traced.recording.events)


@pytest.mark.parametrize("stage", [-1, 3])
def test_stages_that_are_not_there(stage: int) -> None:
    with pytest.raises(PlanError) as refused:
        job_of_plan(plan_of(CASES["1f1b-first"][0]), stage=stage)
    assert str(refused.value) == f"--stage: must be from 0 to 2, not {stage}"
