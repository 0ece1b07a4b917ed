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
from itertools import pairwise
from typing import Any

from .budget import Budget
from .builtins import BUILTINS, Written
from .conditions import RUNS_PYTHON, Decision, effects_of, negated, tested_twice
from .origin import Origin, ScriptError
from .parser import parse
from .patterns import shell_pattern
from .slurm import Request, requested, requested_by, variables_of
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
    Started,
    Unknown,
    Value,
    Variables,
    cleaned,
    is_known,
    is_position,
    text,
)

MOST_ROUNDS = 1_000
"""Rounds of one loop that are followed."""
DEEPEST_CALL = 20
_LINE = 10
_COMMAND = 100
"""Steps of a command."""
_WORD = 10
"""Steps of a word of a command that is started."""
_LONGEST_PATTERN = 200
_LONGEST_SUBJECT = 10_000
_VARIABLE = 20
"""Steps of a variable that is exported to a command."""

_SHELL = re.compile(r"(?:.*/)?(?:bash|sh|zsh|dash|ksh)")
_READS = re.compile(rf"{_SHELL.pattern}|sbatch")
"""Commands that run the script on their standard input."""
_SCRIPT = re.compile(r"\.(?:sh|bash|slurm|sbatch)$")
_LAUNCHERS = ("srun", "nohup")
"""Commands that run the one behind them,"""
_NO_PYTHON = {"--no-python", "--no_python"}
"""and what has ``torchrun`` run it as it stands."""
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
    shell.ask(requested(script, source, ledger))
    try:
        shell.follow_file(script, source)
    except (ExitError, LeaveError):
        pass
    except RecursionError:
        raise ScriptError("is nested too deeply to be a launch script", Origin(source)) from None
    if shell.failed is not None and not shell.reading.started:
        raise shell.failed
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
        self._beside = beside
        self.reading = Reading(ledger=variables.ledger)
        self.written = Written(variables, self.reading)
        self.expansion = self.written.expansion
        self._functions: dict[str, Body] = {}
        self.written.functions = self._functions
        self._budget = variables.ledger.budget
        self._calls = 0
        self._running: set[str] = set()
        self.failed: ValueError | None = None
        """Why the first of the scripts that this one runs could not be read."""
        self._launcher: tuple[Value, ...] = ()
        self._job: Mapping[str, Value] = {}
        self._loops: list[str] = []
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

    def ask(self, request: Request) -> None:
        """What is followed from here on is part of a job that makes this ``request`` of Slurm."""
        self._job = variables_of(request)
        self.variables.values |= self._job

    def run(self, body: Body) -> Decision:
        decision: Decision = True
        for command in body:
            decision = self._command(command)
        return decision

    def _command(self, command: Command) -> Decision:
        self._budget.origin = command.origin
        self._budget.spend(_COMMAND)
        return self._follow[type(command)](command)

    def _define(self, function: Function) -> Decision:
        self._functions[function.name] = function.body
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
            if (
                words
                and _READS.fullmatch(text(words[0]))
                and self._reads(words, last, self.written.printed((written,)))
            ):
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
                    self._budget.spend(min(len(text(subject)), _LONGEST_SUBJECT) * (4 + len(matcher)))
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
        self._loops += [command.name] * several
        for value in values[:MOST_ROUNDS]:
            self.variables.assign(command.name, value)
            if not self._round(command.body):
                break
        del self._loops[len(self._loops) - several :]
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
        number = self.expansion.number(_literal(expression, command.origin))
        if isinstance(number, int):
            self.variables.assign(name, (Piece(str(number), command.origin),))
        return number

    def _leave_open(self, branches: Iterable[Body], unknown: Unknown) -> None:
        """Variables that the branches of an undecided condition may set are unknown from here on."""
        effects = effects_of(list(branches), self._functions, self._budget)
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
        if name in self._functions:
            return self._call_with(command, name, words[1:])
        self.written.write(words, command.redirects)
        self.start(words, command)
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
                return self.run(self._functions[name])
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

    def start(self, words: list[Value], command: Simple) -> None:
        """Keeps a command that runs a Python file; follows one that is given to another shell, or to ``sbatch``."""
        self._budget.spend(_WORD * len(words))
        if self._reads(words, command, self.written.input_of(command.redirects)):
            return
        for position, word in enumerate(words[:-2]):
            if _SHELL.fullmatch(text(word)):
                flags = position + 1
                while flags < len(words) - 1 and text(words[flags]).startswith("-"):
                    flags += 1
                    if "c" in text(words[flags - 1]):
                        self._launch(words[:position], words[flags], command.origin)
                        return
        wrapped = _wrapped(words) if text(words[0]) == "sbatch" else None
        if wrapped is not None:
            with self._job_of(words, command):
                self.variables.values |= (passed := _exported_by(words))
                self.variables.exported = self.variables.exported | passed.keys()
                self._launch([], wrapped, command.origin)
            return
        if self._runs_a_script(words, command):
            return
        if text(words[0]) in _REPEATS or not any(RUNS_PYTHON.search(text(word)) for word in words):
            return
        self._budget.spend(_VARIABLE * len(self.variables.exported))
        environment = {
            name: value
            for name in sorted(self.variables.exported)
            if (value := self.variables.scalar(name)) is not None
        }
        for assignment in command.assignments:
            environment[assignment.name] = self.expansion.one(assignment.value)
        given = {name: value for name, value in self.variables.given.items() if name.startswith("SLURM_")}
        job = {**self._job, **given}
        words = [*self._launcher, *words]
        self.reading.started.append(Started((*words,), environment, command.origin, job, (*self._loops,)))

    def _reads(self, words: list[Value], command: Simple, given: Value | None) -> bool:
        """Follows ``given``, the standard input of a shell or of ``sbatch``."""
        flags = "".join(text(word)[1:2] for word in words[1:])
        plain = words and _READS.fullmatch(text(words[0])) and all(text(word).startswith("-") for word in words[1:])
        if not plain or given is None or "c" in flags:
            return False
        with self._job_of(words, command, text(given)):
            self._launch([], given, command.origin)
        return True

    @contextmanager
    def _job_of(self, words: list[Value], command: Simple, script: str = "", source: str = "") -> Iterator[None]:
        """What is followed within is the job that the command ``words`` start: one of its own by ``sbatch``, or where
        there is none yet. Nothing comes back."""
        variables = self.variables
        before = self._job, variables.values, variables.exported
        variables.values = dict(variables.values)
        try:
            if text(words[0]) == "sbatch" or not self._job:
                ledger, origin = self.reading.ledger, command.origin
                asked = {**requested(script, source or origin.source, ledger), **requested_by(words, origin, ledger)}
                self.ask(asked)
            yield
        finally:
            self._job, variables.values, variables.exported = before

    def _runs_a_script(self, words: list[Value], command: Simple) -> bool:
        """Follows ``bash train.sh 8 4096``, ``./train.sh`` and ``srun bash train.sh`` as a process of its own: what is
        exported, and no more, goes to it, and nothing comes back. A job's own flags (``sbatch --nodes=4 …``)
        stand over its lines. A script that cannot be read matters only where no other one starts anything."""
        at = next((n for n, word in enumerate(words) if _SCRIPT.search(text(word))), None)
        launcher = self._in_front(words[:at]) if at is not None else None
        if at is None or launcher is None:
            return False
        word = words[at]
        name = text(word) if is_known(word) else beside_the_script(self.reading.ledger.shown(word))
        name = name.removeprefix("./")
        if not name or name in self._running or RUNS_PYTHON.search(name):
            return False
        variables, functions = self.variables, dict(self._functions)
        before, given = (
            (variables.values, variables.positional, variables.exported, variables.given),
            variables.exported,
        )
        passed = {name: value for name, value in variables.values.items() if name in given or name in self._job}
        of_command = {one.name: self.expansion.one(one.value) for one in command.assignments}
        of_command |= _exported_by(words[:at])
        passed |= of_command
        started_by = self._launcher
        self._running.add(name)
        try:
            made = self.reading.files.get(name, self.reading.files.get(f"./{name}"))
            found = self._beside(name) if made is None else (text(made), command.origin.source)
            if found is None:
                self.reading.missing.append((name, command.origin))
                return False
            variables.values, variables.positional = dict(passed), words[at + 1 :]
            variables.given = {name: value for name, value in variables.given.items() if not is_position(name)}
            variables.exported = {*given, *of_command}
            self._functions.clear()
            self._launcher = (*started_by, *launcher)
            with self._job_of(words[:at] or words, command, *found):
                if made is None:
                    self.follow_file(cleaned(found[0]), found[1])
                else:
                    self.follow(made, command.origin)
        except (ExitError, LeaveError):
            pass
        except ValueError as error:
            self.failed = self.failed or error
        finally:
            variables.values, variables.positional, variables.exported, variables.given = before
            self._functions.clear()
            self._functions.update(functions)
            self._launcher = started_by
            self._running.discard(name)
        return True

    @staticmethod
    def _in_front(words: list[Value]) -> list[Value] | None:
        """What launches the shell whose command ``words`` begin; nothing where they are another command's."""
        names = [text(word) for word in words]
        shell = next((n for n, name in enumerate(names) if _READS.fullmatch(name)), None)
        if shell is not None:
            of_sbatch = "sbatch" in names
            behind = [before for before, name in pairwise(names[shell:]) if not name.startswith("-")]
            if any(not of_sbatch or not before.startswith("-") or "=" in before for before in behind):
                return None
            if of_sbatch and not all(map(is_known, words[shell:])):
                return None
        launcher = words[:shell]
        return launcher if not launcher or names[0] in _LAUNCHERS or _NO_PYTHON & {*names} else None

    def _launch(self, launcher: list[Value], script: Value, origin: Origin) -> None:
        before, self._launcher = self._launcher, (*self._launcher, *launcher)
        try:
            self.follow(script, origin)
        finally:
            self._launcher = before

    def follow(self, script: Value, origin: Origin) -> Decision:
        """Follows ``script``, which the script itself has put together."""
        if self._calls >= DEEPEST_CALL:
            return True
        self.reading.ledger.made(script)
        self._calls += 1
        try:
            return self.run(parse(text(script), _pieces_of(script, origin), self._budget))
        finally:
            self._calls -= 1

    def follow_file(self, script: str, source: str) -> None:
        """Follows the whole of ``script``, called ``source``."""
        lines = 1 + script.count("\n")
        self._budget.make(lines, steps=_LINE * lines)
        self.run(parse(script, _lines_of(script, source), self._budget))

    def source(self, words: list[Value]) -> bool:
        """Follows the script that the first of ``words`` names, with the others as its arguments, if it can be had."""
        name = text(words[0]) if is_known(words[0]) else beside_the_script(self.reading.ledger.shown(words[0]))
        found = self._beside(name) if name and self._calls < DEEPEST_CALL else None
        if found is None:
            return False
        with self._called(words[1:] or self.variables.positional):
            self.follow_file(cleaned(found[0]), found[1])
        return True


