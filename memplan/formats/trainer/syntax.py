"""What a Python file says by itself: literals, mappings that stand there, and names that have one value."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence


class Unknown:
    pass


UNKNOWN = Unknown()
DTYPES = frozenset({"bfloat16", "float16", "float32", "half", "float", "uint8"})


def literal(given: ast.expr, names: Mapping[str, object]) -> object:
    if isinstance(given, ast.Name):
        return names.get(given.id, UNKNOWN)
    if isinstance(given, ast.Attribute):  # torch.bfloat16
        return given.attr if given.attr in DTYPES else UNKNOWN
    if isinstance(given, (ast.List, ast.Tuple, ast.Set)):
        items = [literal(item, names) for item in given.elts]
        return UNKNOWN if any(item is UNKNOWN for item in items) else items
    if isinstance(given, ast.Dict):
        pairs = [
            (literal(key, names) if key is not None else UNKNOWN, literal(value, names))
            for key, value in zip(given.keys, given.values, strict=True)
        ]
        return UNKNOWN if any(UNKNOWN in pair for pair in pairs) else {str(key): value for key, value in pairs}
    if isinstance(given, ast.Call) and name_of(given) == "dict" and not given.args:
        values = {keyword.arg: literal(keyword.value, names) for keyword in given.keywords}
        return UNKNOWN if None in values or UNKNOWN in values.values() else values
    if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Mult):
        left, right = literal(given.left, names), literal(given.right, names)
        both = isinstance(left, int) and isinstance(right, int) and abs(left) < 1 << 31 and abs(right) < 1 << 31
        return left * right if both else UNKNOWN  # type: ignore[operator]
    try:
        value: object = ast.literal_eval(given)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
    return value if value is None or isinstance(value, (bool, int, float, str)) else UNKNOWN


def pairs_of(given: ast.expr) -> list[tuple[str, ast.expr]] | None:
    """Keys and what they are given in a mapping that stands there as one; nothing where it does not."""
    if isinstance(given, ast.Call) and name_of(given) == "dict" and not given.args:
        pairs = [(keyword.arg, keyword.value) for keyword in given.keywords]
        return None if None in dict(pairs) else [(str(key), value) for key, value in pairs]
    if not isinstance(given, ast.Dict):
        return None
    keys = [key.value if isinstance(key, ast.Constant) else None for key in given.keys]
    return None if None in keys else [(str(key), value) for key, value in zip(keys, given.values, strict=True)]


def bound_once(module: ast.AST) -> dict[str, ast.expr]:
    """Names to which ``module``, or a function, gives one value, or one literal again and again, and nothing else
    anywhere."""
    given: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        simple = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in simple:
            given.setdefault(name, []).append(node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None)
        for name in _bound_otherwise(node, simple):
            given.setdefault(name, []).append(None)
    return {name: values[0] for name, values in given.items() if values[0] is not None and _is_one(values)}


def _is_one(values: Sequence[ast.expr | None]) -> bool:
    """Whether there is one of ``values``, or all are the same literal."""
    if len(values) == 1:
        return True
    plain = [UNKNOWN if one is None else literal(one, {}) for one in values]
    return plain[0] is not UNKNOWN and all(type(one) is type(plain[0]) and one == plain[0] for one in plain)


def constants(once: Mapping[str, ast.expr]) -> dict[str, object]:
    """Names to which the file gives one literal."""
    found: dict[str, object] = {}
    for _ in range(2):  # a name for a name
        for name, only in once.items():
            if (value := literal(only, found)) is not UNKNOWN and _size(value) <= _LARGEST:
                found[name] = value
    return found


_LARGEST = 10_000
"""Values of a name, at most: lists of names of lists double with each name."""


def _size(value: object) -> int:
    items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(_size, items))


def untaken(module: ast.AST) -> set[int]:
    """Identities of calls whose value goes to a name that nothing in ``module`` reads."""
    nodes = [*ast.walk(module)]
    read = {one.id for one in nodes if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)}
    given = [node for node in nodes if isinstance(node, ast.Assign)]
    return {
        id(node.value)
        for node in given
        if all(isinstance(one, ast.Name) and one.id not in read for one in node.targets)
    }


def _bound_otherwise(node: ast.AST, simple: Collection[str]) -> Iterator[str]:
    """Names that ``node`` binds as no assignment of one value does."""
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, (ast.For, ast.comprehension, ast.NamedExpr)) or (isinstance(node, ast.Assign) and not simple):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))


def imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def owner_of(call: ast.Call) -> str:
    """``AutoModelForCausalLM`` of ``AutoModelForCausalLM.from_pretrained``."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
