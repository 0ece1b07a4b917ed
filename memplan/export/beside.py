"""Fields of a plan as flags of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plan.errors import PlanError
from ..plan.fields import by_flag, plan_fields
from ..plan.library import model_specs
from ..plan.models import load_spec
from ..plan.plan import Plan
from ..plan.spec import ModelSpec
from .sameness import value_at

FlagValue = str | tuple[str, ...]

_DERIVED = ("kv_heads", "head_dim", "ffn")
"""Sizes that follow from others where they are not given (``models._with_derived_sizes``)."""


def as_flag(plan: Plan, path: str) -> tuple[str, FlagValue]:
    """Name (without hyphens) and value of the flag that sets ``path`` as in ``plan``; an empty name if it has none."""
    return plan_fields()[path].flag.removeprefix("--"), as_text(value_at(plan, path))


def as_text(value: Any) -> FlagValue:
    """``value`` of a field as its flag takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) + ("," if len(value) == 1 and isinstance(value[0], int) else "")
    if isinstance(value, Mapping):
        return tuple(f"{name}={text}" for name, text in value.items())
    return str(value)


def model_flags(spec: ModelSpec) -> dict[str, FlagValue]:
    """The flags that name ``spec``: a built-in model, and the fields in which it is another."""
    base = spec.name if spec.name in model_specs() else _relative(spec)
    known = load_spec(base)
    fields = [field for field in by_flag().values() if field.section == "model"]
    changed = {field.name for field in fields if getattr(spec, field.name) != getattr(known, field.name)}
    if changed & {"hidden", "heads", *_DERIVED}:
        changed |= {*_DERIVED}
    return {
        "model": base,
        **{field.flag[2:]: as_text(getattr(spec, field.name)) for field in fields if field.name in changed},
    }


def _relative(spec: ModelSpec) -> str:
    """The built-in model that has most in common with ``spec``, of its family where there is one."""
    names = [field.name for field in plan_fields().values() if field.section == "model" and field.flag]

    def likeness(name: str) -> tuple[bool, int]:
        known = load_spec(name)
        return known.family == spec.family, sum(getattr(known, one) == getattr(spec, one) for one in names)

    found = max(model_specs(), key=likeness, default=None)
    if found is None:
        raise PlanError("model", spec.name, "is not built in, and nothing is")
    return found
