"""Fields of a plan as flags of the command line: what makes another plan of one, for a reader to type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .fields import MODEL, Kind, plan_fields
from .plan import Plan


def flags_between(plan: Plan, other: Plan, always: Collection[str] = ()) -> str:
    """Flags that make ``other`` of ``plan``, both before defaults are filled in; empty where they are the same. Fields
    whose paths are in ``always`` are among them: ``plan`` has what nobody said."""
    return flags_of(plan, {path: other.at(path) for path in plan_fields() if not path.startswith(MODEL.path)}, always)


def flags_of(plan: Plan, fields: Mapping[str, object], always: Collection[str] = ()) -> str:
    """``fields``, values by path, as flags beside those of ``plan``: ``--mbs 2 --loss liger``. What ``plan`` says
    already is left out, but for ``always``."""
    changed = {path: value for path, value in fields.items() if plan.at(path) != value or path in always}
    return shlex.join(word for path, value in changed.items() for word in _words(plan, path, value))


def _words(plan: Plan, path: str, value: Any) -> Iterator[str]:
    field = plan_fields()[path]
    if field.kind is Kind.VARIABLES:
        known = plan.at(path)
        for name, one in value.items():
            if known.get(name) != one:
                yield from (field.flag, f"{name}={one}")
        return
    yield from (field.flag, _text(value))


def _text(value: Any) -> str:
    """As a flag takes it (``read.scalar``)."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None or isinstance(value, (bool, Mapping)):
        return json.dumps(value)
    return str(value)


__all__ = ["flags_between", "flags_of"]
