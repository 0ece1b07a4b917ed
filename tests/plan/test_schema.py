"""The JSON Schema that ships is the plan's own."""

from __future__ import annotations

import json
from pathlib import Path

import memplan
from memplan.plan.fields import plan_fields, sections
from memplan.plan.schema import plan_schema

SHIPPED = Path(memplan.__file__).parent / "plan.schema.json"


def test_the_file_that_ships_is_what_the_models_say() -> None:
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == plan_schema(), "memplan schema > memplan/plan.schema.json"


def test_every_field_is_in_it_with_its_description() -> None:
    schema = plan_schema()
    for field in plan_fields().values():
        owner = schema["$defs"][sections()[field.section].__name__] if field.section else schema
        found = owner["properties"][field.name]
        if field.path != "model":
            assert found["description"] == field.description


def test_shorthands_are_in_it() -> None:
    properties = plan_schema()["properties"]
    assert {"$ref": "#/$defs/ModelSpec"} in properties["model"]["anyOf"]
    assert "adam8bit" in properties["optimizer"]["anyOf"][0]["enum"]
    assert "required" not in plan_schema()["$defs"]["ModelSpec"]
    assert "extends" in properties
