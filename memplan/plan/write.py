"""A plan as the YAML that reads back as the same plan: what is not a default, each field under its description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .fields import MODEL, plan_fields, sections
from .library import learned_models, model_specs
from .models import load_spec
from .plan import Plan
from .read import Source, build_plan
from .resolve import resolve
from .spec import ModelSpec
from .template import comment_of, quoted
from .traced_spec import TracedSpec
from .yaml_events import parse_yaml

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
