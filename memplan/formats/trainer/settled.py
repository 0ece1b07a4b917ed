"""What expressions of a training script are, with the command line that starts it: arguments that it declares, their
defaults, and the conditions under which its calls stand."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from .syntax import UNKNOWN, imports, literal, name_of

_OFF = ("fp16", "bf16", "gradient_checkpointing")
"""Of ``TrainingArguments``; trl's configurations turn the last two on."""
_DEPTH = 8
"""Names for names that are followed."""


_GIVEN = UNKNOWN
"""What an option means that takes the value behind it."""


def declared(module: ast.Module) -> tuple[dict[str, object], dict[str, tuple[str, object]]]:
    """Arguments that the script declares, as fields of a dataclass, by ``add_argument`` or as parameters of a function
    that fire calls, and their defaults; and options by other names than the argument's, or that mean one value: the
    argument, and the value."""
    found: dict[str, object] = {}
    options: dict[str, tuple[str, object]] = {}
    fired = _fired(module)
    for node in ast.walk(module):
        fields = node.body if isinstance(node, ast.ClassDef) and node.decorator_list else []
        pairs = [(one.target.id, _default(one.value)) for one in fields if _is_field(one)]  # type: ignore[attr-defined]
        options |= {f"no_{name}": (name, False) for name, value in pairs if value is True}  # HfArgumentParser's
        if isinstance(node, ast.Call) and name_of(node) == "add_argument":
            name, value, others = _of_parser(node)
            pairs, options = [(name, value)] if name else [], options | others
        if isinstance(node, ast.FunctionDef) and node.name in fired:
            of = node.args
            last = of.args[len(of.args) - len(of.defaults) :]
            given = [*zip(last, of.defaults, strict=True), *zip(of.kwonlyargs, of.kw_defaults, strict=True)]
            pairs = [(one.arg, literal(value, {})) for one, value in given if value is not None]
            options |= {f"no{name}": (name, False) for name, value in pairs if isinstance(value, bool)}
        for name, value in pairs:
            found[name] = value if found.get(name, value) == value else UNKNOWN
    return found, options


