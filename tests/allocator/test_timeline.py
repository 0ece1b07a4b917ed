"""What a stage holds event by event, beside the estimate that knows only its peak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from memplan.allocator.timeline import MOST_POINTS
from memplan.estimate import estimate, fold, timelines
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import NOTHING, Category

SMALL = {"model": "llama-3-8b", "layers": "8", "seq": "1024", "gbs": "32", "gpu": "h100-80gb"}
PLANS = {
    "single": {"framework": "single", "gbs": "4"},
    "ddp": {"framework": "ddp", "gpus": "2", "optimizer": "adam8bit"},
    "fsdp": {"framework": "fsdp", "gpus": "4", "recompute": "full"},
    "fsdp pipeline": {
        "framework": "fsdp",
        "gpus": "4",
        "pp": "4",
        "vpp": "2",
        "fsdp-code": "torchtitan",
        "gbs": "1024",
    },
    "tied": {"model": "gpt2", "layers": "2", "seq": "128", "gbs": "1"},
    "zero 3": {"framework": "deepspeed", "gpus": "4", "zero": "3"},
    "megatron": {"framework": "megatron", "gpus": "8", "tp": "2", "pp": "4", "vpp": "2", "zero": "1"},
    "megatron, long": {"framework": "megatron", "gpus": "2", "pp": "2", "gbs": "4096"},
    "megatron-deepspeed": {"framework": "megatron-deepspeed", "gpus": "4", "pp": "4", "zero": "1", "model": "gpt2-xl"},
    "device map": {"framework": "device-map", "gpus": "2", "gbs": "1"},
}


TIED = ("gpt2", "qwen3-0.6b", "llama-3.2-1b", "bert-large", "opt-125m")
SHARDING = {"single": "0", "ddp": "0", "fsdp": "0", "deepspeed": "2", "megatron": "0", "megatron-deepspeed": "0"}


@pytest.mark.parametrize("model", TIED)
@pytest.mark.parametrize("framework", SHARDING)
@given(seq=st.integers(1, 512), batches=st.integers(1, 3), fp32=st.booleans())
@settings(max_examples=3, deadline=None)
def test_without_workspaces_and_rounding_a_peak_is_no_more_than_is_requested(
    model: str, framework: str, seq: int, batches: int, fp32: bool
) -> None:
    """Tied weights' gradients, too: the sum that a GPU makes of them, and a fake trace does not, is a workspace."""
    gpus = 1 if framework == "single" else 2
    flags = {"framework": framework, "zero": SHARDING[framework], "gpus": str(gpus), "gbs": str(gpus * batches)}
    shape = {"model": model, "layers": "2", "seq": str(seq), "dtype": "fp32" if fp32 else "bf16"}
    try:
        found = estimate(read_plan(None, {**shape, **flags}).plan)
    except PlanError:  # no recipe of this model in this framework
        return
    for stage in found.stages:
        comparable = sum(stage.breakdown) - stage.of(Category.WORKSPACES) - stage.of(Category.BLOCK_ROUNDING)
        assert sum(stage.breakdown) == stage.allocated
        assert comparable <= stage.requested


@pytest.mark.parametrize("case", PLANS)
def test_the_contents_of_a_peak_are_its_breakdown(case: str) -> None:
    found = estimate(read_plan(None, {**SMALL, **PLANS[case]}).plan)
    alone = timelines(found, contents=False)
    for stage, line, without in zip(found.stages, timelines(found), alone, strict=True):
        assert (without.points, without.contents) == (line.points, ())
        by = list(NOTHING)
        for live in line.contents:
            by[live.category] += live.bytes
        assert by[: Category.BLOCK_ROUNDING] == list(stage.breakdown[: Category.BLOCK_ROUNDING])
        assert all(live.tensor.name for live in line.contents)
        assert len(line.points) <= MOST_POINTS + 1
        assert [point.event for point in line.points] == sorted({point.event for point in line.points})
        assert line.points[-1].event <= line.events
        # Without workspaces it is the fold's peak; with them no less.
        highest = max(sum(point.by) for point in line.points)
        assert stage.requested <= highest <= stage.allocated + stage.breakdown[Category.WORKSPACES]
        assert 1 <= line.shown <= line.microbatches


def test_one_stage_of_many() -> None:
    found = estimate(read_plan(None, {**SMALL, **PLANS["fsdp pipeline"]}).plan)
    (line,) = timelines(found, (2,))
    assert line.stage == 2
    assert {point.phase for point in line.points} == {"forward", "backward", "step"}
    names = {(point.live.tensor.name, point.live.tensor.module) for point in line.points}
    assert any(module.startswith("layer.") for _, module in names)


def test_an_iteration_ends_with_what_is_static() -> None:
    """Of a short one every event has its point."""
    plan = read_plan(None, {"model": "gpt2", "layers": "1", "seq": "64", "framework": "single"}).plan
    (line,) = timelines(estimate(plan))
    (folded,) = fold(resolve(plan))
    last = line.points[-1].by
    assert line.events == len(line.points)
    assert sum(last) - last[Category.WORKSPACES] == folded.static
