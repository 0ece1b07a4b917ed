"""What Python's syntax tree says of names, without following anything."""

from __future__ import annotations

import ast
from copy import copy


def last_name(given: ast.expr | None) -> str:
    """``Config`` of ``Trainer.Config``; empty where ``given`` is no name."""
    if isinstance(given, ast.Attribute):
        return given.attr
    return given.id if isinstance(given, ast.Name) else ""


def classes(given: ast.expr) -> tuple[str, ...]:
    """Names of the classes in ``str``, ``(str, int)`` and ``str | int``."""
    if isinstance(given, ast.Tuple):
        return tuple(name for one in given.elts for name in classes(one))
    if isinstance(given, ast.BinOp):
        return (*classes(given.left), *classes(given.right))
    return (last_name(given),)


def catches(handler: ast.ExceptHandler, kind: str) -> bool:
    """Whether ``handler`` is for exceptions of the class ``kind``, by its name."""
    return handler.type is None or bool({kind, "Exception", "BaseException"} & {*classes(handler.type)} - {""})


def needs(definition: ast.FunctionDef) -> bool:
    """Whether a function cannot be called without arguments."""
    taken = definition.args
    return len(taken.posonlyargs) + len(taken.args) > len(taken.defaults) or None in taken.kw_defaults


def loaded(target: ast.expr) -> ast.expr:
    """``target`` as it is read."""
    found = copy(target)
    if isinstance(found, (ast.Name, ast.Attribute, ast.Subscript)):
        found.ctx = ast.Load()
    return found


def dotted(given: ast.expr) -> str:
    """``a.b.c`` of names; what is no name is left out."""
    names = []
    while isinstance(given, ast.Attribute):
        names.append(given.attr)
        given = given.value
    return ".".join([*([given.id] if isinstance(given, ast.Name) else [""]), *reversed(names)])
