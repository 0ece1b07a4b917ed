"""``[ … ]`` and ``[[ … ]]``: true, false or undecided, and what the branches of an undecided one would change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .arithmetic import ArithmeticTextError, evaluate
from .expansion import Expansion
from .origin import Budget, Origin
from .patterns import shell_pattern
from .syntax import (
    Assignment,
    Body,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Literal,
    Loop,
    Parameter,
    Pipeline,
    Simple,
    Substitution,
    Test,
    Word,
)
from .values import Cause, Unknown, Value, is_known, text

Decision: TypeAlias = "bool | Unknown"

_FILE_TESTS = frozenset("abcdefghkprstuwxGLNOS")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_DEEPEST = 40
_LONGEST_PATTERN = 200
_SHOWN = 50
_STEPS = 40
"""Of an operand."""


def negated(decision: Decision) -> Decision:
    """The opposite, where there is one."""
    return decision if isinstance(decision, Unknown) else not decision


def tested(expansion: Expansion, values: list[Value], origin: Origin) -> Decision:
    """``test`` over the ``values`` of its arguments."""
    return _Reader(expansion, [(value, None) for value in values], origin, double=False).whole()


def tested_twice(expansion: Expansion, test: Test) -> Decision:
    """``[[ … ]]``, where the right-hand side of ``==`` is a pattern."""
    operands: list[tuple[Value, Word | None]] = [(expansion.one(word), word) for word in test.words]
    return _Reader(expansion, operands, test.origin, double=True).whole()


class _Reader:
    """Recursive descent over operands; a condition that cannot be read is one that cannot be decided."""

    def __init__(
        self, expansion: Expansion, operands: list[tuple[Value, Word | None]], origin: Origin, *, double: bool
    ) -> None:
        self._expansion = expansion
        self._operands = operands
        self._words = [text(value) if is_known(value) else None for value, _ in operands]
        self._at = 0
        self._depth = 0
        self._double = double
        expansion.variables.ledger.budget.spend(_STEPS * len(operands), origin)
        shown = " ".join(expansion.variables.ledger.shown(value) for value, _ in operands[:_SHOWN])
        brackets = ("[[ ", " ]]") if double else ("[ ", " ]")
        shown = shown if len(shown) <= 50 else shown[:49] + "…"
        self._undecided = Unknown(f"{brackets[0]}{shown}{brackets[1]}", "", Cause.CONDITION, origin)

    def whole(self) -> Decision:
        if not self._operands:
            return False
        decision = self._either()
        return decision if self._at == len(self._operands) else self._cannot()

    def _cannot(self, *values: Value) -> Unknown:
        asks = [unknown.ask for value in values for unknown in self._expansion.variables.ledger.unknowns(value)]
        ask = next(filter(None, asks), "")
        return Unknown(self._undecided.shown, ask, Cause.CONDITION, self._undecided.origin)

    def _either(self) -> Decision:
        return self._joined("||" if self._double else "-o", self._both, True)

    def _both(self) -> Decision:
        return self._joined("&&" if self._double else "-a", self._negation, False)

    def _joined(self, operator: str, part: Callable[[], Decision], settles: bool) -> Decision:
        """Parts between ``operator``; one part that equals ``settles`` decides the whole."""
        decision = part()
        while self._takes(operator):
            other = part()
            if decision is settles or other is settles:
                decision = settles
            elif not isinstance(decision, Unknown):
                decision = other
        return decision

    def _negation(self) -> Decision:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._at = len(self._operands)
            return self._cannot()
        if self._takes("!"):
            return negated(self._negation())
        if self._takes("("):
            decision = self._either()
            self._takes(")")
            return decision
        decision = self._primary()
        self._depth -= 1
        return decision

    def _primary(self) -> Decision:
        at, left = self._at, len(self._operands) - self._at
        if not left:
            return self._cannot()
        value, operator = self._operands[at][0], self._words[at + 1] if left > 2 else None
        if operator is not None and (operator in _NUMBERS or operator in ("=", "==", "!=", "<", ">", "=~")):
            self._at += 3
            return self._binary(value, operator, self._operands[at + 2])
        first = self._words[at]
        if first is not None and re.fullmatch(r"-[a-zA-Z]", first) and left > 1:
            self._at += 2
            return self._unary(first[1], self._operands[at + 1][0])
        self._at += 1
        return self._filled(value)

    def _filled(self, value: Value) -> Decision:
        if self._expansion.is_empty(value):
            return False
        known = [piece for piece in value if piece.text and is_known((piece,))]
        return True if known or is_known(value) else self._cannot(value)

    def _unary(self, letter: str, value: Value) -> Decision:
        match letter:
            case "n":
                return self._filled(value)
            case "z":
                return negated(self._filled(value))
            case "v" if is_known(value):
                return self._expansion.variables.items(text(value)) is not None
        return self._cannot(value) if letter not in _FILE_TESTS else self._cannot()

    def _binary(self, left: Value, operator: str, right: tuple[Value, Word | None]) -> Decision:
        value, word = right
        if operator in _NUMBERS:
            return self._numbers(left, operator, value)
        if operator in ("<", ">", "=~"):
            if is_known(left) and is_known(value) and operator != "=~":
                return (text(left) < text(value)) == (operator == "<")
            return self._cannot(left, value)
        if not (is_known(left) and is_known(value)):
            both_empty = self._expansion.is_empty(left) and self._expansion.is_empty(value)
            return operator != "!=" if both_empty else self._cannot(left, value)
        pattern = self._expansion.pattern(word) if self._double and word is not None else None
        if pattern is not None and any(sign in pattern for sign in "*?["):
            if len(pattern) > _LONGEST_PATTERN or len(text(left)) > 10_000:
                return self._cannot(left, value)
            matcher = shell_pattern(pattern)
            self._expansion.variables.ledger.budget.spend(len(text(left)) * (4 + len(matcher)))
            equal = matcher.matches(text(left))
        else:
            equal = text(left) == text(value)
        return equal == (operator != "!=")

    def _numbers(self, left: Value, operator: str, right: Value) -> Decision:
        if not (is_known(left) and is_known(right)):
            return self._cannot(left, right)
        try:
            budget = self._expansion.variables.ledger.budget
            values = [evaluate(text(value), lambda _: None, budget) for value in (left, right)]
        except ArithmeticTextError:
            return self._cannot()
        if values[0] is None or values[1] is None:
            return self._cannot()
        return _NUMBERS[operator](values[0], values[1])

    def _takes(self, word: str) -> bool:
        if self._at >= len(self._words) or self._words[self._at] != word:
            return False
        operand = self._operands[self._at][1]
        if operand is not None and not (len(operand) == 1 and isinstance(operand[0], Literal)):
            return False
        self._at += 1
        return True


_OPTION = re.compile(r"--[A-Za-z][\w-]*|(?<![\w./-])[a-z]\w*(?:\.[a-z]\w*)+(?==)")
RUNS_PYTHON = re.compile(
    r"\.py\b|^(?:trl|llamafactory-cli|axolotl|axolotl\.cli\.train|swift|torchtitan\.train|tune|litgpt|megatron|nemo|automodel|autotrain|xtuner|ludwig|"
    r"openrlhf\.cli\.\w+)$|\brun_train\.sh$|^(?:\w+\.)+\w*(?:train|tune|tuning|sft|dpo|ppo|grpo|rlhf)\w*$"
)
"""In a word of a command that may run a Python file, or a module: ``python -m recipes.train``."""


@dataclass(slots=True)
class Effects:
    """What commands that may or may not be run would do."""

    appends: dict[str, bool] = field(default_factory=dict)
    """Names that they may set, and whether all they do is to append."""
    options: dict[str, dict[str, None]] = field(default_factory=dict)
    """Arguments (``--…``) in the values that they may give, by the name of the variable."""
    starts: bool = False
    """One of them may run a Python file."""
    launches: bool = False
    """One of them runs another script, or what only a launcher's words say."""


