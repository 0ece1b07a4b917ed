"""Steps of hybrids: what their kernels do, and how long it takes."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time import step_time, work_of
from memplan.search.time.shape import KINDS, model_flops, shape_of


def plan(model: str = "nemotron-3-nano-30b-a3b", pattern: str = "MEM*E", **more: Any) -> ResolvedPlan:
    flags = {"model": model, "layer-pattern": pattern, "framework": "megatron", "gpu": "h100-80gb", "seq": "8192"}
    return resolve(read_plan(None, {**flags, "gbs": "8", "zero": "1", **more}).plan)


@pytest.mark.parametrize(
    ("model", "pattern", "more"),
    [
        ("nemotron-h-8b", "M-M*-", {"tp": "2", "gpus": "2", "sequence-parallel": "true"}),
        ("nemotron-3-nano-30b-a3b", "MEM*E", {"gpus": "8", "ep": "8"}),
        ("nemotron-3-super-120b-a12b", "ME", {"gpus": "8", "ep": "8"}),
        ("mamba2-2.7b", "MM", {"gpus": "1"}),
    ],
)
def test_kernels_do_what_the_model_needs(model: str, pattern: str, more: dict[str, str]) -> None:
    """FLOPs of the recipes' products, of a rank and micro-batch, beside Megatron-LM's formula: its 7 FLOPs of a scan
    for each inner feature and state stand for products of chunks."""
    made = plan(model, pattern, **more)
    entries = shape_of(made).entries
    layers = sum(pattern.count(kind) * own.flops for kind, (own, _) in zip(KINDS, entries.kinds, strict=True))
    ranks = made.layout.tp * made.batch.gbs
    assert (layers + entries.head.flops) * ranks == pytest.approx(model_flops(made), rel=0.04)


def test_time_is_that_of_each_kind() -> None:
    once, twice = (step_time(plan(pattern=pattern, gpus="8", ep="8")) for pattern in ("ME", "MEME"))
    thrice = step_time(plan(pattern="MEMEME", gpus="8", ep="8"))
    assert thrice.compute - twice.compute == pytest.approx(twice.compute - once.compute, rel=1e-6)
    again = step_time(plan(pattern="MEME", gpus="8", ep="8", recompute="full"))
    assert again.recompute == pytest.approx((twice.compute - once.compute) * 2 / 3, rel=0.3)
    assert again.hfu > again.mfu


def test_stages_hold_what_the_pattern_says() -> None:
    made = plan("nemotron-h-8b", "M-M*-M", pp="2", gpus="2", recompute="full", **{"recompute-method": "block"})
    assert [chunk.kinds for stage in work_of(made) for chunk in stage] == [
        ((2, 2), (0, 0), (1, 1), (0, 0), (0, 0)),
        ((1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
    ]
