"""A launch script read as its shell would read it, with nothing run: which commands would be started, with which words.

Assignments, arrays, functions, loops over known words, here-documents and conditions that can be decided
are followed. What only a running machine knows (``$(…)``, variables of the environment, files) stays an
unknown that travels with the text, so that it matters only where it reaches something that is modelled.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .builtins import BUILTINS, Written
from .conditions import Decision, effects_of, negated, tested_twice
from .origin import Budget, Origin, ScriptError
from .parser import parse
from .patterns import shell_pattern
from .slurm import requested
from .starting import Starting, beside_the_script
from .syntax import (
    DECLARATIONS,
    Assignment,
    Body,
    Case,
    Chain,
    Command,
    Evaluation,
    For,
    Function,
    Group,
    If,
    Literal,
    Loop,
    Pipeline,
    Simple,
    Test,
)
from .values import (
    Array,
    Cause,
    ExitError,
    LeaveError,
    Ledger,
    Piece,
    Reading,
    Unknown,
    Value,
    Variables,
    cleaned,
    is_known,
    text,
)

MOST_ROUNDS = 1_000
"""Rounds of one loop that are followed."""
DEEPEST_CALL = 20
_LINE = 10
_COMMAND = 100
"""Steps of a command."""
_LONGEST_PATTERN = 200
_LONGEST_SUBJECT = 10_000
_UPDATE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.+))\s*", re.ASCII | re.DOTALL)

Beside = Callable[[str], "tuple[str, str] | None"]
"""The text of a script that another one sources by this name, and what errors call it; nothing if it cannot be had."""


def alone(_: str) -> None:
    """A script beside which there are no others."""


def read_script(script: str, source: str, given: Mapping[str, str] | None = None, beside: Beside = alone) -> Reading:
    """The commands that ``script`` (called ``source`` in errors) would start; ``given`` are variables from outside."""
    ledger = Ledger(Budget(Origin(source)))
    outside = {name: (Piece(cleaned(value), Origin(f"--set {name}")),) for name, value in (given or {}).items()}
    script = cleaned(script)
    shell = Shell(Variables(outside, ledger), beside)
    shell.starting.ask(requested(script, source, ledger))
    try:
        shell.follow_file(script, source)
    except (ExitError, LeaveError):
        pass
    except RecursionError:
        raise ScriptError("is nested too deeply to be a launch script", Origin(source)) from None
    if shell.starting.failed is not None and not shell.reading.started:
        raise shell.starting.failed
    return shell.reading


def _lines_of(script: str, source: str) -> Callable[[int], Origin]:
    starts = [0, *(match.end() for match in re.finditer("\n", script))]
    origins = [Origin(source, line) for line in range(1, len(starts) + 1)]
    return lambda offset: origins[bisect_right(starts, offset) - 1]


def _pieces_of(value: Value, origin: Origin) -> Callable[[int], Origin]:
    starts: list[int] = []
    offset = 0
    for piece in value:
        starts.append(offset)
        offset += len(piece.text)
    return lambda at: value[max(bisect_right(starts, at) - 1, 0)].origin if value else origin


class Shell:
    """Follows commands; each returns whether it would succeed, as far as that can be said."""

    def __init__(self, variables: Variables, beside: Beside = alone) -> None:
        self.variables = variables
        self.beside = beside
        self.reading = Reading(ledger=variables.ledger)
        self.written = Written(variables, self.reading)
        self.expansion = self.written.expansion
        self.functions: dict[str, Body] = {}
        self.written.functions = self.functions
        self.budget = variables.ledger.budget
        self._calls = 0
        self.loops: list[str] = []
        self.starting = Starting(self)
        self._follow: dict[type, Callable[[Any], Decision]] = {
            Simple: self._simple,
            Chain: self._chain,
            Pipeline: self._pipeline,
            Test: lambda test: tested_twice(self.expansion, test),
            Evaluation: self.evaluate,
            If: self._if,
            Loop: self._loop,
            For: self._for,
            Case: self._case,
            Group: lambda group: self.run(group.body),
            Function: self._define,
        }

    def run(self, body: Body) -> Decision:
        decision: Decision = True
        for command in body:
            decision = self._command(command)
        return decision

    def _command(self, command: Command) -> Decision:
        self.budget.origin = command.origin
        self.budget.spend(_COMMAND)
        return self._follow[type(command)](command)

    def _define(self, function: Function) -> Decision:
        self.functions[function.name] = function.body
        return True

    # --- commands made of commands

    def _chain(self, chain: Chain) -> Decision:
        decision = self._command(chain.first)
        for operator, command in chain.rest:
            if isinstance(decision, Unknown):
                self._leave_open([(command,)], decision)
            elif decision == (operator == "&&"):
                decision = self._guarded((command,))
        return decision

    def _guarded(self, body: Body) -> Decision:
        """Runs a branch. One that ends in ``exit`` is a check that stops a wrong call: the script is taken to pass it,
        unless it has started something by then."""
        before = len(self.reading.started)
        try:
            return self.run(body)
        except ExitError:
            if len(self.reading.started) > before:
                raise
            return True

    def _pipeline(self, pipeline: Pipeline) -> Decision:
        decision: Decision = True
        *firsts, last = pipeline.commands
        for command in firsts:
            decision = self._command(command)
        if firsts and isinstance(last, Simple) and not last.assignments:
            words = [value for word in last.words for value in self.expansion.fields(word)]
            written = firsts[0] if len(firsts) == 1 else Pipeline((*firsts,), False, last.origin)
            if self.starting.reads(words, last, lambda: self.written.printed((written,))):
                return True
        decision = self._command(last)
        return negated(decision) if pipeline.negated else decision

    def _if(self, command: If) -> Decision:
        for position, (condition, body) in enumerate(command.arms):
            decision = self.run(condition) if condition else True
            if isinstance(decision, Unknown):
                self._leave_open([arm for _, arm in command.arms[position:]], decision)
                return True
            if decision:
                return self._guarded(body)
        return True

    def _case(self, command: Case) -> Decision:
        subject = self.expansion.one(command.word)
        if not is_known(subject):
            unknown = self.reading.ledger.unknowns(subject)[0]
            shown = f"case {self.reading.ledger.shown(subject)}"
            self._leave_open(
                [body for _, body in command.arms], Unknown(shown, unknown.ask, Cause.CONDITION, command.origin)
            )
            return True
        for patterns, body in command.arms:
            for word in patterns:
                pattern = self.expansion.pattern(word)
                if pattern is not None and len(pattern) <= _LONGEST_PATTERN:
                    matcher = shell_pattern(pattern)
                    self.budget.spend(min(len(text(subject)), _LONGEST_SUBJECT) * (4 + len(matcher)))
                    if matcher.matches(text(subject)[:_LONGEST_SUBJECT]):
                        return self._guarded(body)
        return True

    def _loop(self, command: Loop) -> Decision:
        for _ in range(MOST_ROUNDS):
            decision = self.run(command.condition)
            if isinstance(decision, Unknown):
                self._leave_open([command.body], decision)
                return True
            if decision == command.until or not self._round(command.body):
                return True
        shown = "a loop that goes on too long"
        self._leave_open([command.body], Unknown(shown, "", Cause.CONDITION, command.origin))
        return True

    def _for(self, command: For) -> Decision:
        if command.words is None and not command.name:
            self._leave_open([command.body], Unknown("for ((…))", "", Cause.CONDITION, command.origin))
            return True
        if command.words is None:
            values = list((self.variables.items("@") or {}).values())
        else:
            values = [value for word in command.words for value in self.expansion.fields(word)]
        several = len(values) > 1 and command.name not in self.variables.given
        self.loops += [command.name] * several
        for value in values[:MOST_ROUNDS]:
            self.variables.assign(command.name, value)
            if not self._round(command.body):
                break
        del self.loops[len(self.loops) - several :]
        return True

    def _round(self, body: Body) -> bool:
        """One round of a loop; whether it goes on."""
        try:
            self.run(body)
        except LeaveError as leave:
            if leave.kind == "return":
                raise
            return leave.kind == "continue"
        return True

    def evaluate(self, command: Evaluation) -> Decision:
        number = self._arithmetic(command)
        if isinstance(number, Unknown):
            return Unknown("((…))", number.ask, Cause.CONDITION, command.origin)
        return number != 0

    def _arithmetic(self, command: Evaluation) -> int | Unknown:
        value = self.expansion.one(command.expression)
        update = _UPDATE.fullmatch(text(value)) if is_known(value) else None
        if update is None:
            return self.expansion.number(command.expression)
        name, step, operator, expression = update.groups()
        expression = f"{name}{step[0]}1" if step else f"{name}{operator}({expression})" if operator else expression
        number = self.expansion.number((Literal(expression, True, command.origin),))
        if isinstance(number, int):
            self.variables.assign(name, (Piece(str(number), command.origin),))
        return number

    def _leave_open(self, branches: Iterable[Body], unknown: Unknown) -> None:
        """Variables that the branches of an undecided condition may set are unknown from here on."""
        effects = effects_of(list(branches), self.functions, self.budget)
        if effects.starts:
            self.reading.undecided.append(unknown)
        elif effects.launches:
            self.reading.perhaps.append(unknown)
        for name, appends in effects.appends.items():
            if name in self.variables.given:
                continue
            options = tuple(effects.options.get(name, ()))
            origin = unknown.origin
            open_value = self.reading.ledger.value(
                Unknown(unknown.shown, unknown.ask, Cause.CONDITION, origin, options)
            )
            old = self.variables.values.get(name)
            if not appends or old is None:
                self.variables.assign(name, open_value)
            elif isinstance(old, dict):
                self.variables.append(name, {str(len(old)): open_value})
            else:
                self.variables.assign(name, (*old, Piece(" ", origin), *open_value))

    # --- simple commands

    def _simple(self, command: Simple) -> Decision:
        words = [value for word in command.words for value in self.expansion.fields(word)]
        name = text(words[0]) if words else ""
        if not words or name in DECLARATIONS:
            for assignment in command.assignments:
                self._assign(assignment, exported=name in ("export", "declare", "typeset"))
            if name == "export":
                self.variables.exported.update(text(word) for word in words[1:])
            return True
        builtin = BUILTINS.get(name)
        if builtin is not None:
            return builtin(self, words, command)
        if name in self.functions:
            return self._call_with(command, name, words[1:])
        self.written.write(words, command.redirects)
        self.starting.start(words, command)
        return True

    def _assign(self, assignment: Assignment, *, exported: bool) -> None:
        name = assignment.name
        if exported:
            self.variables.exported.add(name)
        if name in self.variables.given:
            return
        old = self.variables.values.get(name)
        if assignment.items is not None:
            if not assignment.append:
                self.variables.assign(name, self._items(assignment, {}))
            else:
                self.variables.append(name, self._items(assignment, self.variables.items(name) or {}))
            return
        value = self.expansion.one(assignment.value)
        if assignment.index is not None:
            number = self.expansion.number(assignment.index)
            key = str(number) if isinstance(number, int) else text(self.expansion.one(assignment.index))
            before = (self.variables.items(name) or {}).get(key, ()) if assignment.append else ()
            self.variables.append(name, {key: (*before, *value)})
        elif isinstance(old, dict):
            first = old.get("0", ()) if assignment.append else ()
            self.variables.append(name, {"0": (*first, *value)})
        else:
            self.variables.assign(name, (*(old or ()), *value) if assignment.append else value)

    def _items(self, assignment: Assignment, old: Array) -> Array:
        """The items that ``assignment`` adds to ``old``."""
        items: Array = {}
        size = len(old)
        for index, word in assignment.items or ():
            if index is not None:
                key = text(self.expansion.one(index))
                size += key not in old and key not in items
                items[key] = self.expansion.one(word)
                continue
            for value in self.expansion.fields(word):
                key = str(size)
                size += key not in old and key not in items
                items[key] = value
        return items

    def _call_with(self, command: Simple, name: str, arguments: list[Value]) -> Decision:
        """Calls a function with the variables in front of it, which are exported and last as long as the call."""
        variables = self.variables
        set_for_it = [one for one in command.assignments if one.name not in variables.given]
        before = {one.name: variables.values.get(one.name) for one in set_for_it}
        exported = {*variables.exported}
        for assignment in set_for_it:
            self._assign(assignment, exported=True)
        try:
            return self._call(name, arguments)
        finally:
            for one, value in before.items():
                variables.values.pop(one, None)
                if value is not None:
                    variables.values[one] = value
                variables.exported -= {one} - exported

    def _call(self, name: str, arguments: list[Value]) -> Decision:
        if self._calls < DEEPEST_CALL:
            with self._called(arguments):
                return self.run(self.functions[name])
        return True

    @contextmanager
    def _called(self, arguments: list[Value]) -> Iterator[None]:
        """What is followed has ``arguments`` of its own, and ends at ``return``."""
        before, self.variables.positional = self.variables.positional, arguments
        self._calls += 1
        try:
            yield
        except LeaveError as leave:
            if leave.kind != "return":
                raise
        finally:
            self.variables.positional = before
            self._calls -= 1

    def follow(self, script: Value, origin: Origin) -> Decision:
        """Follows ``script``, which the script itself has put together."""
        if self._calls >= DEEPEST_CALL:
            return True
        self.reading.ledger.made(script)
        self._calls += 1
        try:
            return self.run(parse(text(script), _pieces_of(script, origin), self.budget))
        finally:
            self._calls -= 1

    def follow_file(self, script: str, source: str) -> None:
        """Follows the whole of ``script``, called ``source``."""
        lines = 1 + script.count("\n")
        self.budget.make(lines, steps=_LINE * lines)
        self.run(parse(script, _lines_of(script, source), self.budget))

    def source(self, words: list[Value]) -> bool:
        """Follows the script that the first of ``words`` names, with the others as its arguments, if it can be had."""
        name = text(words[0]) if is_known(words[0]) else beside_the_script(self.reading.ledger.shown(words[0]))
        found = self.beside(name) if name and self._calls < DEEPEST_CALL else None
        if found is None:
            return False
        with self._called(words[1:] or self.variables.positional):
            self.follow_file(cleaned(found[0]), found[1])
        return True
