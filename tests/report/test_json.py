"""The JSON that others build on (``memplan/report/json.py``): names, order, integers, nulls."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hypothesis import given, settings

from memplan import __version__
from memplan.plan.plan import Plan
from memplan.report.json import comparison_to_json, to_json
from memplan.result import Estimate

from .fabricated import PLAN, bigscience, fitting, single
from .strategies import estimates

TOP = ["schema", "memplan", "plan", "fits", "verdict", "retries_per_iteration", "does_not_fit", "capacity_bytes"]
TOP += ["headroom_bytes", "peak_bytes", "peak_stage", "stages", "warnings", "assumptions"]
STAGE = ["stage", "ranks", "modules", "parameters", "requested_bytes", "allocated_bytes", "reserved_bytes"]
STAGE += [
    "device_bytes",
    "device_range_bytes",
    "device_reading_range_bytes",
    "verdict",
    "retries_per_iteration",
    "static_bytes",
    "peak",
    "breakdown",
    "beyond_allocated",
    "host_bytes",
    "nvme_bytes",
]
STAGE += ["moments"]
PEAK = ["moment", "phase", "module", "microbatch", "upper_bound"]
BREAKDOWN = ["parameters", "main_parameters", "gradients", "optimizer_states", "buffers", "inputs", "activations"]
BREAKDOWN += ["logits", "temporaries", "gathered_parameters", "communication_buffers", "workspaces", "block_rounding"]
BEYOND = ["allocator_cache", "cuda_context", "nccl", "other"]
MOMENTS = ["initialisation", "steady", "evaluation", "checkpoint", "first_iteration_device"]


def assert_contract(read: dict[str, Any]) -> None:
    """Keys and their order, as published; and that the sums hold which are promised."""
    for stage in read["stages"]:
        assert list(stage) == STAGE
        assert list(stage["peak"]) == PEAK
        assert list(stage["breakdown"]) == BREAKDOWN
        assert list(stage["beyond_allocated"]) == BEYOND
        assert list(stage["moments"]) == MOMENTS
        allocated = stage["allocated_bytes"]
        assert sum(stage["breakdown"].values()) == (stage["requested_bytes"] if allocated is None else allocated)
        if stage["device_bytes"] is not None:
            beyond = stage["beyond_allocated"]
            assert stage["device_bytes"] == allocated + sum(part or 0 for part in beyond.values())
    for notice in read["warnings"]:
        assert list(notice) == ["code", "message"]


@settings(deadline=None)
@given(estimates())
def test_any_estimate_follows_the_contract(estimate: Estimate) -> None:
    read = json.loads(json.dumps(to_json(estimate)))
    assert list(read) == [*TOP, *(["ways_out"] if read["fits"] is False else [])]
    assert (read["schema"], read["memplan"]) == (1, __version__)
    assert_contract(read)


def test_figures_are_the_estimates() -> None:
    estimate = bigscience()
    read = to_json(estimate)
    assert (read["fits"], read["peak_stage"], read["peak_bytes"]) == (False, 31, estimate.stages[31].device)
    assert read["stages"][31]["ranks"] == [124, 125, 126, 127]
    assert read["stages"][31]["peak"]["module"] == "float16_to_fp32"
    assert read["stages"][31]["moments"]["evaluation"] is None


def test_the_plan_can_be_read_back() -> None:
    assert Plan.model_validate(json.loads(json.dumps(to_json(bigscience())["plan"]))) == PLAN


def test_what_cannot_be_derived_is_null() -> None:
    read = to_json(single())
    assert read["fits"] is read["capacity_bytes"] is None
    stage = read["stages"][0]
    assert stage["allocated_bytes"] is stage["reserved_bytes"] is stage["device_bytes"] is None
    assert set(stage["beyond_allocated"].values()) == {None}
    assert stage["peak"]["microbatch"] is None


def test_variants_carry_a_name_and_otherwise_the_same_keys() -> None:
    read = json.loads(json.dumps(comparison_to_json(["a", "b"], [bigscience(), fitting()])))
    assert list(read) == ["schema", "memplan", "variants"]
    for variant, name in zip(read["variants"], "ab", strict=True):
        assert list(variant) == ["name", *TOP[2:]]
        assert variant["name"] == name
        assert_contract(variant)


def test_json_does_without_rich() -> None:
    check = "import sys, memplan.report.json; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
