"""The fields of a plan as a table, derived from the pydantic models: path, flag, kind, choices, description.

Whatever treats fields alike (flags, ``init``, error messages, the checks of a file's values) reads this
table, so a field that is added to ``plan.py`` or ``spec.py`` has all of it at once.

Fields of a plan as flags of the command line: what makes another plan of one, for a reader to type.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..values import dataclass
from .errors import SIZES
from .plan import Plan
from .section import OneOf


class Kind(Enum):
    """How a field is written."""

    INTEGER = "a whole number"
    NUMBER = "a number"
    SWITCH = "true or false"
    TEXT = "text"
    CHOICE = "one of a few names"
    INTEGERS = "whole numbers separated by commas"
    NAMES = "names separated by commas"
    PARTITION = "a method, or whole numbers separated by commas"
    SIZE = "bytes, or a size such as 16GiB"
    DEVICE_MAP = "a mapping of devices to layers"
    VARIABLES = "a mapping of names to values"
    MODEL = "a name, a path, or a mapping"


_KIND_OF_PATH = {
    **dict.fromkeys(SIZES, Kind.SIZE),
    "pipeline.partition": Kind.PARTITION,
    "device_map": Kind.DEVICE_MAP,
    "environment": Kind.VARIABLES,
    "versions": Kind.VARIABLES,
}


@dataclass(frozen=True, slots=True)
class PlanField:
    """One field of a plan. ``path`` is dotted; ``section`` is the part before the last dot."""

    path: str
    flag: str
    """``--tp``; empty where a field describes a model without changing the estimate."""
    kind: Kind
    choices: tuple[str, ...]
    description: str
    default: object
    required: bool

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """What may be written, for an error or the help."""
        return f"one of {', '.join(self.choices)}" if self.choices else self.kind.value


@cache
def plan_fields() -> Mapping[str, PlanField]:
    """Every field of a plan by its path, in the order of ``plan.py``."""
    return MappingProxyType({field.path: field for field in _fields(Plan, "")})


@cache
def sections() -> Mapping[str, type[BaseModel]]:
    """The sections of a plan by name, ``model`` among them."""
    return MappingProxyType({name: section for name, info in Plan.model_fields.items() if (section := _section(info))})


@cache
def by_flag() -> Mapping[str, PlanField]:
    """Every field that has a flag, by the flag without its hyphens: ``tp``."""
    return MappingProxyType({field.flag[2:]: field for field in plan_fields().values() if field.flag})


MODEL = PlanField(
    "model",
    "--model",
    Kind.MODEL,
    (),
    "name of a model spec, or path to a model spec, a Hugging Face config.json or its folder",
    None,
    True,
)


def _fields(model: type[BaseModel], prefix: str) -> Iterator[PlanField]:
    for name, info in model.model_fields.items():
        section = _section(info)
        if section is None:
            yield _field(prefix + name, info)
            continue
        if name == "model":
            yield MODEL
        yield from _fields(section, f"{name}.")


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return None


def _field(path: str, info: FieldInfo) -> PlanField:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    flag = extra.get("flag", "--" + path.rpartition(".")[2].replace("_", "-"))
    kind, choices = (_KIND_OF_PATH[path], ()) if path in _KIND_OF_PATH else _kind(info.annotation)
    for rule in info.metadata:
        if isinstance(rule, OneOf):
            kind, choices = Kind.CHOICE, tuple(rule.names)
    return PlanField(
        path=path,
        flag=str(flag),
        kind=kind,
        choices=choices,
        description=info.description or "",
        default=info.get_default(call_default_factory=True) if not info.is_required() else None,
        required=info.is_required(),
    )


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return _kind(next(part for part in get_args(annotation) if part is not type(None)))
    if origin is Literal:
        return Kind.CHOICE, get_args(annotation)
    if origin is tuple:
        part = get_args(annotation)[0]
        if str in (part, get_origin(part) is Annotated and get_args(part)[0]):
            return Kind.NAMES, ()
        return (Kind.NAMES, get_args(part)) if get_origin(part) is Literal else (Kind.INTEGERS, ())
    return {int: Kind.INTEGER, float: Kind.NUMBER, bool: Kind.SWITCH, str: Kind.TEXT}[annotation], ()


# -- flags ---------------------------------------------------------------------------------------------


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