def effects_of(bodies: Iterable[Body], functions: Mapping[str, Body], budget: Budget) -> Effects:
    """What ``bodies`` would do, and those of ``functions`` that they call."""
    effects = Effects()
    for command in _commands(bodies, budget):
        for word in _words_of(command):
            budget.spend(_STEPS * len(word))
            effects.starts = effects.starts or _names_python(word)
        if isinstance(command, Simple):
            effects.launches = effects.launches or _launches(command.words)
            for assignment in command.assignments:
                found = effects.options.setdefault(assignment.name, {})
                for word in _values_of(assignment):
                    for part in word:
                        if isinstance(part, Literal):
                            found.update(dict.fromkeys(_OPTION.findall(part.text)))
    for name, appends in _assigned(bodies, dict(functions), budget):
        effects.appends[name] = effects.appends.get(name, True) and appends
    return effects


_LAUNCHERS = frozenset(("torchrun", "deepspeed", "accelerate", "mpirun"))
_SCRIPT = re.compile(r"\.(?:sh|bash|slurm|sbatch)$")
_RUN_SCRIPTS = frozenset(("bash", "sh", "sbatch", "srun", "nohup"))


def _launches(words: Sequence[Word]) -> bool:
    ends = ["".join(part.text for part in word[-1:] if isinstance(part, Literal)) for word in words]
    scripts = [n for n, end in enumerate(ends) if _SCRIPT.search(end)]
    return bool(words) and (ends[0] in _LAUNCHERS or scripts[:1] == [0] or (bool(scripts) and ends[0] in _RUN_SCRIPTS))


