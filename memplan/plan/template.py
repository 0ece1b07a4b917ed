"""A commented plan to start from, written from the fields' own descriptions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from .fields import Kind, PlanField, plan_fields, sections
from .resolve import FOLLOW

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
        inside = [field for field in fields if field.section == section and field is not model]
        for field in inside:
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