_BESIDE = re.compile(r"(?:\$\(dirname [^()]*\)|\$PWD)/+([\w.-][\w./-]*)")
"""A file beside the script, by ``OWN_FOLDER`` or the folder of what a variable holds."""


def beside_the_script(shown: str) -> str:
    """The path from the script's folder that ``shown``, a word that is not known, means; empty if it means none."""
    found = _BESIDE.fullmatch(shown)
    return found[1] if found is not None else ""


def _literal(expression: str, origin: Origin) -> tuple[Literal, ...]:
    return (Literal(expression, True, origin),)


def _wrapped(words: list[Value]) -> Value | None:
    """The script that ``sbatch --wrap "srun bash train.sh"`` is given (man sbatch)."""
    for word, behind in pairwise([*words, ()]):
        if text(word) == "--wrap":
            return behind
        if word[:1] and word[0].text.startswith("--wrap="):
            return (word[0]._replace(text=word[0].text.removeprefix("--wrap=")), *word[1:])
    return None


_EXPORTS = re.compile(r"(?:^|,)([A-Za-z_]\w*)=([^,]*)")


def _exported_by(words: list[Value]) -> dict[str, Value]:
    """Variables that ``--export=ALL,TP=8,PP=2`` of ``sbatch`` or ``srun`` gives the script (man sbatch)."""
    found: dict[str, Value] = {}
    for before, word in pairwise([(), *words]):
        name, equals, said = text(word).partition("=")
        said = said if name == "--export" and equals else text(word) if text(before) == "--export" else ""
        found |= {one[1]: (Piece(one[2], word[0].origin),) for one in _EXPORTS.finditer(said)}
    return found


_REPEATS = frozenset(
    {
        "echo",
        "printf",
        "cat",
        "ls",
        "cp",
        "mv",
        "ln",
        "rm",
        "mkdir",
        "cd",
        "chmod",
        "grep",
        "sed",
        "awk",
        "tee",
        "which",
    }
)
"""Commands that run none of the files that they name."""
