"""Stages of torchtitan's Llama traced by PyTorch's own schedules, beside estimates: pass by pass, layer by layer."""

from __future__ import annotations

import pytest

from memplan.plan.errors import PlanError
from memplan.program import static
from memplan.tape import Category, fold
from memplan.trace.recording import BACKWARD, BETWEEN, FORWARD, LOSS, REDUCE
from memplan.trace.torchtitan_job import job_of_torchtitan
from memplan.trace.traced import Traced

from .titan_cases import GROUPED, ONE_SEQUENCE, WIDE_HEADS, found, plan_of

FULL, OPERATORS = {"recompute": "full"}, {"recompute-per-operator": "true"}
THREE = {"layers": "3", "pp": "3", "gbs": "24"}
CASES: dict[str, tuple[dict[str, str], int]] = {
    "1f1b-first": ({**GROUPED, **THREE, "gbs": "32"}, 0),
    "1f1b-middle-full": ({**GROUPED, **THREE, "gbs": "32", **FULL}, 1),
    "1f1b-last-operators": ({**WIDE_HEADS, **THREE, "gbs": "36", **OPERATORS}, 2),
    "1f1b-first-every-second": ({**GROUPED, "layers": "4", "pp": "2", "gbs": "16", **FULL, "recompute-every": "2"}, 0),
    "gpipe-first-full": ({**ONE_SEQUENCE, **THREE, "gbs": "8", "schedule": "gpipe", **FULL}, 0),
    "gpipe-middle": ({**GROUPED, **THREE, "schedule": "gpipe", "fsdp-replicas": "2"}, 1),
    "gpipe-last-outputs": ({**GROUPED, **THREE, "schedule": "gpipe", "return-outputs": "true"}, 2),
    "interleaved-first": ({**GROUPED, "layers": "4", "pp": "2", "vpp": "2", "gbs": "24"}, 0),
    "interleaved-middle": ({**ONE_SEQUENCE, "layers": "6", "pp": "3", "vpp": "2", "gbs": "12", **FULL}, 1),
    "interleaved-last-bf16": (
        {**GROUPED, "layers": "4", "pp": "2", "vpp": "2", "gbs": "16", "fsdp-reduce": "bf16", "ends-apart": "true"},
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
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
    assert plan.batch.gbs is not None
    microbatches = plan.batch.gbs // (plan.batch.mbs * 4)
    assert counts[FORWARD] == counts[BACKWARD] == chunks * microbatches
    assert counts[REDUCE] == chunks
    assert counts[LOSS] == (microbatches if stage == plan.layout.pp - 1 else 0)
    whole = [row for row in comparison.rows if row.entry.startswith("stage ")]
    assert len(whole) == sum(counts.values())
    layers = {row.entry for row in comparison.rows if row.entry.startswith("layer.")}
    assert len(layers) == plan.model.layers // plan.layout.pp


def test_a_stage_has_only_its_own_modules() -> None:
    flags, stage = CASES["1f1b-middle-full"]
    traced = found(flags, stage).traced
    modules = {place.module.split(".")[0] for place in traced.recording.places}
    assert modules == {"", "layers"}
    layers = {place.module.split(".")[1] for place in traced.recording.places if place.module.startswith("layers")}
    assert layers == {"1"}
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
        job_of_torchtitan(plan_of(CASES["1f1b-first"][0]), stage)
    assert str(refused.value) == f"--stage: must be from 0 to 2, not {stage}"
