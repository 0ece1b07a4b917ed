"""Pydantic checks types and ranges; here its findings become the one line that a user reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..frameworks import HINTS
from .errors import ABSENT, Node, PlanError, nearest, together
from .fields import Kind, PlanField, plan_fields, sections
from .plan import Plan
from .sizes import ALLOWED
from .spec import ModelSpec
from .spellings import plain

Model = TypeVar("Model", bound=BaseModel)

_MOST_DIGITS = 300
MOST_LISTED = 32
"""Fields of a section that an error names."""
_WORDS_FOR_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
    "too_long": ("max_length", "a list of at most"),
    "string_too_short": ("min_length", "text of at least"),
    "string_too_long": ("max_length", "text of at most"),
}


def validated_plan(plan: Node) -> Plan:
    """``plan`` as a value of the type, or all that is wrong in it."""
    return _validated(Plan, plan, "")


def validated_spec(spec: Node) -> ModelSpec:
    """``spec`` as a value of the type, or all that is wrong in it."""
    return _validated(ModelSpec, spec, "model")


def _validated(model: type[Model], node: Node, prefix: str) -> Model:
    try:
        # JSON mode is strict about types, and still takes a list for a tuple and "0" for a key that is a number.
        return model.model_validate_json(json.dumps(node.plain()), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=True)
    except ValueError as error:
        raise node.lacks(prefix, f"cannot be read: {error}") from None
    if found[0]["type"] == "json_invalid":
        raise _not_text(node, prefix) or node.lacks(prefix, "is not valid Unicode text")
    errors: dict[str, PlanError] = {}  # a union finds one for each of its branches
    for item in found:
        wrong = _translated(item, prefix)
        if item["type"] != "missing":
            errors.setdefault(wrong.field, _listed_once(wrong, errors))
    missing = [_path(prefix, item["loc"]) for item in found if item["type"] == "missing"]
    if "model.name" in missing and "model.family" in missing:
        problem = (
            "is missing: name one (`memplan models` lists them), whose sizes those given replace: --model llama-3-8b"
        )
        errors["model"] = PlanError("model", ABSENT, problem)
    elif missing:
        first = _missing(missing[0])
        others = f"; so {'is' if len(missing) == 2 else 'are'} {', '.join(missing[1:])}" if missing[1:] else ""
        errors[first.field] = first.but(problem=first.problem + others)
    origins = dict(node.origins(prefix))
    raise together(error.located(origins) for error in errors.values())


def _not_text(node: Node, path: str) -> PlanError | None:
    """The first value at or below ``path`` with half a character in it, as names that are not UTF-8 have."""
    if isinstance(node.value, str) and any("\ud800" <= character <= "\udfff" for character in node.value):
        return node.wrong(path, "is not valid Unicode text")
    items = enumerate(node.value) if isinstance(node.value, list) else node.mapping.items()
    found = (_not_text(item, f"{path}.{key}" if path else str(key)) for key, item in items)
    return next((error for error in found if error is not None), None)


def _translated(found: Mapping[str, Any], prefix: str) -> PlanError:
    path = _path(prefix, found["loc"])
    kind, value = found["type"], found["input"]
    if kind == "missing":
        return _missing(path)
    if kind == "extra_forbidden":
        return _unknown(path)
    field = plan_fields().get(path)
    if kind == "literal_error" and field is not None:
        hint = HINTS.get(plain(str(value))) if path == "framework" else None
        problem = f"must be {field.allowed}" + (f"; {hint}" if hint else "")
        return PlanError(path, value, problem, known=() if hint else field.choices)
    if kind in _WORDS_FOR_LIMITS:
        key, words = _WORDS_FOR_LIMITS[kind]
        limit = found["ctx"][key]
        text = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
        return PlanError(path, value, f"must be {words} {text}")
    if kind in ("model_type", "model_attributes_type"):
        return PlanError(path, value, f"must be a mapping of {', '.join(sections()[path].model_fields)}")
    return PlanError(path, value, _wrong_type(kind, value, field, found["msg"]))


def _path(prefix: str, location: tuple[str | int, ...]) -> str:
    """Dotted path of an error; what a union adds to tell its branches apart is left out."""
    path = prefix
    for part in location:
        if part == "[key]":
            break
        longer = f"{path}.{part}" if path else str(part)
        if plan_fields().get(path) is not None and path not in ("model", "device_map", "environment", "versions"):
            break
        path = longer
    return path


def _missing(path: str) -> PlanError:
    if path == "model":
        problem = "is missing: name one (`memplan models` lists them), as --model gpt2-xl or `model: gpt2-xl` in a plan"
        return PlanError(path, ABSENT, problem)
    field = plan_fields().get(path)
    return PlanError(path, ABSENT, f"is missing: {field.description if field else 'it has no default'}")


def _unknown(path: str) -> PlanError:
    section, _, name = path.partition(".")
    if not name or section not in ("model", *sections()):
        section, name = "", path
    if section == "model":
        known = ["base", *ModelSpec.model_fields]
    else:
        known = list(sections()[section].model_fields if section else [*Plan.model_fields, "extends"])
    elsewhere = [other for other in plan_fields() if other.rpartition(".")[2] == name]
    if elsewhere:
        return PlanError(path, ABSENT, f"is not a field here; write {' or '.join(elsewhere)}")
    listed = f"{_FIELDS_ARE}{', '.join(known)}" if len(known) <= MOST_LISTED else ""
    others = "" if listed or nearest(name, known) else "; `memplan schema` has them all"
    return PlanError(path, ABSENT, f"is not a field{listed}{others}", known=known)


_FIELDS_ARE = "; the fields are "


def _listed_once(wrong: PlanError, before: Mapping[str, PlanError]) -> PlanError:
    """``wrong`` without the fields that there are, where one ``before`` lists the same."""
    problem, _, listed = wrong.problem.partition(_FIELDS_ARE)
    again = listed and any(one.problem.endswith(listed) for one in before.values())
    return wrong.but(problem=problem) if again else wrong


RELEASE = r"'^\d{1,3}\.\d{1,3}(\.\d{1,3})?$'"
"""The pattern of a release, as pydantic's message shows it."""


def _wrong_type(kind: str, value: object, field: PlanField | None, message: str) -> str:
    if field is not None and field.kind is Kind.SIZE:
        return f"{ALLOWED}{_hint(value)}"
    if kind.startswith("int_") or (kind == "float_type" and isinstance(value, str)):
        return f"must be a {'whole ' if kind.startswith('int_') else ''}number{_hint(value)}"
    if kind == "string_pattern_mismatch" and RELEASE in message:
        return "must be a release such as 2.6"
    if kind == "string_pattern_mismatch" and field is not None and field.kind is Kind.TEXT:
        return f"must say {field.description}"
    if kind.startswith("bool_"):
        return "must be true or false"
    if kind == "float_type":
        return "must be a number"
    if field is not None:
        return f"must be {field.allowed}"
    if kind == "string_type":
        return "must be text; put it in quotes"
    return message[:1].lower() + message[1:]


def _hint(value: object) -> str:
    """How to write the whole number that was probably meant."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"; write {int(value)}"
    if not isinstance(value, str):
        return ""
    plain = value.replace("_", "").replace(",", "").strip()
    if plain.isascii() and plain.isdigit() and len(plain) < _MOST_DIGITS:
        if plain == value and not plain.startswith("0"):
            return f"; write {plain} without quotes"
        octal = " (a leading zero would be octal to some readers)" if plain.startswith("0") else ""
        return f"; write {int(plain)}{octal}"
    return ""
