"""Pages of the site that are made when it is built: every field of a plan, release notes, contributing.

A hook of MkDocs (``mkdocs.yml``), so that these pages cannot be out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.support import table
from memplan.plan.fields import Kind, PlanField, plan_fields
from memplan.plan.schema import plan_schema

ROOT = Path(__file__).resolve().parent.parent
LARGE = 2**31
"""Bounds from here on are those of the machine's whole numbers, and say nothing."""

INTRODUCTION = """# Every field of a plan

A field stands in a plan's file under its section (`layout: {tp: 4}`), and has a flag that stands over the file
(`--tp 4`). A switch that is on by default has `--no-…`. `–` as default: what its line says, or the framework's, the
model's or the GPU's own; the report lists what was assumed. On a command line that names no framework, the other flags
decide which it is. `memplan init plan.yaml` writes all of them, commented; `memplan schema` prints the JSON Schema for
editors.

`extends: PLAN` at the top of a file takes another plan, a path or a built-in example, as the start.
"""


def fields() -> str:
    schema = plan_schema()
    ordered = sorted(plan_fields().values(), key=lambda field: (field.section != "", field.section == "model"))
    return INTRODUCTION + "".join(
        "\n" + "\n".join(_section(name, list(own), schema))
        for name, own in groupby(ordered, lambda field: field.section)
    )


def _section(name: str, own: Iterable[PlanField], schema: Mapping[str, Any]) -> Iterator[str]:
    title = f"`{name}`" if name else "Of the plan itself"
    head = ["field", "flag", "default", "allowed", ""]
    properties = _definition(name, schema)["properties"]
    yield from table(title, head, (_row(field, properties.get(field.name, {})) for field in own))


def _definition(section: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if not section:
        return schema
    ways = [schema["properties"][section], *schema["properties"][section].get("anyOf", ())]
    reference: str = next(way["$ref"] for way in ways if "$ref" in way)
    definition: Mapping[str, Any] = schema["$defs"][reference.rpartition("/")[2]]
    return definition


def _row(field: PlanField, schema: Mapping[str, Any]) -> list[str]:
    flag = f"--no-{field.flag[2:]}" if field.kind is Kind.SWITCH and field.default is True else field.flag
    bounds = "" if field.kind is Kind.TEXT else _bounds(schema)
    allowed = ", ".join(f"`{choice}`" for choice in field.choices) or field.kind.value + bounds
    return [f"`{field.name}`", f"`{flag}`" if flag else "–", _default(field), allowed, _plain(field.description)]


def _default(field: PlanField) -> str:
    if field.required:
        return "must be given"
    value = field.default
    if value is None or value in ((), "") or isinstance(value, Mapping):
        return "–"
    if isinstance(value, tuple):
        return f"`{', '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _bounds(schema: Mapping[str, Any]) -> str:
    ways = [schema, *schema.get("anyOf", ())]
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    said = [
        f"{word} {int(way[key]) if way[key] == int(way[key]) else way[key]:,}"
        for way in ways
        for key, word in words.items()
        if abs(way.get(key, LARGE)) < LARGE
    ]
    return f", {', '.join(said)}" if said else ""


def _plain(text: str) -> str:
    """``text`` as a cell in which Markdown marks nothing."""
    return re.sub(r"([*_|<\[\]])", r"\\\1", text.replace("``", ""))


def _from_top(name: str) -> str:
    """A document that lies beside ``docs/``, with its links as they are from inside."""
    return re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))


MADE: Mapping[str, Callable[[], str]] = {
    "fields.md": fields,
    "changes.md": lambda: _from_top("CHANGELOG.md"),
    "contributing.md": lambda: _from_top("CONTRIBUTING.md"),
}


def on_files(files: Any, *, config: Any) -> Any:
    """MkDocs calls this when it has listed ``docs/``."""
    from mkdocs.structure.files import File

    for name, text in MADE.items():
        files.append(File.generated(config, name, content=text()))
    return files
