"""A plan as the YAML that reads back as the same plan: what is not a default, each field under its description.

A commented plan to start from, written from the fields' own descriptions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .fields import MODEL, Kind, PlanField, plan_fields, sections
from .library import learned_models, model_specs
from .models import load_spec
from .plan import Plan
from .read import Source, build_plan
from .resolve import FOLLOW, resolve
from .spec import ModelSpec
from .text import parse_yaml
from .traced_spec import TracedSpec

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:|%,+-]*")
_HEAD = """\
# A plan for memplan. Estimate it with: memplan estimate {name}
# What is commented out has the default that its comment names. Every field has a flag: {flag} overrides {field}.
# For completion in an editor: memplan schema > plan.schema.json, and here the line
# "yaml-language-server: $schema=plan.schema.json" as a comment.
"""


def plan_template(values: Mapping[str, str], name: str = "plan.yaml") -> str:
    """YAML of a plan with every field of it: those in ``values`` (by path) set, the others at their defaults.

    The model's own sizes are left to its spec.
    """
    fields = [field for field in plan_fields().values() if field.section != "model"]
    lines = [_HEAD.format(name=name, flag="--tp 8", field="layout.tp")]
    model = next(field for field in fields if field.kind is Kind.MODEL)
    lines += _described(model, values, "")
    architecture = {path: text for path, text in values.items() if path.startswith("model.")}
    if architecture:
        lines[-1] = "model:"
        lines += [f"  base: {quoted(values[model.path])}"]
        lines += [f"  {path.partition('.')[2]}: {quoted(text)}" for path, text in architecture.items()]
    for section in ("", *[name for name in sections() if name != "model"]):
        if section:
            lines += ["", f"{section}:"]
        for field in [field for field in fields if field.section == section and field is not model]:
            lines += _described(field, values, "  " if section else "")
    return "\n".join(lines) + "\n"


def _described(field: PlanField, values: Mapping[str, str], indent: str) -> Iterator[str]:
    yield f"{indent}# {comment_of(field)}"
    if field.path in values:
        yield f"{indent}{field.name}: {quoted(values[field.path])}"
    elif field.default is None or field.default == {} or field.path in FOLLOW:
        yield f"{indent}# {field.name}:"
    else:
        yield f"{indent}{field.name}: {_default(field.default)}"


def comment_of(field: PlanField) -> str:
    """What ``field`` is, as a sentence for a comment."""
    text = field.description[:1].upper() + field.description[1:]
    return f"{text}. One of {', '.join(field.choices)}." if field.choices else f"{text}."


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def quoted(text: str) -> str:
    """``text`` as a YAML scalar that reads back as it is; a mapping stays one."""
    if text.startswith("{") or (_PLAIN.fullmatch(text) and not text.endswith(":")):
        return text
    return json.dumps(text)


# -- write ---------------------------------------------------------------------------------------------


DERIVED = ("head_dim", "kv_heads", "ffn")
"""Sizes of a model that follow from others where a plan does not name them (``models.complete_model``)."""


def plan_yaml(plan: Plan, head: Sequence[str] = ()) -> str:
    """YAML of ``plan`` (before its defaults are filled in) with the lines ``head`` as comments in front.

    Fields that somebody set to their own default are written where that makes another plan than leaving them out.
    """
    text = _written(plan, head, explicit=False)
    if resolve(_read_back(text)) != resolve(plan):
        text = _written(plan, head, explicit=True)
    return text


def _read_back(text: str) -> Plan:
    from .normalise import normalised

    return build_plan(Source(normalised(parse_yaml(text, "plan.yaml")), Path()), {}, traced=True).plan


def _written(plan: Plan, head: Sequence[str], *, explicit: bool) -> str:
    lines = [f"# {line}".rstrip() for line in head]
    lines += ["", *_model(plan.model)]
    for section in ("", *[name for name in sections() if name != "model"]):
        values = _values(getattr(plan, section) if section else plan, section, explicit)
        if section and values:
            lines += ["", f"{section}:"]
        for path, value in values.items():
            field, indent = plan_fields()[path], "  " if section else ""
            lines += [f"{indent}# {comment_of(field)}", f"{indent}{field.name}: {_as_yaml(value)}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _values(section: Any, name: str, explicit: bool) -> dict[str, Any]:
    """Fields of a section that a plan has to name, by their path."""
    known = {field.name: field for field in plan_fields().values() if field.section == name and field.path != "model"}
    return {
        field.path: getattr(section, own)
        for own, field in known.items()
        if getattr(section, own) != field.default or (explicit and own in section.model_fields_set)
    }


def _model(spec: ModelSpec) -> Iterator[str]:
    """A built-in model by its name, with what differs from it; any other field by field."""
    yield f"# {comment_of(MODEL)}"
    if isinstance(spec, TracedSpec):
        yield from _traced(spec)
        return
    changes = _changes(spec)
    if changes == {}:
        yield f"model: {quoted(spec.name)}"
        return
    yield "model:"
    if changes is not None:
        yield f"  base: {quoted(spec.name)}"
    for name, value in (_whole(spec) if changes is None else changes).items():
        yield f"  {name}: {_as_yaml(value)}"


def _traced(spec: TracedSpec) -> Iterator[str]:
    """An architecture that traces know, by its name or where its configuration is."""
    source = spec.source if spec.source in learned_models() else str(Path(spec.source).absolute())
    if not spec.changed:
        yield f"model: {quoted(source)}"
        return
    yield from ("model:", f"  base: {quoted(source)}", f"  layers: {spec.layers}")


def _changes(spec: ModelSpec) -> Mapping[str, Any] | None:
    """What of ``spec`` is not as in the built-in model of its name; ``None`` where there is none."""
    if spec.name not in model_specs():
        return None
    base = load_spec(spec.name)
    names = [name for name in ModelSpec.model_fields if getattr(spec, name) != getattr(base, name)]
    names = [name for name in names if name not in ("published_parameters", "source")]
    if names and spec.published_parameters is not None:
        return None
    derived = [name for name in DERIVED if names and name not in names]
    return {name: getattr(spec, name) for name in (*names, *(derived if {*names} & _SIZES else ()))}


_SIZES = {"hidden", "heads"}
"""What sizes of a model follow from."""


def _whole(spec: ModelSpec) -> Mapping[str, Any]:
    fields = ModelSpec.model_fields
    return {
        name: getattr(spec, name)
        for name, field in fields.items()
        if field.is_required() or getattr(spec, name) != field.default
    }


def _as_yaml(value: object) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return json.dumps({str(key): list(item) if isinstance(item, tuple) else item for key, item in value.items()})
    return json.dumps(list(value) if isinstance(value, tuple) else value)


__all__ = ["plan_yaml"]
