"""What two plans may differ in and still be one: nothing that an estimate sees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from memplan.estimate import check
from memplan.formats.exported import differences, settled
from memplan.plan.errors import PlanError
from memplan.plan.fields import plan_fields
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from . import deepspeed_plans, device_map_plans, megatron_deepspeed_plans, megatron_plans, torchtitan_plans
from .plans import folds

STRATEGIES = {
    "deepspeed": deepspeed_plans.plans(),
    "device-map": device_map_plans.plans(),
    "megatron": megatron_plans.plans(),
    "megatron-deepspeed": megatron_deepspeed_plans.plans(),
    "torchtitan": torchtitan_plans.plans(),
}


def with_value(plan: Plan, path: str, value: Any) -> Plan:
    """``plan`` with the field at ``path`` set."""
    section, _, name = path.rpartition(".")
    if not section:
        return plan.model_copy(update={name: value})
    return plan.model_copy(update={section: getattr(plan, section).model_copy(update={name: value})})


@pytest.mark.parametrize("framework", STRATEGIES)
def test_plans_that_are_one_have_one_estimate(framework: str) -> None:
    """A field of one plan in another: either it is a difference, or the estimate is the same to the byte."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(STRATEGIES[framework], STRATEGIES[framework], st.randoms(use_true_random=False))
    def holds(plan: Plan, other: Plan, random: Any) -> None:
        paths = [path for path in plan_fields() if path != "model" and plan.at(path) != other.at(path)]
        assume(paths)
        for path in random.sample(paths, min(4, len(paths))):
            changed = with_value(plan, path, other.at(path))
            try:
                before, after = resolve(plan), check(changed)
            except PlanError:
                continue
            if not list(differences(before, after)):
                assert folds(changed) == folds(plan), path

    holds()


def test_a_difference_is_named() -> None:
    first = resolve(read_plan("llama-3-405b-1024gpu").plan)
    second = resolve(read_plan("llama-3-405b-1024gpu", {"mbs": "2"}).plan)
    assert list(differences(first, second)) == ["batch.mbs"]


def test_settling_twice_changes_nothing() -> None:
    for name in ("llama-3-405b-1024gpu", "bigscience-104b-250k", "bert-5.1b-zero3", "gpt2-xl-4gpu"):
        plan = resolve(read_plan(name).plan)
        assert settled(settled(plan)) == settled(plan)
