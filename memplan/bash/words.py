"""Words of a shell script: quotations and expansions, and the blanks and comments between them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from .origin import Budget, Origin, ScriptError
from .syntax import Arithmetic, Body, Literal, Parameter, Part, Placeholder, Substitution, Word

DEEPEST = 40
"""Nesting of commands, substitutions and expansions that a script may have."""

PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n]*(?<!\s)>(?=[\s\"'/_.-]|$)")
"""``<path to the data>``, as examples have it."""

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|<>()]+")
_PLAIN_IN_BRACES = re.compile(r"[^\\'\"$`}]+")
_PLAIN_BEFORE_SLASH = re.compile(r"[^\\'\"$`}/]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\\\"$`\n]+")
_PLAIN_HERE = re.compile(r"[^\\$`\n]+")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]", re.ASCII)
_LONG_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]", re.ASCII)
_OPERATOR = re.compile(r":[-=?+]|##?|%%?|//?|\^\^?|,,?|[-=?+:@]")
_PART = 15
"""Steps of a part of a word."""
_LINE = 5
_READER = 100
"""Steps of a reader of a part of the text."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}

OriginAt = Callable[[int], Origin]


class WordReader(ABC):
    """One pass over ``text`` from left to right; ``origin_at`` says where a character of it was written."""

    def __init__(self, text: str, origin_at: OriginAt, budget: Budget) -> None:
        budget.make(1, len(text), steps=_READER)
        self.text = text
        self._budget = budget
        self.at = 0
        self._origin_at = origin_at
        self._depth = 0

    @abstractmethod
    def body(self, ends: frozenset[str]) -> Body:
        """Commands up to one of the reserved words ``ends``, a closing parenthesis, ``;;`` or the end."""

    @abstractmethod
    def nested(self) -> Body:
        """The commands of ``$(…)``, from behind its parenthesis to behind the one that closes it."""

    @abstractmethod
    def line_ended(self) -> None:
        """Called behind each newline between words."""

    def _word(self) -> Word | None:
        """The word that begins here, or nothing where an operator or the end of the line is."""
        parts: list[Part] = []
        start = self.at
        while self.at < len(self.text):
            origin = self._origin()
            self._part(origin)
            if (plain := self._matched(_PLAIN)) is not None:
                parts.append(Literal(plain[0], False, origin))
                continue
            character = self.text[self.at]
            if (placeholder := self._matched(PLACEHOLDER)) is not None:
                parts.append(Placeholder(placeholder[0], True, origin))
                continue
            if character in "<>" and self.text.startswith("(", self.at + 1):
                self.at += 2
                body = self.body(frozenset())
                self._expect(")")
                parts.append(Substitution(body, self.text[start : self.at], True, origin))
            elif character == "(" and parts and self._is_pattern(parts[-1]):
                end = self._closing(self.at + 1, "(", ")")
                if end is None:
                    raise self._error("ends inside a pattern: a `)` is missing")
                parts.append(Literal(self.text[self.at : end + 1], False, origin))
                self.at = end + 1
            elif character in " \t\r\n;&|<>()" or character.isspace():
                if character.isspace() and character not in " \t\r\n":
                    parts.append(Literal(character, True, origin))
                    self.at += 1
                    continue
                break
            elif not self._quoting(parts, origin):
                break
        return tuple(parts) if self.at > start else None

    def _is_pattern(self, part: Part) -> bool:
        return isinstance(part, Literal) and not part.quoted and part.text[-1:] in ("@", "?", "+", "*", "!")

    def _quoting(self, parts: list[Part], origin: Origin) -> bool:
        """Consumes an escape, a quotation or an expansion outside of quotes."""
        character = self.text[self.at]
        following = self.text[self.at + 1 : self.at + 2]
        match character:
            case "\\":
                if following == "\n" or self.text.startswith("\\\r\n", self.at):
                    self.at = self.text.index("\n", self.at) + 1
                    return False if not parts else self._continues()
                self.at += 2 if following else 1
                parts.append(Literal(following, True, origin))
            case "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self._error("ends inside a quotation: a ' is missing")
                parts.extend(self._lines_of(self.text[self.at + 1 : end], self.at + 1, True))
                self.at = end + 1
            case '"':
                self._double_quotes(parts, origin)
            case "$" if following == "'":
                self._ansi_quotes(parts, origin)
            case "$" if following == '"':
                self.at += 1
                self._double_quotes(parts, origin)
            case _:
                parts.append(self._expansion(False))
        return True

    def _continues(self) -> bool:
        """Whether a word goes on after a continued line, which it does unless a blank follows."""
        return self.at < len(self.text) and not self.text[self.at].isspace()

    def _double_quotes(self, parts: list[Part], origin: Origin) -> None:
        self.at += 1
        parts.extend(self.quoted_text('"') or (Literal("", True, origin),))
        if not self._skips('"'):
            raise ScriptError('ends inside a quotation: a " is missing', origin)

    def quoted_text(self, end: str | None) -> Word:
        """Text with expansions up to ``end``: a double quote, ``""`` for a here-document, nothing for arithmetic."""
        parts: list[Part] = []
        plain = _PLAIN_IN_QUOTES if end == '"' else _PLAIN_HERE
        escaped = '$`"\\' if end == '"' else "$`\\"
        while self.at < len(self.text):
            origin = self._origin()
            self._part(origin)
            if (match := self._matched(plain)) is not None:
                parts.append(Literal(match[0], True, origin))
                continue
            character = self.text[self.at]
            following = self.text[self.at + 1 : self.at + 2]
            if character == '"' and end == '"':
                break
            if character == "\n":
                self.at += 1
                parts.append(Literal("\n", True, origin))
            elif character == "\\":
                self.at += 2 if following else 1
                if following != "\n":
                    kept = following if following and following in escaped else "\\" + following
                    parts.append(Literal(kept, True, origin))
            else:
                parts.append(self._expansion(True))
        return tuple(parts)

    def _ansi_quotes(self, parts: list[Part], origin: Origin) -> None:
        match = self._matched(_ANSI)
        if match is None:
            raise self._error("ends inside a quotation: a ' is missing")
        text = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), match[1], flags=re.DOTALL)
        parts.append(Literal(text, True, origin))

    def _lines_of(self, text: str, start: int, quoted: bool) -> list[Part]:
        """``text`` as one literal for every line, so that each knows its own; one empty one for no text."""
        parts: list[Part] = []
        for line in text.splitlines(keepends=True) or [""]:
            self._part(self._origin_at(start))
            parts.append(Literal(line, quoted, self._origin_at(start)))
            start += len(line)
        return parts

    # --- expansions

    def _expansion(self, quoted: bool) -> Part:
        """The expansion that ``$`` or a backquote begins here; a ``$`` alone stands for itself."""
        origin, start = self._origin(), self.at
        if self.text[self.at] == "`":
            return self._backquoted(quoted, origin)
        if self.text.startswith("$((", self.at):
            self.at += 1
            expression = self._evaluation()
            if expression is not None:
                return Arithmetic(expression, self.text[start : self.at], quoted, origin)
            self.at -= 1
        if self._skips("$("):
            body = self.nested()
            return Substitution(body, self.text[start : self.at], quoted, origin)
        if self.text.startswith("${", self.at):
            return self._braced(quoted, origin)
        name = _NAME.match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return Literal("$", quoted, origin)
        self.at = name.end()
        return Parameter(name[0], quoted, origin)

    def _evaluation(self) -> Word | None:
        """``((…))`` from its first parenthesis; nothing if it is not closed by two at once."""
        end = self._closing(self.at + 2, "(", ")")
        if end is None or not self.text.startswith("))", end):
            return None
        start, self.at = self.at + 2, end + 2
        return self._inner(start, end)

    def _backquoted(self, quoted: bool, origin: Origin) -> Part:
        match = _BACKQUOTED.match(self.text, self.at)
        if match is None:
            raise self._error("ends inside a quotation: a ` is missing")
        inner = self._within(re.sub(r"\\([\\`$])", r"\1", match[1]), lambda _: origin)
        self.at = match.end()
        return Substitution(inner.body(frozenset()), match[0], quoted, origin)

    def _braced(self, quoted: bool, origin: Origin) -> Part:
        """``${…}``."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error("is nested too deeply to be a launch script")
        start = self.at
        self.at += 2
        prefix = ""
        if self.text[self.at : self.at + 1] in ("#", "!") and self.text[self.at + 1 : self.at + 2] not in ("}", ""):
            prefix = self.text[self.at]
            self.at += 1
        name = self._matched(_LONG_NAME)
        if name is None:
            raise self._error(f"has an expansion that cannot be read: {self.text[start : start + 20]!r}")
        index = self._index()
        operator = {"#": "length", "!": "indirect"}.get(prefix, "")
        operand: Word = ()
        replacement: Word = ()
        if not self.text.startswith("}", self.at):
            match = _OPERATOR.match(self.text, self.at)
            if match is None or operator == "length":
                raise self._error(f"has an expansion that cannot be read: {self.text[start : start + 20]!r}")
            operator = match[0] if not prefix else "indirect"
            self.at = match.end()
            operand = self._operand(quoted, "/}" if operator in ("/", "//") else "}")
            if self._skips("/"):
                replacement = self._operand(quoted, "}")
        self._expect("}")
        self._depth -= 1
        return Parameter(name[0], quoted, origin, index, operator, operand, replacement)

    def _index(self) -> Word | None:
        if not self.text.startswith("[", self.at):
            return None
        end = self._closing(self.at + 1, "[", "]")
        if end is None:
            raise self._error("ends inside an index: a ] is missing")
        start, self.at = self.at + 1, end + 1
        return self._inner(start, end)

    def _operand(self, quoted: bool, ends: str) -> Word:
        """The operand behind an operator in ``${…}``, up to one of ``ends``."""
        parts: list[Part] = []
        plain = _PLAIN_BEFORE_SLASH if "/" in ends else _PLAIN_IN_BRACES
        while self.at < len(self.text) and self.text[self.at] not in ends:
            origin = self._origin()
            self._part(origin)
            if (match := self._matched(plain)) is not None:
                parts.append(Literal(match[0], False, origin))
            elif self.text[self.at] == "'" and quoted:
                self.at += 1
                parts.append(Literal("'", False, origin))
            elif not self._quoting(parts, origin) and self.at < len(self.text) and self.text[self.at] in ends:
                break
        return tuple(parts)

    # --- small steps

    def _closing(self, start: int, opening: str, closing: str) -> int | None:
        """Where the bracket that was opened before ``start`` closes."""
        depth = 0
        self._budget.spend(1)
        for match in re.compile(rf"[{re.escape(opening + closing)}]").finditer(self.text, start):
            self._budget.spend(5)
            if match[0] == opening:
                depth += 1
            elif depth == 0:
                return match.start()
            else:
                depth -= 1
        return None

    def _inner(self, start: int, end: int) -> Word:
        """A stretch of the text as a word with expansions, in which quotes are text: arithmetic, or an index."""
        return self._within(self.text[start:end], self._shifted(start)).quoted_text(None)

    def _within(self, text: str, origin_at: OriginAt) -> WordReader:
        """A reader of ``text``, which stands inside of this one's."""
        if self._depth >= DEEPEST:
            raise self._error("is nested too deeply to be a launch script")
        inner = type(self)(text, origin_at, self._budget)
        inner._depth = self._depth + 1
        return inner

    def _shifted(self, start: int) -> OriginAt:
        return lambda offset: self._origin_at(start + offset)

    def _origin(self) -> Origin:
        return self._origin_at(self.at)

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What matches ``pattern`` here, and is passed."""
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def _skips(self, *signs: str) -> bool:
        """Goes past the first of ``signs`` that stands here; whether one does."""
        sign = next((one for one in signs if self.text.startswith(one, self.at)), "")
        self.at += len(sign)
        return sign != ""

    def _part(self, origin: Origin) -> None:
        """Charges one part of a word at ``origin``."""
        self._budget.make(1, 0, origin, steps=_PART)

    def _blank(self) -> None:
        """Skips blanks, continued lines and a comment."""
        self._matched(_BLANK)
        before = self.text[self.at - 1 : self.at]
        if self.text.startswith("#", self.at) and (before in ("", ";", "(", "&", "|", ")") or before.isspace()):
            self._matched(_COMMENT)

    def _blank_lines(self) -> None:
        while True:
            self._blank()
            if not self._skips("\n"):
                return
            self._budget.spend(_LINE)
            self.line_ended()

    def _expect(self, character: str) -> None:
        self._blank_lines() if character == ")" else None
        if not self._skips(character):
            raise self._error(f"is not a shell script that can be read: a `{character}` is missing")

    def unexpected(self) -> ScriptError:
        what = self.text[self.at : self.at + 10].split()[:1]
        found = f"`{what[0]}`" if what else "the end of the line" if self.at < len(self.text) else "its end"
        return self._error(f"is not a shell script that can be read: {found} is unexpected here")

    def _error(self, problem: str) -> ScriptError:
        return ScriptError(problem, self._origin())
