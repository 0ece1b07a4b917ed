"""Expands words: parameters, arithmetic and command substitutions in place, split into fields as bash does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .arithmetic import ArithmeticTextError, evaluate
from .origin import Origin
from .patterns import Matcher, shell_pattern
from .syntax import Body, Literal, Parameter, Part, Placeholder, Substitution, Word
from .values import Cause, Piece, Unknown, Value, Variables, is_known, is_position, joined, text

Capture = Callable[[Body], "Value | None"]

_LONGEST_PATTERN = 200
_LONGEST_SUBJECT = 2_000
_LONGEST_SHOWN = 40
_DEEPEST_REFERENCE = 8
_PART = 10
"""Steps of a part of a word."""

OWN_FOLDER = "$(dirname $0)"
"""How the folder of the script is shown, however the script asks for it."""
_RESOLVES = r"(?:readlink -f|realpath)"
_SCRIPT = r"(?:-- )?\"?\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\})\"?"
_DIRNAME = rf"(?:\$\( ?dirname (?:-- )?(?:{_SCRIPT}|\"?\$\({_RESOLVES} {_SCRIPT}\)\"?) ?\)|`dirname {_SCRIPT}`)"
_REDIRECTS = r"(?: *\d?&?>&? ?[\w/]+)*"
_OWN_FOLDER = re.compile(
    rf"{_DIRNAME}|\$\({_RESOLVES} \"?{_DIRNAME}\"?\)|\$\(pwd(?: -P)?\)|`pwd`"
    rf"|\$\( ?cd (?:-P |-- )*\"?{_DIRNAME}\"?{_REDIRECTS} ?(?:&&|;) ?pwd(?: -P)? ?\)"
)
"""``$(dirname $0)``, ``$(dirname "${BASH_SOURCE[0]}")``, ``$(dirname "$(readlink -f "$0")")``,
``$(cd "$(dirname "$0")" && pwd)``; and ``$(pwd)``, since a script is read as if it were started in its folder."""


class Expansion:
    """Expands words over ``variables``; ``capture`` says what commands print, where that can be said."""

    def __init__(self, variables: Variables, capture: Capture) -> None:
        self.variables = variables
        self._budget = variables.ledger.budget
        self._capture = capture

    def one(self, word: Word) -> Value:
        """``word`` as one value, as in an assignment."""
        self._budget.spend(_PART * len(word))
        if len(word) == 1 and isinstance(word[0], Literal):
            self._budget.search(len(word[0].text))
            return (Piece(word[0].text, word[0].origin),)
        pieces: list[Piece] = []
        for part in word:
            values = self._values(part)
            pieces.extend(joined(values, " ", part.origin) if len(values) > 1 else values[0] if values else ())
        return self.variables.ledger.made(tuple(pieces))

    def fields(self, word: Word) -> list[Value]:
        """``word`` as the words that it becomes: none, one or several."""
        self._budget.spend(_PART * len(word))
        if len(word) == 1 and isinstance(word[0], Literal):
            self._budget.search(len(word[0].text))
            return [(Piece(word[0].text, word[0].origin),)]
        fields: list[Value] = []
        current: list[Piece] | None = None
        for part, chosen in self._with_operands(word):
            whole = part.quoted or (isinstance(part, Literal) and not chosen)
            for position, value in enumerate(self._values(part)):
                if position and current is not None:
                    fields.append(tuple(current))
                    current = None
                if not whole:
                    current = self._split(value, current, fields)
                elif current is None:
                    current = list(value)
                else:
                    current.extend(value)
        if current is not None:
            fields.append(tuple(current))
        for value in fields:
            self.variables.ledger.made(value)
        return fields

    def _with_operands(self, word: Word) -> Iterator[tuple[Part, bool]]:
        """The parts of ``word``, those of ``${NAME:-operand}`` in its place where it is chosen: quotes in it count."""
        for part in word:
            choice = isinstance(part, Parameter) and not part.quoted and part.operator in ("-", ":-", "+", ":+")
            if not choice or not isinstance(part, Parameter) or part.name in ("@", "*"):
                yield part, False
                continue
            value = self._lookup(part)
            missing = value is None or (part.operator.startswith(":") and self.is_empty(value))
            if missing == part.operator.endswith("-"):
                yield from ((inner, True) for inner, _ in self._with_operands(part.operand))
            elif not missing:
                yield part, False

    def pattern(self, word: Word) -> str | None:
        """``word`` as a pattern in which quoted characters stand for themselves; nothing if it is not known."""
        parts: list[str] = []
        for part in word:
            for value in self._values(part):
                if not is_known(value):
                    return None
                plain = text(value)
                parts.append(re.sub(r"([*?\[])", r"[\1]", plain) if part.quoted else plain)
        return "".join(parts)

    def number(self, expression: Word) -> int | Unknown:
        """The value of an arithmetic ``expression``, or the unknown that it needs."""
        value = self.one(expression)
        origin = expression[0].origin if expression else Origin("")
        missing = self.variables.ledger.unknowns(value)
        if missing:
            return missing[0]
        lacking: list[Unknown] = []
        try:
            result = evaluate(text(value), lambda name: self._integer(name, origin, lacking, 0), self._budget)
        except ArithmeticTextError:
            return Unknown(text(value)[:_LONGEST_SHOWN], "", Cause.OTHER, origin)
        return lacking[0] if result is None and lacking else result if result is not None else 0

    def _integer(self, name: str, origin: Origin, lacking: list[Unknown], depth: int) -> int | None:
        value = self.variables.scalar(name)
        if value is None:
            lacking.append(Unknown(f"${name}", name, Cause.UNSET, origin))
            return None
        unknowns = self.variables.ledger.unknowns(value)
        if unknowns or depth > _DEEPEST_REFERENCE:
            lacking.append(unknowns[0] if unknowns else Unknown(f"${name}", name, Cause.OTHER, origin))
            return None
        return evaluate(text(value), lambda other: self._integer(other, origin, lacking, depth + 1), self._budget)

    def _split(self, value: Value, current: list[Piece] | None, fields: list[Value]) -> list[Piece] | None:
        """Adds the blank-separated words of ``value`` to ``current`` and ``fields``."""
        for piece in value:
            self._budget.spend(1 + len(piece.text) // 4)
            for stretch in re.findall(r"[ \t\n]+|[^ \t\n]+", piece.text):
                if stretch[0] in " \t\n":
                    if current is not None:
                        fields.append(tuple(current))
                    current = None
                else:
                    current = [] if current is None else current
                    current.append(Piece(stretch, piece.origin))
        return current

    def _values(self, part: Part) -> list[Value]:
        """The values of ``part``: several for ``[@]``, else one."""
        match part:
            case Literal():
                return [(Piece(part.text, part.origin),)]
            case Parameter():
                return self._parameter(part)
            case Placeholder():
                return [self._unknown(part.text, "", Cause.PLACEHOLDER, part.origin)]
            case Substitution():
                captured = self._capture(part.body)
                shown = OWN_FOLDER if _OWN_FOLDER.fullmatch(part.text) else part.text
                return [captured if captured is not None else self._unknown(shown, "", Cause.COMMAND, part.origin)]
        number = self.number(part.expression)
        if isinstance(number, int):
            return [(Piece(str(number), part.origin),)]
        return [self._unknown(part.text, number.ask, number.cause, number.origin)]

    def _unknown(self, shown: str, ask: str, cause: Cause, origin: Origin) -> Value:
        return self.variables.ledger.value(Unknown(_cut(shown), ask, cause, origin))

    # --- parameters

    def _parameter(self, part: Parameter) -> list[Value]:
        every = part.name in ("@", "*") or (part.item is not None and text(self.one(part.item)) in ("@", "*"))
        if every:
            return self._every(part)
        value = self._lookup(part)
        if part.operator == "indirect":
            return [self._indirect(part, value)]
        if part.operator == "length":
            return [self._length(part, value)]
        if part.operator.strip(":") in ("-", "=", "+", "?") and part.operator != ":":
            return self._conditional(part, value)
        if value is None:
            return [self._unset(part)]
        return [self._changed(part, value) if part.operator else value]

    def _every(self, part: Parameter) -> list[Value]:
        items = self.variables.items(part.name) or {}
        self._budget.spend(len(items), part.origin)
        if part.operator == "length":
            return [(Piece(str(len(items)), part.origin),)]
        if part.operator == "indirect":
            return [(Piece(key, part.origin),) for key in items]
        values = list(items.values())
        if part.operator.strip(":") in ("-", "="):
            values = values or self.fields(part.operand)
        elif part.operator.strip(":") == "+" and part.operator:
            values = [self.one(part.operand)] if values and len(part.operand) != 1 else values
        elif part.operator == ":":
            values = self._slice(part, values)
        elif part.operator:
            values = [self._changed(part, value) for value in values]
        together = part.name == "*" or (part.item is not None and text(self.one(part.item)) == "*")
        if part.quoted and together and values:
            return [joined(values, " ", part.origin)]
        return values

    def _slice(self, part: Parameter, values: list[Value]) -> list[Value]:
        first, _, count = text(self.one(part.operand)).partition(":")
        start = int(first) if is_position(first.strip()) else 0
        start = max(start - 1, 0) if part.name in ("@", "*") else start
        return values[start : start + int(count)] if is_position(count.strip()) else values[start:]

    def _lookup(self, part: Parameter) -> Value | None:
        name = part.name
        if name == "#":
            return (Piece(str(len(self.variables.items("@") or {})), part.origin),)
        if name == "?":
            return (Piece("0", part.origin),)
        if name in ("$", "!", "-") or name == "0":
            return self._unknown(f"${name}", "", Cause.OTHER, part.origin)
        if part.item is None:
            return self.variables.scalar(name)
        items = self.variables.items(name)
        if items is None:
            return None
        said = self.one(part.item)
        key = text(said)
        if key not in items and not is_known(said):
            unknown = self.variables.ledger.unknowns(said)[0]
            return self._unknown(f"${{{name}[{unknown.shown}]}}", unknown.ask, Cause.OTHER, part.origin)
        if key not in items:
            number = self.number(part.item)
            key = str(number) if isinstance(number, int) else key
            if re.fullmatch(r"-\d{1,9}", key) and items:
                self._budget.spend(len(items), part.origin)
                key = list(items)[max(int(key), -len(items))]
        return items.get(key, () if items else None)

    def _unset(self, part: Parameter) -> Value:
        return self._unknown(f"${part.name}", part.name, Cause.UNSET, part.origin)

    def _indirect(self, part: Parameter, value: Value | None) -> Value:
        name = text(value) if value is not None and is_known(value) else ""
        found = self.variables.scalar(name) if name else None
        return found if found is not None else self._unknown(f"${{!{part.name}}}", part.name, Cause.OTHER, part.origin)

    def _length(self, part: Parameter, value: Value | None) -> Value:
        if value is None:
            return self._unset(part)
        if not is_known(value):
            return self._opaque(value)
        return (Piece(str(len(text(value))), part.origin),)

    def _conditional(self, part: Parameter, value: Value | None) -> list[Value]:
        """``-``, ``=``, ``+`` and ``?``, with a colon also where the value is empty."""
        missing = value is None or (part.operator.startswith(":") and self.is_empty(value))
        operator = part.operator.strip(":")
        if operator == "+":
            return [] if missing else self._operand(part)
        if not missing and value is not None:
            return [value]
        if operator == "?":
            return [self._unset(part)]
        result = self._operand(part)
        if operator == "=":
            self.variables.assign(part.name, joined(result, " ", part.origin))
        return result

    def _operand(self, part: Parameter) -> list[Value]:
        return [self.one(part.operand)]

    def is_empty(self, value: Value) -> bool:
        """Whether ``value`` is empty where nothing is set that the script does not set."""
        unknowns = self.variables.ledger.unknowns(value)
        return len(text(value)) == len(unknowns) and all(unknown.cause is Cause.UNSET for unknown in unknowns)

    def _opaque(self, value: Value) -> Value:
        """The first unknown of ``value``, which stands for what an operator makes of it."""
        return self.variables.ledger.value(self.variables.ledger.unknowns(value)[0])

    def _changed(self, part: Parameter, value: Value) -> Value:
        """``#``, ``%``, ``/``, ``^``, ``,`` and ``:`` applied to ``value``."""
        if not is_known(value):
            return self._opaque(value)
        plain, operator = text(value), part.operator
        origin = value[0].origin if value else part.origin
        if operator == ":":
            return (Piece(self._substring(plain, part), origin),)
        if operator == "@":
            return value
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            return (Piece(change(plain) if len(operator) == 2 else change(plain[:1]) + plain[1:], origin),)
        pattern = self.pattern(part.operand)
        if pattern is None or len(pattern) > _LONGEST_PATTERN or len(plain) > _LONGEST_SUBJECT:
            return self._unknown(f"${{{part.name}{operator}…}}", "", Cause.OTHER, part.origin)
        matcher = shell_pattern(pattern[1:] if operator == "/" and pattern[:1] in ("#", "%") else pattern)
        self._budget.spend(_PART + len(plain) * (4 + len(matcher)), part.origin)
        if operator[0] in "#%":
            return (Piece(_without(operator[0], plain, matcher, longest=len(operator) == 2), origin),)
        replacement = self.one(part.replacement)
        if not is_known(replacement):
            return self._opaque(replacement)
        if operator == "/" and pattern[:1] in ("#", "%"):
            rest = _without(pattern[0], plain, matcher, longest=True)
            if len(rest) == len(plain):
                return value
            return (Piece(text(replacement) + rest if pattern[0] == "#" else rest + text(replacement), origin),)
        if not any(character in pattern for character in "*?["):
            return (Piece(plain.replace(pattern, text(replacement), -1 if operator == "//" else 1), origin),)
        return (Piece(_replaced(plain, matcher, text(replacement), every=operator == "//"), origin),)

    def _substring(self, plain: str, part: Parameter) -> str:
        first, _, count = text(self.one(part.operand)).partition(":")
        numbers = [int(n) if re.fullmatch(r"\s*-?\d{1,6}\s*", n) else None for n in (first, count)]
        start = numbers[0] or 0
        start = max(len(plain) + start, 0) if start < 0 else start
        if numbers[1] is None:
            return plain[start:]
        return plain[start : start + numbers[1] if numbers[1] >= 0 else numbers[1]]


def _without(sign: str, plain: str, matcher: Matcher, *, longest: bool) -> str:
    """``plain`` without what ``matcher`` matches at its start (``#``) or at its end (``%``)."""
    found = matcher.ends(plain) if sign == "#" else matcher.backwards().ends(plain[::-1])
    if not found:
        return plain
    length = found[-1 if longest else 0]
    return plain[length:] if sign == "#" else plain[: len(plain) - length]


def _replaced(plain: str, matcher: Matcher, replacement: str, *, every: bool) -> str:
    """``plain`` with the first longest match of ``matcher`` replaced, or all of them from left to right."""
    parts: list[str] = []
    at = 0
    for start in matcher.starts(plain):
        end = matcher.ends(plain, start)[-1] if start >= at else start
        if end > start:
            parts += [plain[at:start], replacement]
            at = end
            if not every:
                break
    return "".join([*parts, plain[at:]])


def _cut(shown: str) -> str:
    line = " ".join(shown.split())
    return line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + "…"