def _fired(module: ast.Module) -> list[str]:
    """Functions whose parameters are the command line's arguments: ``fire.Fire(train)``."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and name_of(node) == "Fire"]
    return [one.id for call in calls for one in call.args if isinstance(one, ast.Name)]


def positions(module: ast.Module) -> list[str]:
    """Arguments that the script takes by their place, in order: parameters of a function that fire calls, and what
    argparse is given without a dash."""
    fired = _fired(module)
    found: list[str] = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name in fired:
            found += [one.arg for one in node.args.args]
        elif isinstance(node, ast.Call) and name_of(node) == "add_argument" and node.args:
            name = literal(node.args[0], {})
            found += [name] if isinstance(name, str) and not name.startswith("-") else []
    return found


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _default(given: ast.expr | None) -> object:
    if isinstance(given, ast.Call) and name_of(given) == "field":
        given = next((one.value for one in given.keywords if one.arg in ("default", "default_factory")), None)
        given = given.body if isinstance(given, ast.Lambda) else given
    return UNKNOWN if given is None else literal(given, {})


def _of_parser(call: ast.Call) -> tuple[str, object, dict[str, tuple[str, object]]]:
    """An argument's name, by ``dest`` or its first long option (``argparse``'s ``_get_optional_kwargs``), its default,
    and its options."""
    said = {one.arg: literal(one.value, {}) for one in call.keywords}
    alone = {"store_true": True, "store_false": False}.get(str(said.get("action")), _GIVEN)
    words = [word for one in call.args if isinstance(word := literal(one, {}), str) and word.startswith("-")]
    first = next((word for word in words if word.startswith("--")), words[0] if words else "")
    name = str(said.get("dest") or first.lstrip("-").replace("-", "_"))
    options: dict[str, tuple[str, object]] = {
        word.removeprefix("--").replace("-", "_"): (name, alone) for word in words
    }
    if any(one.arg == "action" and "BooleanOptionalAction" in ast.unparse(one.value) for one in call.keywords):
        options |= {f"no_{option}": (name, False) for option in options}
    switch = None if alone is _GIVEN else not alone
    return name if words else "", said.get("default", switch), options


def conditions(module: ast.Module) -> dict[int, tuple[tuple[ast.expr, bool], ...]]:
    """The tests under which each call and assignment stands, by its identity, and what each must be."""
    found: dict[int, tuple[tuple[ast.expr, bool], ...]] = {}
    todo: list[tuple[ast.AST, tuple[tuple[ast.expr, bool], ...]]] = [(module, ())]
    while todo:
        node, tests = todo.pop()
        if isinstance(node, (ast.Call, ast.Assign)):
            found[id(node)] = tests
        if isinstance(node, (ast.If, ast.IfExp)):
            body, other = (part if isinstance(part, list) else [part] for part in (node.body, node.orelse))
            todo += [(node.test, tests), *((one, (*tests, (node.test, True))) for one in body)]
            todo += [(one, (*tests, (node.test, False))) for one in other]
        else:
            todo += [(one, tests) for one in ast.iter_child_nodes(node)]
    return found


_OF_NUMBERS: Mapping[type[ast.operator], Callable[[Any, Any], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST = 1 << 31


class Settled:
    """Values of expressions, with ``flags`` of the command line."""

    def __init__(
        self,
        module: ast.Module,
        names: Mapping[str, object],
        once: Mapping[str, ast.expr],
        flags: Mapping[str, object] | None,
    ) -> None:
        self.names, self.once = {"__name__": "__main__", **names}, once
        self.declared, self.options = declared(module) if flags is not None else ({}, {})
        self.is_started, self.fired = flags is not None, bool(_fired(module))
        """With a command line; its arguments are a function's parameters."""
        off = ("fp16",) if "trl" in {name.partition(".")[0] for name in imports(module)} else _OFF
        self.arguments = {} if flags is None else {**dict.fromkeys(off, False), **self.declared, **self._said(flags)}
        self._used: set[str] = set()

    def give(self, arguments: Mapping[str, object]) -> None:
        """``arguments`` that the script says itself, by the names of their attributes."""
        self.arguments = {**self.arguments, **arguments}

    def _said(self, flags: Mapping[str, object]) -> dict[str, object]:
        """``flags`` by the names of their arguments."""
        meant = [(*self.options.get(flag, (flag, _GIVEN)), value) for flag, value in flags.items()]
        return {name: value if alone is _GIVEN else alone for name, alone, value in meant}

    @property
    def used(self) -> set[str]:
        """Arguments that were looked at, and all of their options."""
        return self._used | {option for option, (name, _) in self.options.items() if name in self._used}

    def value(self, given: ast.expr, depth: int = 0) -> object:
        """What ``given`` is: a literal, or what the command line makes of it."""
        found = literal(given, self.names)
        if isinstance(given, ast.Call) and name_of(given) == "len" and len(given.args) == 1:
            many = literal(given.args[0], self.names)
            return len(many) if isinstance(many, (list, dict, str)) else UNKNOWN
        if found is not UNKNOWN or depth > _DEPTH:
            return found
        if isinstance(given, ast.Call) and ast.unparse(given.func) == "torch.cuda.is_available":
            return True
        if isinstance(given, ast.Attribute) and given.attr in self.arguments:
            self._used.add(given.attr)
            return self.arguments[given.attr]
        if isinstance(given, ast.Name) and self.fired and given.id in self.arguments:
            self._used.add(given.id)
            return self.arguments[given.id]
        if isinstance(given, ast.Compare) or (isinstance(given, ast.UnaryOp) and isinstance(given.op, ast.Not)):
            holds = self.holds(given, depth + 1)
            return UNKNOWN if holds is None else holds
        if isinstance(given, ast.BinOp) and type(given.op) in _OF_NUMBERS:
            left, right = self.value(given.left, depth + 1), self.value(given.right, depth + 1)
            small = all(isinstance(one, int) and 0 <= one < _LARGEST for one in (left, right)) and bool(right)
            return _OF_NUMBERS[type(given.op)](left, right) if small else UNKNOWN
        if isinstance(given, ast.Name) and given.id in self.once:
            return self.value(self.once[given.id], depth + 1)
        if isinstance(given, ast.IfExp):
            holds = self.holds(given.test, depth + 1)
            return UNKNOWN if holds is None else self.value(given.body if holds else given.orelse, depth + 1)
        if isinstance(given, ast.Call) and name_of(given) == "getattr" and len(given.args) > 1:
            of_torch = getattr(given.args[0], "id", "") == "torch"
            return self.value(given.args[1], depth + 1) if of_torch or self.arguments else UNKNOWN
        return UNKNOWN

    def holds(self, test: ast.expr, depth: int = 0) -> bool | None:
        """Whether ``test`` is true; nothing where only the running script knows."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.holds(test.operand, depth + 1)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp) and depth <= _DEPTH:
            parts = [self.holds(one, depth + 1) for one in test.values]
            decisive = isinstance(test.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = self.value(test.left, depth + 1), self.value(test.comparators[0], depth + 1)
            if left is UNKNOWN or right is UNKNOWN:
                return None
            if isinstance(test.ops[0], (ast.In, ast.NotIn)):
                both = isinstance(left, str) and isinstance(right, (str, list))
                return (left in right) is isinstance(test.ops[0], ast.In) if both else None  # type: ignore[operator]
            same = isinstance(test.ops[0], (ast.Eq, ast.Is))
            return (left == right) is same if same or isinstance(test.ops[0], (ast.NotEq, ast.IsNot)) else None
        value = self.value(test, depth + 1)
        return None if value is UNKNOWN else bool(value)
