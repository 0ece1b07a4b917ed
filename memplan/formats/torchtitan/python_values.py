"""Values of Python that is followed and not run: plain ones, what classes make, and what only running code knows."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from ...plan.errors import Node, Origin, PlanError
from ...values import dataclass


@dataclass(slots=True)
class Made:
    """What a call of a class makes: its name as it was called, ``Trainer.Config``, and its fields."""

    name: str
    fields: dict[str, Value]
    origin: Origin
    positional: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only running code has."""

    shown: str
    origin: Origin
    why: PlanError | None = None
    """Why the function that gives it cannot be followed."""


@dataclass(frozen=True, slots=True)
class Function:
    """One of a file that is followed."""

    definition: ast.FunctionDef
    module: Module


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A name that a file imports: ``torchtitan.models.llama3`` and ``model_registry``; without a name, the module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that is no plain value, as the item of a list or mapping."""

    value: Made | Unknown | Function | Elsewhere


@dataclass(slots=True)
class Module:
    """A file, and the names at its top."""

    source: str
    path: Path | None
    package: str
    """Its folder as imports call it, as far as ``__init__.py`` stand around it: ``torchtitan.models.llama3``."""
    names: Names
    functions: tuple[str, ...]
    """Those that it defines itself and that need no arguments, in their order."""


def is_job(made: Made) -> bool:
    """Whether it is a configuration of a whole job: ``Trainer.Config``, or a class of that kind."""
    return made.name.replace(".", "").endswith("TrainerConfig")


Value: TypeAlias = "Node | Made | Unknown | Function | Elsewhere"


Names: TypeAlias = "dict[str, Value]"


LARGEST = 1 << 62


_OPERATORS: Mapping[type[ast.operator], Callable[[int | float, int | float], int | float]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)


_COMPARED: Mapping[type[ast.cmpop], Callable[[object, object], bool]] = MappingProxyType(
    {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne}
)


_ORDERED: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = MappingProxyType(
    {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
)


def item_of(value: Value, where: Origin) -> Node:
    """``value`` inside of a list or mapping, where what is made stands as its own kind of node."""
    return value if isinstance(value, Node) else Node(Kept(value), where)  # type: ignore[arg-type]


def out_of(item: Node) -> Value:
    """What ``item_of`` put in."""
    return item.value.value if isinstance(item.value, Kept) else item


def copied(value: Value) -> Value:
    if isinstance(value, Made):
        return Made(value.name, {name: copied(one) for name, one in value.fields.items()}, value.origin)
    if isinstance(value, Node) and isinstance(value.value, list):
        return Node([*value.value], value.origin)
    if isinstance(value, Node) and isinstance(value.value, dict):
        return Node({**value.value}, value.origin)
    return value


def truth_of(value: Value) -> bool | None:
    """Whether ``value`` is true; nothing where only running code knows."""
    if isinstance(value, Made):
        return True
    return bool(value.value) if isinstance(value, Node) and not isinstance(value.value, Kept) else None


def calculated(kind: ast.operator, left: Value, right: Value, where: Origin) -> Node | None:
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    one, other = left.value, right.value
    if isinstance(kind, ast.Add) and isinstance(one, list) and isinstance(other, list):
        return Node([*one, *other], where)
    if isinstance(kind, ast.Add) and isinstance(one, str) and isinstance(other, str):
        return Node(one + other, where)
    if isinstance(kind, ast.Pow) and isinstance(one, int) and isinstance(other, int):
        return Node(one**other, where) if abs(one) <= 1024 and 0 <= other <= 6 else None
    if not isinstance(one, (int, float)) or not isinstance(other, (int, float)) or type(kind) not in _OPERATORS:
        return None
    try:
        result = _OPERATORS[type(kind)](one, other)
    except (ArithmeticError, ValueError):
        return None
    return Node(result, where) if abs(result) < LARGEST else None


def compared(kind: ast.cmpop, left: Value, right: Value, where: Origin) -> Node | None:
    if isinstance(left, Made) and isinstance(right, Node) and right.value is None and type(kind) in _COMPARED:
        return Node(_COMPARED[type(kind)](left.name, None), where)
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    one, other = left.value, right.value
    if isinstance(kind, (ast.In, ast.NotIn)) and isinstance(other, list) and isinstance(one, (str, int)):
        inside = any(item.value == one for item in other)
        return Node(inside is isinstance(kind, ast.In), where)
    if isinstance(one, (list, dict)) or isinstance(other, (list, dict)):
        return None
    if type(kind) in _COMPARED:
        return Node(_COMPARED[type(kind)](one, other), where)
    if type(kind) in _ORDERED and isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return Node(_ORDERED[type(kind)](one, other), where)
    return None


def built_in(name: str, arguments: Sequence[Value], where: Origin) -> Node | None:
    plain = [one.value for one in arguments if isinstance(one, Node)]
    if len(plain) != len(arguments) or not plain:
        return None
    if name == "len":
        return Node(len(plain[0]), where) if len(plain) == 1 and isinstance(plain[0], (list, dict, str)) else None
    numbers = [one for one in plain if isinstance(one, (int, float))]
    if len(numbers) != len(plain) or (name in _OF_ONE and len(plain) != 1):
        return None
    if name == "range":
        end = numbers[0]
        fits = isinstance(end, int) and end <= _LONGEST_RANGE
        return Node([Node(one, where) for one in range(int(end))], where) if fits else None
    try:
        return Node(_OF_ONE[name](numbers[0]) if name in _OF_ONE else (max if name == "max" else min)(numbers), where)
    except (ArithmeticError, ValueError):
        return None


_OF_ONE: Mapping[str, Callable[[float], int | float]] = MappingProxyType(
    {"int": int, "float": float, "ceil": ceil, "range": int}
)
_LONGEST_RANGE = 4096
