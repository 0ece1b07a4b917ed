"""Fields of a plan by their paths (``layout.tp``), and other values of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plan.plan import Plan


def changed(plan: Plan, fields: Mapping[str, Any]) -> Plan:
    """``plan`` with other values of some fields, by their paths."""
    sections: dict[str, dict[str, Any]] = {}
    update: dict[str, Any] = {}
    for path, value in fields.items():
        section, _, name = path.rpartition(".")
        if section:
            sections.setdefault(section, {})[name] = value
        else:
            update[path] = value
    for name, values in sections.items():
        update[name] = updated(getattr(plan, name), values)
    return plan.model_copy(update=update)


UNCUT: Mapping[str, Any] = {
    "first_layers": None, "last_layers": None, "count_embedding": False, "count_loss": False, "layout": None,
    "group": None, "partition": "type:transformer",
}  # fmt: skip
"""Fields that cut a model into stages in one particular way, taken back where the number of stages is another."""


UNCUT_FIELDS = {f"pipeline.{name}": value for name, value in UNCUT.items()}


def updated(section: Any, values: Mapping[str, Any]) -> Any:
    """``section`` with ``values``; those that are its defaults count as not set, as if nobody had said them."""
    copied = section.model_copy(update=values)
    defaults = {name for name in values if getattr(copied, name) == type(section).model_fields[name].default}
    copied.__pydantic_fields_set__.difference_update(defaults)
    return copied
