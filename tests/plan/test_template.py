"""The commented plan that ``memplan init`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.plan.fields import plan_fields
from memplan.plan.read import read_plan
from memplan.plan.write import plan_template


def test_it_reads_back_as_the_plan_of_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_template({"model": "gpt2"}))
    assert read_plan(str(tmp_path / "plan.yaml")).plan == read_plan(None, {"model": "gpt2"}).plan


@pytest.mark.parametrize(
    "flags",
    [
        {
            "model": "llama-3-8b",
            "framework": "megatron",
            "tp": "4",
            "layers": "12",
            "headroom": "5%",
            "sequence-parallel": "true",
        },
        {
            "model": "gpt2",
            "framework": "single",
            "partition": "type:embed|transformer",
            "cutoffs": "10,20",
            "code": "2020",
        },
        {
            "model": "gpt2",
            "framework": "device-map",
            "device-map": "{0: 0-5, 1: 6-11}",
            "model-name": "a: #b",
            "capacity": "16GiB",
        },
    ],
)
def test_values_that_were_given_are_set(flags: dict[str, str], tmp_path: Path) -> None:
    by_flag = {field.flag: field.path for field in plan_fields().values()}
    (tmp_path / "plan.yaml").write_text(plan_template({by_flag[f"--{name}"]: text for name, text in flags.items()}))
    assert read_plan(str(tmp_path / "plan.yaml")).plan == read_plan(None, flags).plan


def test_every_field_is_in_it_with_its_description() -> None:
    text = plan_template({"model": "gpt2"}).lower()
    for field in plan_fields().values():
        if field.section != "model":
            assert f"{field.name}:" in text
            assert field.description.lower() in text
