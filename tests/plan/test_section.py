"""Sections of a plan, whose validators and serializers are made when they are needed."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.plan.read import read_plan

FLAGS = {"model": "llama-3-8b", "framework": "fsdp", "gpus": "8", "fsdp-code": "torchtitan", "fp8": "rowwise"}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"include": {"code", "replicas"}},
        {"exclude": {"code"}},
        {"exclude_unset": True},
        {"exclude_defaults": True},
        {"exclude_none": True},
    ],
)
@pytest.mark.parametrize("mode", ["json", "python"])
def test_a_plan_writes_a_section_as_that_writes_itself(asked: dict[str, Any], mode: str) -> None:
    plan = read_plan(None, {**FLAGS, "filter-fqns": "output,attention.wk"}).plan
    of_plan = {name: {"fsdp": value} if isinstance(value, set) else value for name, value in asked.items()}
    written = plan.model_dump(mode=mode, **of_plan)["fsdp"]
    assert written == plan.fsdp.model_dump(mode=mode, **asked)
    assert "code" in written or "exclude" in asked
