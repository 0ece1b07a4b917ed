"""A Python function that builds a configuration of dataclasses, followed without being run.

Statements are followed one after the other: literals, arithmetic on them, calls of classes (which are kept as they are
called), functions of the same file and of files beside it, and changes of what they return. Whatever else is an
``Unknown`` that says what it was, and is asked for only where it matters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path

from ...bash.origin import Budget, ScriptError
from ...plan.errors import ABSENT, Node, Origin, PlanError, one_line, refused, wrong_at
from ...plan.text import is_there, read_text
from ..python_text import parsed_python
from .names import catches, classes, dotted, last_name, loaded, needs
from .python_values import (
    LARGEST,
    Dialect,
    Elsewhere,
    Function,
    Kept,
    Made,
    Module,
    Names,
    Unknown,
    Value,
    built_in,
    calculated,
    compared,
    copied,
    is_instance,
    item_of,
    key_of,
    out_of,
    truth_of,
    written,
)

LONGEST = 300_000
"""Characters of a file that is followed."""
MOST_FILES = 32
"""Files that one configuration may be in."""
_DEEPEST = 48
"""Calls within calls."""
_EVALUATED = 40
"""Steps of an expression."""


class Raised(PlanError):  # noqa: N818 (what the code raises need not be an error)
    """An exception that the followed code raises."""

    kind: str = ""
    """Its class; empty where that is not known."""


class Following:
    """Follows functions of files; ``budget`` bounds the work."""

    def __init__(self, text: str, source: str, path: Path | None, dialect: Dialect) -> None:
        self.budget = Budget(Origin(source))
        self.dialect = dialect
        self.modules: dict[Path, Module] = {}
        self.depth = self.tries = 0
        self.main = self._module(text, source, path)

    def configuration(self, name: str, keywords: Names | None = None) -> Value | None:
        """What the function ``name`` of the file returns; nothing where there is none. Of ``keywords`` it is given
        those that it takes."""
        found = self._found(self.main.names.get(name), self.main)
        if not isinstance(found, Function):
            return None
        taken = {one.arg for one in (*found.definition.args.args, *found.definition.args.kwonlyargs)}
        return self.result(found, [], {key: value for key, value in (keywords or {}).items() if key in taken})

    def result(self, function: Function, arguments: Sequence[Value], keywords: Names) -> Value:
        """What ``function`` returns for these arguments."""
        try:
            return self._measured(self._called(function, arguments, keywords, function.definition))
        except ScriptError as error:
            raise refused(error) from None
        except RecursionError:
            raise wrong_at(self.main.source, "is nested too deeply") from None

    # -- files ----------------------------------------------------------------------------------------

    def _module(self, text: str, source: str, path: Path | None) -> Module:
        if len(text) > LONGEST:
            raise wrong_at(source, f"is Python of more than {LONGEST:,} characters; {self.dialect.instead}")
        self.budget.spend(len(text) // 4)
        try:
            tree = parsed_python(text)
        except SyntaxError as error:
            problem = f"is no Python that can be read ({one_line(error.msg)}); {self.dialect.instead}"
            raise wrong_at(Origin(source, error.lineno), problem) from None
        functions = tuple(one.name for one in tree.body if isinstance(one, ast.FunctionDef) and not needs(one))
        module = Module(source, path, _package_of(path), {}, functions)
        if path is not None:
            self.modules[path] = module
        for statement in tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign)):
                self._at_top(statement, module)
        return module

    def _at_top(self, statement: ast.stmt, module: Module) -> None:
        """A statement outside of functions: what cannot be followed leaves its names without a value."""
        try:
            self._statement(statement, module, module.names)
        except (PlanError, RecursionError):
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    module.names.pop(target.id, None)

    def _beside(self, module: Module, name: str) -> Module | None:
        """The file of the module ``name``, from the folders around the one that imports it."""
        known = all(part.isidentifier() for part in name.split("."))
        if module.path is None or not known or not self.dialect.follows(name):
            return None
        for folder in module.path.absolute().parents[:12]:
            place = folder.joinpath(*name.split("."))
            for path in (place.with_suffix(".py"), place / "__init__.py"):
                if path in self.modules:
                    return self.modules[path]
                if is_there(path):
                    if len(self.modules) >= MOST_FILES:
                        raise wrong_at(module.source, f"is in more than {MOST_FILES} files; {self.dialect.instead}")
                    return self._module(read_text(path), _from_here(path), path)
        return None

    def _found(self, value: Value | None, module: Module) -> Value | None:
        """``value``, or what a name that is imported stands for."""
        seen = 0
        while isinstance(value, Elsewhere) and value.name and value.name not in self.dialect.kept and seen < 8:
            seen += 1
            file = self._beside(module, value.module)
            found = file.names.get(value.name) if file is not None else None
            if file is None or found is None:
                return value
            value, module = found, file
        return value

    # -- statements -----------------------------------------------------------------------------------

    def _body(self, body: Sequence[ast.stmt], module: Module, names: Names) -> Value | None:
        """What the statements return, if one does."""
        for statement in body:
            returned = self._statement(statement, module, names)
            if returned is not None:
                return returned
        return None

    def _statement(self, statement: ast.stmt, module: Module, names: Names) -> Value | None:
        self.budget.spend(_EVALUATED, Origin(module.source, statement.lineno))
        match statement:
            case ast.Return():
                none = Node(None, Origin(module.source, statement.lineno))
                return self.value(statement.value, module, names) if statement.value is not None else none
            case ast.Assign():
                value = self.value(statement.value, module, names)
                for target in statement.targets:
                    self._assign(target, value, module, names)
            case ast.AnnAssign():
                if statement.value is not None:
                    self._assign(statement.target, self.value(statement.value, module, names), module, names)
            case ast.AugAssign():
                changed = ast.BinOp(loaded(statement.target), statement.op, statement.value)
                value = self.value(ast.copy_location(changed, statement), module, names)
                self._assign(statement.target, value, module, names)
            case ast.FunctionDef():
                names[statement.name] = Function(statement, module)
            case ast.Import() | ast.ImportFrom():
                names.update(_imported(statement, module))
            case ast.Expr():
                self._effect(statement.value, module, names)
            case ast.If():
                chosen = self._decided(statement.test, module, names)
                return self._body(statement.body if chosen else statement.orelse, module, names)
            case ast.For():
                return self._loop(statement, module, names)
            case ast.With():
                return self._body(statement.body, module, names)
            case ast.Try():
                return self._tried(statement, module, names)
            case ast.Raise():
                problem = f"raises {written(statement.exc)}" if statement.exc is not None else "raises an exception"
                raised = Raised("", ABSENT, problem, origin=Origin(module.source, statement.lineno))
                made = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
                raised.kind = last_name(made)
                raise raised
            case ast.Pass() | ast.Assert() | ast.ClassDef() | ast.Global():
                return None
            case _:
                raise self._refused(
                    f"has a statement that is not followed ({type(statement).__name__.lower()})", statement, module
                )
        return None

    def _tried(self, statement: ast.Try, module: Module, names: Names) -> Value | None:
        """The body, and what catches an exception that it raises itself, or follows where it raises none."""
        returned, raised = None, None
        self.tries += 1
        try:
            returned = self._body(statement.body, module, names)
        except Raised as error:
            raised = error
        finally:
            self.tries -= 1
        if raised is not None:
            handler = next((one for one in statement.handlers if catches(one, raised.kind)), None)
            if handler is None:
                raise raised
            returned = self._body(handler.body, module, names)
        elif returned is None:
            returned = self._body(statement.orelse, module, names)
        return returned if returned is not None else self._body(statement.finalbody, module, names)

    def _decided(self, test: ast.expr, module: Module, names: Names) -> bool:
        truth = truth_of(self.value(test, module, names))
        if truth is None:
            raise self._refused(f"depends on {written(test)}, which only running code knows", test, module)
        return truth

    def _loop(self, loop: ast.For, module: Module, names: Names) -> Value | None:
        items = self.value(loop.iter, module, names)
        if not isinstance(items, Node) or not isinstance(items.value, list) or loop.orelse:
            raise self._refused(f"repeats what depends on {written(loop.iter)}, which is not followed", loop, module)
        for item in items.value:
            self._assign(loop.target, out_of(item), module, names)
            returned = self._body(loop.body, module, names)
            if returned is not None:
                return returned
        return None

    def _assign(self, target: ast.expr, value: Value, module: Module, names: Names) -> None:
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Attribute():
                owner = self._owner(target.value, module, names)
                if isinstance(owner, Made):
                    owner.fields[target.attr] = value
            case ast.Tuple() | ast.List():
                items = value.value if isinstance(value, Node) and isinstance(value.value, list) else []
                for at, one in enumerate(target.elts):
                    other = Unknown(one, Origin(module.source, target.lineno))
                    self._assign(one, out_of(items[at]) if len(items) == len(target.elts) else other, module, names)
            case ast.Subscript():
                owner, key = self.value(target.value, module, names), self.value(target.slice, module, names)
                plain = key.value if isinstance(key, Node) else None
                if isinstance(owner, Node) and isinstance(owner.value, dict) and isinstance(plain, str):
                    owner.value[plain] = item_of(value, Origin(module.source, target.lineno))
                elif isinstance(owner, (Node, Made)):
                    raise self._refused(f"changes {written(target)}, which is not followed", target, module)

    def _owner(self, given: ast.expr, module: Module, names: Names) -> Value:
        """What an attribute is set of: a field that is still its default becomes one with changes."""
        if isinstance(given, ast.Attribute):
            around = self._owner(given.value, module, names)
            if isinstance(around, Made) and not isinstance(around.fields.get(given.attr), Made):
                around.fields[given.attr] = Made("", {}, Origin(module.source, given.lineno))
            return around.fields[given.attr] if isinstance(around, Made) else around
        return self.value(given, module, names)

    def _effect(self, given: ast.expr, module: Module, names: Names) -> None:
        """A call for its effect: a function that is followed, or ``append`` to a list."""
        if not isinstance(given, ast.Call):
            return
        if isinstance(given.func, ast.Attribute) and given.func.attr in ("append", "extend"):
            owner = self.value(given.func.value, module, names)
            added = [self.value(one, module, names) for one in given.args]
            where = Origin(module.source, given.lineno)
            if isinstance(owner, Node) and isinstance(owner.value, list) and len(added) == 1:
                items = [added[0]]
                if given.func.attr == "extend":
                    more = added[0].value if isinstance(added[0], Node) else None
                    items = [*more] if isinstance(more, list) else [Unknown(given, where)]
                self.budget.make(len(items), 0, where)
                owner.value.extend(item_of(one, where) for one in items)
            elif isinstance(owner, Unknown) and isinstance(given.func.value, ast.Attribute):
                listed = Node([item_of(one, where) for one in added], where)
                self._assign(given.func.value, listed, module, names)
            return
        self.value(given, module, names)

    # -- expressions ----------------------------------------------------------------------------------

    def value(self, given: ast.expr, module: Module, names: Names) -> Value:
        """What ``given`` is, without running anything."""
        where = Origin(module.source, getattr(given, "lineno", None))
        self.budget.make(1, 0, where, steps=_EVALUATED)
        match given:
            case ast.Constant():
                plain = given.value
                known = plain is None or isinstance(plain, (bool, float, str))
                known = known or (isinstance(plain, int) and abs(plain) < LARGEST)
                return Node(plain, where) if known else Unknown(given, where)  # type: ignore[arg-type]
            case ast.Name():
                found = self._found(names.get(given.id, module.names.get(given.id)), module)
                return found if found is not None else Unknown(given, where)
            case ast.Attribute():
                return self._attribute(given, module, names, where)
            case ast.List() | ast.Tuple() | ast.Set():
                return Node([item_of(self.value(one, module, names), where) for one in given.elts], where)
            case ast.Dict():
                return self._charged(self._mapping(given, module, names, where), where)
            case ast.Call():
                return self._charged(self._call(given, module, names, where), where)
        return self._charged(self._computed(given, module, names, where), where)

    def _charged(self, made: Value, where: Origin) -> Value:
        """``made``, which may be as large as what it is made of together."""
        plain = made.fields if isinstance(made, Made) else made.value if isinstance(made, Node) else None
        if isinstance(plain, (list, dict)):
            self.budget.make(len(plain), 0, where)
        elif isinstance(plain, str):
            self.budget.make(0, len(plain), where)
        return made

    def _measured(self, made: Value, deep: int = 0) -> Value:
        """``made``, whose parts are charged as often as they are there: a reader writes each of them."""
        where = getattr(made, "origin", None)
        self.budget.make(1, 0, where, steps=_EVALUATED)
        if deep > _DEEPEST:
            raise wrong_at(where or self.main.source, f"is nested more than {_DEEPEST} deep")
        parts: Iterable[Value] = ()
        if isinstance(made, Made):
            parts = (*made.positional, *made.fields.values())
        elif isinstance(made, Node) and isinstance(made.value, (list, dict)):
            parts = made.value.values() if isinstance(made.value, dict) else made.value
        elif isinstance(made, Node) and isinstance(made.value, Kept):
            parts = (out_of(made),)
        for one in parts:
            self._measured(one, deep + 1)
        return made

    def _attribute(self, given: ast.Attribute, module: Module, names: Names, where: Origin) -> Value:
        owner = self.value(given.value, module, names)
        if isinstance(owner, Made) and (field := self._field(owner, given.attr)) is not None:
            return field
        if isinstance(owner, Elsewhere):
            inside = f"{owner.module}.{owner.name}" if owner.name else owner.module
            return self._found(Elsewhere(inside, given.attr), module) or Unknown(given, where)
        return Unknown(given, where)

    def _field(self, owner: Made, name: str) -> Value | None:
        return owner.fields[name] if name in owner.fields else self.dialect.unset(owner, name)

    def _listed(self, given: ast.ListComp | ast.SetComp, module: Module, names: Names, where: Origin) -> Node | None:
        """``[one for one in several if …]`` of a list that is known."""
        loop = given.generators[0]
        several = self.value(loop.iter, module, names)
        if len(given.generators) != 1 or not isinstance(several, Node) or not isinstance(several.value, list):
            return None
        found, inner = list[Node](), dict(names)
        for item in several.value:
            self._assign(loop.target, out_of(item), module, inner)
            truths = [truth_of(self.value(one, module, inner)) for one in loop.ifs]
            if None in truths:
                return None
            if all(truths):
                found.append(item_of(self.value(given.elt, module, inner), where))
        return Node(found, where)

    def _mapping(self, given: ast.Dict, module: Module, names: Names, where: Origin) -> Value:
        found: dict[str, Node] = {}
        for key, one in zip(given.keys, given.values, strict=True):
            value = self.value(one, module, names)
            name = self.value(key, module, names) if key is not None else None
            if name is None and isinstance(value, Node) and isinstance(value.value, dict):
                found.update(value.value)
            elif name is not None and (named := key_of(name)) is not None:
                found[named] = item_of(value, where)
            else:
                return Unknown(given, where)
        return Node(found, where)

    def _computed(self, given: ast.expr, module: Module, names: Names, where: Origin) -> Value:
        unknown = Unknown(given, where)
        match given:
            case ast.BinOp():
                left, right = self.value(given.left, module, names), self.value(given.right, module, names)
                return calculated(given.op, left, right, where) or unknown
            case ast.UnaryOp():
                value = self.value(given.operand, module, names)
                truth = truth_of(value)
                if isinstance(given.op, ast.Not):
                    return unknown if truth is None else Node(not truth, where)
                number = value.value if isinstance(value, Node) and isinstance(value.value, (int, float)) else None
                return Node(-number, where) if isinstance(given.op, ast.USub) and number is not None else unknown
            case ast.BoolOp():
                for one in given.values:
                    value = self.value(one, module, names)
                    truth = truth_of(value)
                    if truth is None:
                        return unknown
                    if truth is isinstance(given.op, ast.Or):
                        break
                return value
            case ast.IfExp():
                truth = truth_of(self.value(given.test, module, names))
                return unknown if truth is None else self.value(given.body if truth else given.orelse, module, names)
            case ast.Compare() if len(given.ops) == 1:
                left, right = self.value(given.left, module, names), self.value(given.comparators[0], module, names)
                return compared(given.ops[0], left, right, where) or unknown
            case ast.JoinedStr():
                return self._joined(given, module, names, where) or unknown
            case ast.ListComp() | ast.SetComp():
                return self._listed(given, module, names, where) or unknown
            case ast.Subscript():
                owner, key = self.value(given.value, module, names), key_of(self.value(given.slice, module, names))
                inside = (
                    owner.value.get(key) if isinstance(owner, Node) and isinstance(owner.value, dict) and key else None
                )
                return out_of(inside) if inside is not None else unknown
        return unknown

    def _joined(self, given: ast.JoinedStr, module: Module, names: Names, where: Origin) -> Node | None:
        """``f"{size}B"``."""
        parts: list[str] = []
        for one in given.values:
            inner = one.value if isinstance(one, ast.FormattedValue) else one
            value = self.value(inner, module, names)
            formatted = isinstance(one, ast.FormattedValue) and (one.format_spec is not None or one.conversion != -1)
            if formatted or not isinstance(value, Node) or not isinstance(value.value, (str, int, float)):
                return None
            parts.append(str(value.value))
        return Node("".join(parts), where)

    # -- calls ----------------------------------------------------------------------------------------

    def _call(self, given: ast.Call, module: Module, names: Names, where: Origin) -> Value:
        called = dotted(given.func)
        last = given.func.attr if isinstance(given.func, ast.Attribute) else called.rpartition(".")[2]
        arguments = [self.value(one, module, names) for one in given.args if not isinstance(one, ast.Starred)]
        keywords = self._keywords(given, module, names)
        if keywords is None or len(arguments) != len(given.args):
            return Unknown(given, where)
        if last == "replace" and arguments and isinstance(arguments[0], Made):
            made = arguments[0]
            return Made(made.name, {**made.fields, **keywords}, where, made.positional)
        if last in ("deepcopy", "copy") and len(arguments) == 1:
            return copied(self._measured(arguments[0]))
        if last == "cast" and len(arguments) == 2:
            return arguments[1]
        if last in self.dialect.known:
            owner = self.value(given.func.value, module, names) if isinstance(given.func, ast.Attribute) else None
            every = [*arguments, *keywords.values()]
            return self.dialect.known[last](owner, every, where) or Unknown(given, where)
        if last in ("isinstance", "hasattr", "getattr", "lower") and not keywords:
            return self._asked(given, last, arguments, module, names) or Unknown(given, where)
        function = self.value(given.func, module, names)
        if isinstance(function, Function):
            try:
                return self._called(function, arguments, keywords, given)
            except PlanError as error:
                if self.tries and isinstance(error, Raised):
                    raise
                if any(isinstance(one, Made) and self.dialect.is_job(one) for one in (*arguments, *keywords.values())):
                    raise
                return Unknown(given, where, error)
        if isinstance(function, Elsewhere) and function.name in self.dialect.kept:
            return Made(f"{function.name}:{function.module}", keywords, where, tuple(arguments))
        if last == "dict" and not arguments:
            return Node({name: item_of(value, where) for name, value in keywords.items()}, where)
        if last == "list" and not keywords and len(arguments) == 1 and isinstance(arguments[0], Node):
            return copy(arguments[0])
        if last in ("int", "float", "len", "max", "min", "ceil", "range", "divmod") and not keywords:
            return built_in(last, arguments, where) or Unknown(given, where)
        if last.lstrip("_")[:1].isupper() or last.startswith("default_"):
            return Made(called, keywords, where, tuple(arguments))
        if any(isinstance(one, Made) and self.dialect.is_job(one) for one in (*arguments, *keywords.values())):
            raise self._refused(
                f"{written(given.func)}(…) may change the configuration, and is not found", given, module
            )
        return Unknown(given, where)

    def _asked(
        self, given: ast.Call, last: str, arguments: Sequence[Value], module: Module, names: Names
    ) -> Value | None:
        """What ``isinstance``, ``hasattr``, ``getattr`` and ``lower`` say of a value."""
        where = Origin(module.source, given.lineno)
        if last == "lower":
            owner = self.value(given.func.value, module, names) if isinstance(given.func, ast.Attribute) else None
            known = isinstance(owner, Node) and isinstance(owner.value, str)
            return Node(str(owner.value).lower(), where) if isinstance(owner, Node) and known else None
        if len(arguments) < 2:
            return None
        if last == "isinstance":
            return is_instance(arguments[0], classes(given.args[1]), where)
        owner, name = arguments[0], arguments[1]
        if not isinstance(owner, Made) or not isinstance(name, Node):
            return None
        found = self._field(owner, str(name.value))
        return found if last == "getattr" or found is None else Node(True, where)

    def _keywords(self, given: ast.Call, module: Module, names: Names) -> Names | None:
        found: Names = {}
        for keyword in given.keywords:
            value = self.value(keyword.value, module, names)
            if keyword.arg is not None:
                found[keyword.arg] = value
            elif isinstance(value, Node) and isinstance(value.value, dict):
                found.update(value.value)
            else:
                return None
        return found

    def _called(self, function: Function, arguments: Sequence[Value], keywords: Names, call: ast.AST) -> Value:
        """What ``function`` returns for these arguments."""
        definition, module = function.definition, function.module
        where = Origin(module.source, definition.lineno)
        if self.depth >= _DEEPEST:
            raise self._refused(f"{definition.name}(…) calls itself too deeply", definition, module)
        taken = definition.args
        named = [one.arg for one in (*taken.posonlyargs, *taken.args)]
        every = [*named, *(one.arg for one in taken.kwonlyargs)]
        more = {name: item_of(one, where) for name, one in keywords.items() if name not in every}
        if taken.vararg or len(arguments) > len(named) or (more and taken.kwarg is None):
            raise self._refused(f"{definition.name}(…) takes arguments that are not followed", definition, module)
        inner: Names = {}
        for name, default in zip(reversed(named), reversed(taken.defaults), strict=False):
            inner[name] = self.value(default, module, module.names)
        for one, own in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
            if own is not None:
                inner[one.arg] = self.value(own, module, module.names)
        inner.update(zip(named, arguments, strict=False))
        inner.update({name: one for name, one in keywords.items() if name in every})
        if taken.kwarg is not None:
            inner[taken.kwarg.arg] = Node(more, where)
        missing = next((name for name in every if name not in inner), None)
        if missing is not None:
            raise self._refused(f"{definition.name}(…) needs {missing}, which nobody gives", definition, module)
        self.depth += 1
        try:
            returned = self._body(definition.body, module, inner)
        finally:
            self.depth -= 1
        return returned if returned is not None else Node(None, where)

    def _refused(self, problem: str, at: ast.AST, module: Module) -> PlanError:
        origin = Origin(module.source, getattr(at, "lineno", None))
        return wrong_at(origin, f"{problem}; {self.dialect.instead}")


def _imported(statement: ast.Import | ast.ImportFrom, module: Module) -> Names:
    if isinstance(statement, ast.Import):
        whole = [(one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2 for one in statement.names]
        return {name or path: Elsewhere(path, "") for name, path in whole}
    parts = [statement.module or ""]
    if statement.level:
        around = module.package.split(".")
        parts = [*around[: len(around) - statement.level + 1], *parts]
    path = ".".join(part for part in parts if part)
    return {one.asname or one.name: Elsewhere(path, one.name) for one in statement.names}


def _package_of(path: Path | None) -> str:
    """``torchtitan.models.llama3`` of a file in that folder; of one that is no package, the folder's own name."""
    if path is None:
        return ""
    names: list[str] = []
    folder = path.absolute().parent
    while folder.name and len(names) < 12 and (not names or is_there(folder / "__init__.py")):
        names.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(names))


def _from_here(path: Path) -> str:
    """``path`` as errors call it."""
    here = Path().absolute()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
