"""What a stage holds event by event, beside the estimate that knows only its peak."""

from __future__ import annotations

import pytest

from memplan.allocator.timeline import MOST_POINTS
from memplan.estimate import estimate, fold, timelines
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
    "zero 3": {"framework": "deepspeed", "gpus": "4", "zero": "3"},
    "megatron": {"framework": "megatron", "gpus": "8", "tp": "2", "pp": "4", "vpp": "2", "zero": "1"},
    "megatron, long": {"framework": "megatron", "gpus": "2", "pp": "2", "gbs": "4096"},
    "megatron-deepspeed": {"framework": "megatron-deepspeed", "gpus": "4", "pp": "4", "zero": "1", "model": "gpt2-xl"},
    "device map": {"framework": "device-map", "gpus": "2", "gbs": "1"},
}


@pytest.mark.parametrize("case", PLANS)
def test_the_contents_of_a_peak_are_its_breakdown(case: str) -> None:
    found = estimate(read_plan(None, {**SMALL, **PLANS[case]}).plan)
    for stage, line in zip(found.stages, timelines(found), strict=True):
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
