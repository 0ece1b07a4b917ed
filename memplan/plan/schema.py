"""The JSON Schema of a plan as people write it: with shorthands, references to models, and sizes with units."""

from __future__ import annotations

from typing import Any

from .fields import Kind, plan_fields, sections
from .plan import Plan

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def plan_schema() -> dict[str, Any]:
    """The schema that ships as ``plan.schema.json``."""
    schema = Plan.model_json_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    for name, section in sections().items():
        if section.__name__ not in definitions:  # a section of a plan
            definitions[section.__name__] = section.model_json_schema()
            properties[name] = {"$ref": f"#/$defs/{section.__name__}", **properties[name]}
        definition = definitions[section.__name__]
        definition.pop("required", None)
        definition.pop("title", None)
        for field, value in definition["properties"].items():
            definition["properties"][field] = _as_written(f"{name}.{field}", value)
        shorthand = getattr(section, "shorthand", None)
        if shorthand is not None:
            reference = {"$ref": f"#/$defs/{section.__name__}"}
            properties[name] = {"anyOf": [definition["properties"][shorthand], reference]}
    for name in [name for name in properties if name in plan_fields() and name != "model"]:
        properties[name] = _as_written(name, properties[name])
    base = {"type": "string", "description": plan_fields()["model"].description}
    definitions["ModelSpec"]["properties"] = {"base": base, **definitions["ModelSpec"]["properties"]}
    properties["model"] = {"anyOf": [base, {"$ref": "#/$defs/ModelSpec"}]}
    extends = {
        "type": "string",
        "description": "plan that this plan extends: a path, or the name of a built-in example",
    }
    schema["properties"] = {"$schema": {"type": "string"}, "extends": extends, **properties}
    schema.pop("required", None)
    schema["$defs"] = dict(sorted(definitions.items()))
    return {"$schema": _DRAFT, **_without_titles(schema), "title": "memplan plan"}


def _as_written(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """The schema of one field with the forms that reading it accepts besides its own."""
    field = plan_fields()[path]
    value = {key: item for key, item in value.items() if key not in ("flag", "title")}
    others: list[dict[str, Any]] = []
    if field.kind in (Kind.SIZE, Kind.INTEGERS):
        others = [{"type": "string"}]
    elif path == "headroom":
        others = [{"type": "integer", "minimum": 0}]
    match field.kind:
        case Kind.CHOICE if any(choice.isdigit() for choice in field.choices):
            others = [{"type": "integer", "enum": [int(choice) for choice in field.choices if choice.isdigit()]}]
        case Kind.DEVICE_MAP:
            layers = {"type": ["array", "string", "integer"], "items": {"type": ["integer", "string"]}}
            devices = {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": layers}
            modules = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
            value, others = {"description": field.description}, [devices, modules, {"type": "null"}]
        case Kind.VARIABLES:
            value["additionalProperties"] = {"type": ["string", "number", "boolean"]}
    if not others:
        return value
    about: dict[str, Any] = {key: value.pop(key) for key in ("description", "default") if key in value}
    return {**about, "anyOf": [*value.pop("anyOf", [value] if value else []), *others]}


def _without_titles(value: Any) -> Any:
    """``value`` without the titles that pydantic adds, and, as its later releases do, without ``allOf`` of one."""
    if isinstance(value, dict):
        if len(value.get("allOf", ())) == 1:
            value = {**{key: item for key, item in value.items() if key != "allOf"}, **value["allOf"][0]}
        kept = {key: item for key, item in value.items() if not (key == "title" and isinstance(item, str))}
        return {key: _without_titles(item) for key, item in kept.items() if key != "flag"}
    return [_without_titles(item) for item in value] if isinstance(value, list) else value
