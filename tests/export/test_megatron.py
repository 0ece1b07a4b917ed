"""Plans as Megatron-LM's arguments."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from memplan.export.megatron import TARGET
from memplan.plan.plan import Plan

from .megatron_plans import plans
from .plans import round_trip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(plans())
def test_what_is_exported_reads_back_as_the_plan(plan: Plan) -> None:
    round_trip(plan, TARGET)