def _names_python(word: Word) -> bool:
    return any(
        RUNS_PYTHON.search(part.text) is not None
        if isinstance(part, (Literal, Substitution))
        else isinstance(part, Parameter) and _names_python(part.operand)
        for part in word
    )


def _words_of(command: Command) -> Iterator[Word]:
    """Every word in ``command`` itself."""
    if isinstance(command, Simple):
        yield from command.words
        yield from (redirect.target for redirect in command.redirects)
        for assignment in command.assignments:
            yield from _values_of(assignment)
    elif isinstance(command, Test) or (isinstance(command, For) and command.words is not None):
        yield from command.words or ()
    elif isinstance(command, Case):
        yield command.word


def _values_of(assignment: Assignment) -> Iterator[Word]:
    yield assignment.value
    yield from (word for _, word in assignment.items or ())


def _assigned(bodies: Iterable[Body], functions: dict[str, Body], budget: Budget) -> Iterator[tuple[str, bool]]:
    for command in _commands(bodies, budget):
        if isinstance(command, For):
            yield command.name, False
        if isinstance(command, Simple):
            for assignment in command.assignments:
                yield assignment.name, assignment.append
            called = command.words[0] if command.words else ()
            if len(called) == 1 and isinstance(called[0], Literal):
                if called[0].text in functions:
                    yield from _assigned([functions.pop(called[0].text)], functions, budget)
                if called[0].text == "read":
                    last = command.words[-1][-1] if command.words[-1] else None
                    if isinstance(last, Literal):
                        yield last.text, False


def _commands(bodies: Iterable[Body], budget: Budget) -> Iterator[Command]:
    """Every command in ``bodies`` and below."""
    for body in bodies:
        for command in body:
            budget.spend(_STEPS, command.origin)
            yield command
            yield from _commands(_inside(command), budget)


def _inside(command: Command) -> list[Body]:
    match command:
        case If():
            return [body for arm in command.arms for body in arm]
        case Loop():
            return [command.condition, command.body]
        case For() | Group() | Function():
            return [command.body]
        case Case():
            return [body for _, body in command.arms]
        case Pipeline():
            return [command.commands]
        case Chain():
            return [(command.first, *(other for _, other in command.rest))]
    return []
