"""Stages of Megatron-Core whose first or last layers are empty (Llama-Nemotron's): they hand on what they are given."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.result import StageEstimate

BLOCK, NONE = "8:5376", "none:none"
JOB = {
    "model": "llama-3.1-nemotron-ultra-253b", "framework": "megatron", "gpu": "h100-80gb", "hidden": "1024",
    "heads": "16", "kv-heads": "8", "head-dim": "64", "ffn": "5376", "vocab": "32000", "seq": "1024", "gpus": "2",
    "gbs": "16", "pp": "2",
}  # fmt: skip


def stages(blocks: list[str], **more: str) -> tuple[StageEstimate, ...]:
    layers = {"layers": str(len(blocks)), "layer-blocks": ",".join(blocks)}
    return estimate(read_plan(None, {**JOB, **layers, **more}).plan).stages


def readings(stage: StageEstimate) -> tuple[object, ...]:
    return stage.requested, stage.allocated, stage.reserved, stage.static, stage.breakdown


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_empty_layer_takes_nothing_wherever_it_is(chunks: int) -> None:
    """First or last in its stage or chunk, where it is given what a schedule keeps: the tensors are those of the same
    layers in another order."""
    more = {"vpp": "2"} if chunks == 2 else {}
    middle, first, last = ([BLOCK, NONE, BLOCK], [NONE, BLOCK, BLOCK], [BLOCK, BLOCK, NONE])
    expected = [*map(readings, stages(2 * chunks * middle, **more))]
    for other in (first, last):
        assert [*map(readings, stages(2 * chunks * other, **more))] == expected


def test_several_empty_layers_begin_and_end_a_stage() -> None:
    between = stages(2 * [BLOCK, NONE, NONE, BLOCK])
    around = stages(2 * [NONE, BLOCK, BLOCK, NONE])
    assert [*map(readings, around)] == [*map(readings, between)]


def test_a_recomputed_empty_layer_keeps_nothing_of_a_micro_batch() -> None:
    """``make_viewless_tensor`` makes a tensor of one element, and its input's gradient is a copy that lives while the
    layer before runs: where it begins a stage, no more than that copy comes on top of a stage without it."""
    hidden = 1024 * 1024 * 2
    first, without = (stages(blocks, recompute="full") for blocks in (2 * [NONE, BLOCK, BLOCK], 2 * [BLOCK, BLOCK]))
    for one, other in zip(first, without, strict=True):
        assert 0 <= one.requested - other.requested <= hidden + 512
        assert one.static == other.static
