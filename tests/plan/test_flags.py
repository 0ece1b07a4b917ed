"""Fields of a plan as flags: what is typed makes the plan that was meant."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from memplan.plan.fields import flags_between, flags_of
from memplan.plan.read import read_plan
from memplan.search.point import changed

JOB = {"model": "llama-3-8b", "framework": "megatron", "gpus": "8", "gpu": "h100-80gb", "gbs": "16"}
CHANGES: list[dict[str, Any]] = [
    {"batch.mbs": 2, "batch.accumulation": None},
    {"layout.tp": 2, "layout.pp": 4, "layout.sequence_parallel": True, "pipeline.layout": "Ett|(t*4|)*2,tL"},
    {"recompute.mode": "selective", "recompute.modules": ("core_attn", "mlp")},
    {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
    {"hardware.gpu": "h200", "hardware.capacity": None},
    {"loss.kind": "vocab-parallel", "headroom": "2%"},
]


def typed(words: str, given: dict[str, str]) -> dict[str, str | tuple[str, ...]]:
    """As a command line takes them."""
    found: dict[str, str | tuple[str, ...]] = dict(given)
    parts = shlex.split(words)
    for flag, value in zip(parts[::2], parts[1::2], strict=True):
        known = found.get(flag[2:], ())
        known = (known,) if isinstance(known, str) else known
        found[flag[2:]] = (*known, value) if flag == "--env" else value
    return found


@pytest.mark.parametrize("fields", CHANGES, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("more", [{}, {"capacity": "70GiB", "accumulation": "2", "gbs": "", "env": "NCCL_P2P=0"}])
def test_flags_beside_those_of_the_plan_make_the_other(fields: dict[str, Any], more: dict[str, str]) -> None:
    given = {name: value for name, value in {**JOB, **more}.items() if value}
    plan = read_plan(None, given).plan
    if "environment" in fields:
        fields = {"environment": {**plan.environment, **fields["environment"]}}
    other = changed(plan, fields)
    for words in (flags_of(plan, fields), flags_between(plan, other)):
        assert read_plan(None, typed(words, given)).plan == other


def test_what_the_plan_says_already_is_left_out() -> None:
    plan = read_plan(None, JOB).plan
    assert flags_of(plan, {"batch.gbs": 16, "layout.tp": 2}) == "--tp 2"
    assert flags_between(plan, plan) == ""
    assert flags_between(plan, plan, ("framework",)) == "--framework megatron"
