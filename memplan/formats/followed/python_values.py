"""Values of Python that is followed and not run: plain ones, what classes make, and what only running code knows."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from ...plan.errors import Node, Origin, PlanError, one_line
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

    given: ast.AST
    """The expression."""
    origin: Origin
    why: PlanError | None = None
    """Why the function that gives it cannot be followed."""

    @property
    def shown(self) -> str:
        """The expression as an error shows it."""
        return written(self.given)


def written(given: ast.AST) -> str:
    """An expression, cut where it is long."""
    try:
        return one_line(ast.unparse(given))[:60]
    except (RecursionError, ValueError):
        return "an expression"


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


Value: TypeAlias = "Node | Made | Unknown | Function | Elsewhere"


Names: TypeAlias = "dict[str, Value]"


def _nothing(made: Made, field: str) -> Value | None:
    return None


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the Python configurations of one tool have of their own."""

    instead: str
    """What to give where they cannot be followed."""
    is_job: Callable[[Made], bool]
    """Whether a function that is not found may change what it is given."""
    kept: frozenset[str] = frozenset()
    """Functions that are kept as they are called, like classes."""
    follows: Callable[[str], bool] = bool
    """Whether the module of this name may have functions that are followed."""
    known: Mapping[str, Callable[[Value | None, Sequence[Value], Origin], Value | None]] = field(default_factory=dict)
    """What functions and methods that are not followed do, by name: with the object that has one, and its arguments."""
    unset: Callable[[Made, str], Value | None] = _nothing
    """A field that nobody has set."""


LARGEST = 1 << 62
_LONGEST_LIST = 4096


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


def with_parts(given: Node, path: str, written: Callable[[str, Value], Node | None]) -> Node:
    """``given`` at ``path`` with its items, or its fields, as they are ``written``; those that are not are left out."""
    if isinstance(given.value, list):
        items = [written(path, one) for one in given.value]
        return Node([one for one in items if one is not None], given.origin)
    if isinstance(given.value, dict):
        fields = {name: written(f"{path}.{name}", one) for name, one in given.value.items()}
        return Node({name: one for name, one in fields.items() if one is not None}, given.origin)
    return given


def key_of(value: Value) -> str | None:
    """``value`` as the key of a mapping: text as it is, numbers and tuples of them as Python writes them."""
    if not isinstance(value, Node):
        return None
    plain = value.value
    if isinstance(plain, str):
        return plain
    parts = [one.value for one in plain] if isinstance(plain, list) else [plain]
    known = all(one is None or isinstance(one, (int, str)) for one in parts)
    return repr(tuple(parts)) if known else None


def copied(value: Value) -> Value:
    match value:
        case Made():
            return Made(value.name, {name: copied(one) for name, one in value.fields.items()}, value.origin)
        case Node() if isinstance(value.value, list):
            return Node([*value.value], value.origin)
        case Node() if isinstance(value.value, dict):
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
    match kind:
        case ast.Add() if isinstance(one, list) and isinstance(other, list):
            return Node([*one, *other], where)
        case ast.Mult() if isinstance(one, list) and isinstance(other, int):
            return Node(one * other, where) if 0 <= other * len(one) <= _LONGEST_LIST else None
        case ast.Add() if isinstance(one, str) and isinstance(other, str):
            return Node(one + other, where)
        case ast.Pow() if isinstance(one, int) and isinstance(other, int):
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
    if other is None and type(kind) in _COMPARED:
        return Node(_COMPARED[type(kind)](one, None), where)
    if isinstance(kind, (ast.In, ast.NotIn)) and isinstance(other, list) and isinstance(one, (str, int)):
        return Node(any(item.value == one for item in other) is isinstance(kind, ast.In), where)
    if isinstance(kind, (ast.In, ast.NotIn)) and isinstance(other, dict) and (key := key_of(left)) is not None:
        return Node((key in other) is isinstance(kind, ast.In), where)
    if isinstance(one, (list, dict)) or isinstance(other, (list, dict)):
        return None
    if type(kind) in _COMPARED:
        return Node(_COMPARED[type(kind)](one, other), where)
    if type(kind) in _ORDERED and isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return Node(_ORDERED[type(kind)](one, other), where)
    return None


def _counted(name: str, plain: Sequence[int], where: Origin) -> Node | None:
    """``range`` and ``divmod``."""
    if name == "divmod" and len(plain) == 2 and plain[1]:
        return Node([Node(one, where) for one in divmod(plain[0], plain[1])], where)
    if name == "range" and len(plain) < 4 and 0 not in plain[2:]:
        numbers = range(*plain)
        return Node([Node(one, where) for one in numbers], where) if len(numbers) <= _LONGEST_LIST else None
    return None


_TYPES: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {"str": str, "bool": bool, "int": int, "float": float, "dict": dict, "Mapping": dict, "Sequence": (str, list)}
)
_LISTS = frozenset({"list", "tuple"})
"""Values of both are kept as lists."""


def is_instance(value: Value, kinds: Sequence[str], where: Origin) -> Node | None:
    """``isinstance`` of ``value`` and classes of the names ``kinds``; nothing where that is not known, as of what may
    be of a class that one of them is the base of."""
    if isinstance(value, Made):
        own = value.name.rpartition(".")[2]
        known = own in kinds or _TYPES.keys() | _LISTS >= {*kinds}
        return Node(own in kinds, where) if own and known else None
    if not isinstance(value, Node) or isinstance(value.value, Kept):
        return None
    if isinstance(value.value, list) and len(_LISTS & {*kinds}) == 1 and "Sequence" not in kinds:
        return None
    types = [_TYPES[one] for one in kinds if one in _TYPES] + [list for one in kinds if one in _LISTS]
    return Node(any(isinstance(value.value, one) for one in types), where)


def built_in(name: str, arguments: Sequence[Value], where: Origin) -> Node | None:
    plain = [one.value for one in arguments if isinstance(one, Node)]
    if len(plain) != len(arguments) or not plain:
        return None
    if name in ("range", "divmod") and all(isinstance(one, int) for one in plain):
        return _counted(name, [one for one in plain if isinstance(one, int)], where)
    if name == "len":
        return Node(len(plain[0]), where) if len(plain) == 1 and isinstance(plain[0], (list, dict, str)) else None
    numbers = [one for one in plain if isinstance(one, (int, float))]
    if len(numbers) != len(plain) or (name in _OF_ONE and len(plain) != 1):
        return None
    try:
        return Node(_OF_ONE[name](numbers[0]) if name in _OF_ONE else (max if name == "max" else min)(numbers), where)
    except (ArithmeticError, ValueError):
        return None


_OF_ONE: Mapping[str, Callable[[float], int | float]] = MappingProxyType({"int": int, "float": float, "ceil": ceil})
