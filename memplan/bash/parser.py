"""Shell text to commands (``syntax.py``), without running anything.

The grammar is POSIX's with bash's arrays, ``[[ ]]``, ``(( ))`` and here-strings: what launch scripts are
written in. An own parser, since the ones that exist do not serve: ``shlex`` splits words and knows neither
expansions nor compound commands nor here-documents; bashlex (GPL-3) refuses arrays, ``$((…))``, ``[[ ]]``
and ``case``, which almost every launch script has.

Brace expansion: ``a{b,c}`` is two words, ``{0..7}`` eight, before anything else in them is expanded.

Its rules are those of the section "Brace Expansion" of bash's manual: a brace counts where it is not quoted, and has a
comma of its own or two ends of a range, both numbers or both letters; any other stays as it is. One difference: bash
joins texts, so that ``$V{1,2}`` is ``$V1 $V2`` there; here it is ``${V}1 ${V}2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

from .origin import Budget, ScriptError
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
    Part,
    Pipeline,
    Redirect,
    Simple,
    Test,
    Word,
)
from .words import DEEPEST, PLACEHOLDER, OriginAt, WordReader

_RANGE = re.compile(r"(?:(-?\d{1,9})\.\.(-?\d{1,9})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d{1,9}))?", re.ASCII)
_LONGEST = 40
"""Characters of a range."""
_DEEPEST = 50
_Sign: TypeAlias = "Part"
"""A character that is not quoted, as a literal of its own, or another part, whole."""


def braces_expanded(word: Word, budget: Budget, depth: int = 0) -> list[Word]:
    """The words that ``word`` is; ``ScriptError`` where braces stand in more than 50 others, or are too much work."""
    if not any(isinstance(part, Literal) and not part.quoted and "{" in part.text for part in word):
        return [word]
    if depth > _DEEPEST:
        raise ScriptError(f"has braces in more than {_DEEPEST} others", word[0].origin)
    signs = [*_signs(word)]
    budget.make(len(signs))
    closings, commas = _pairs(signs)
    found: list[list[Part]] = [[]]
    at = 0
    while at < len(signs):
        end = closings.get(at)
        several = [] if end is None else _alternatives(signs, at, end, commas[at], budget, depth)
        if several:
            budget.make(len(several) * sum(map(len, found)) + len(found) * sum(map(len, several)))
            found = [[*before, *one] for before in found for one in several]
            at = end or 0
        else:
            budget.make(len(found))
            for one in found:
                one.append(signs[at])
        at += 1
    return [*map(_joined, found)]


def _signs(word: Word) -> Iterator[_Sign]:
    for part in word:
        if isinstance(part, Literal) and not part.quoted:
            yield from (Literal(character, False, part.origin) for character in part.text)
        else:
            yield part


def _plain(sign: _Sign) -> str:
    return sign.text if isinstance(sign, Literal) and not sign.quoted else ""


def _pairs(signs: Sequence[_Sign]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Where the braces at each position close, and the commas that are theirs."""
    closings: dict[int, int] = {}
    commas: dict[int, list[int]] = {}
    opened: list[int] = []
    for at, sign in enumerate(signs):
        plain = _plain(sign)
        match plain:
            case "{":
                opened.append(at)
                commas[at] = []
            case "}" if opened:
                closings[opened.pop()] = at
            case "," if opened:
                commas[opened[-1]].append(at)
    return closings, commas


def _alternatives(
    signs: Sequence[_Sign], start: int, end: int, commas: Sequence[int], budget: Budget, depth: int
) -> list[Word]:
    """What stands between the braces at ``start`` and ``end``; nothing where they are no such braces."""
    if commas:
        several = (tuple(signs[a + 1 : b]) for a, b in pairwise([start, *commas, end]))
        return [one for part in several for one in braces_expanded(part, budget, depth + 1)]
    between = signs[start + 1 : end] if end - start < _LONGEST else []
    match = _RANGE.fullmatch("".join(map(_plain, between))) if all(map(_plain, between)) else None
    if match is None:
        return []
    origin = signs[start].origin
    first, last = (int(one) for one in match.group(1, 2)) if match[1] else (ord(one) for one in match.group(3, 4))
    step = abs(int(match[5] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    budget.make(len(numbers), origin=origin)
    if match[1] is None:
        return [(Literal(chr(number), False, origin),) for number in numbers]
    padded = any(re.match(r"-?0\d", one) for one in match.group(1, 2))
    width = max(map(len, match.group(1, 2))) if padded else 0
    return [(Literal(f"{number:0{width}d}" if width else str(number), False, origin),) for number in numbers]


def _joined(signs: Sequence[Part]) -> Word:
    """``signs`` with characters that follow each other in one literal."""
    parts: list[Part] = []
    for is_plain, group in groupby(signs, key=lambda sign: bool(_plain(sign))):
        same = [*group]
        parts += [Literal("".join(map(_plain, same)), False, same[0].origin)] if is_plain else same
    return tuple(parts)


# -- parser --------------------------------------------------------------------------------------------


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]{0,255}\])?(\+?=)", re.ASCII)
_KEY = re.compile(r"\[([^\]\n]{0,255})\]=")
_REDIRECT = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>\||<>|[<>]&|&>>?|[<>])")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:.-]+)(?:[ \t]*\([ \t]*\))?|([A-Za-z_][\w:.-]*)[ \t]*\([ \t]*\))\s*(?=[{(])"
)
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|select|while|until|do|done|case|esac|in|time|function|\[\[|[{}!])(?=[\s;&|()<>]|$)"
)
_TEST_OPERATOR = re.compile(r"&&|\|\||[()<>]")
_WORD = re.compile(r"[^\s;&|<>()]+")
_COMMAND = 100
"""Steps of a command."""
_ENDS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


def parse(text: str, origin_at: OriginAt, budget: Budget) -> Body:
    """The commands in ``text``; ``origin_at`` says where a character of it was written."""
    parser = _Parser(text, origin_at, budget)
    body = parser.body(frozenset())
    if parser.at < len(text):
        raise parser.unexpected()
    return body


class _Parser(WordReader):
    """Commands, over the words that it inherits."""

    def __init__(self, text: str, origin_at: OriginAt, budget: Budget) -> None:
        super().__init__(text, origin_at, budget)
        self._here: list[tuple[list[Redirect], int, bool, bool, str]] = []

    def nested(self) -> Body:
        here, self._here = self._here, []
        body = self.body(frozenset())
        self._expect(")")
        self._here = here
        return body

    def line_ended(self) -> None:
        if self._here:
            self._read_here_documents()

    # --- lists of commands

    def body(self, ends: frozenset[str]) -> Body:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error("is nested too deeply to be a launch script")
        commands: list[Command] = []
        while True:
            self._blank_lines()
            if self._at_end(ends):
                break
            commands.append(self._chain())
            self._blank()
            if self.text.startswith(";;", self.at):
                break
            if self._skips(";", "&"):
                continue
            if self.text[self.at : self.at + 1] not in ("\n", ")", "") and not self._at_end(ends):
                raise self.unexpected()
        self._depth -= 1
        return tuple(commands)

    def _at_end(self, ends: frozenset[str]) -> bool:
        if self.at >= len(self.text) or self.text[self.at] == ")" or self.text.startswith(";;", self.at):
            return True
        return self._reserved() in ends

    def _chain(self) -> Command:
        origin = self._origin()
        first = self._pipeline()
        rest: list[tuple[str, Command]] = []
        while True:
            self._blank()
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return Chain(first, tuple(rest), origin) if rest else first
            self.at += 2
            self._blank_lines()
            rest.append((operator, self._pipeline()))

    def _pipeline(self) -> Command:
        origin = self._origin()
        negated = False
        while self._reserved() in ("!", "time"):
            negated ^= self._take_word() == "!"
            self._blank()
        commands = [self._command()]
        while True:
            self._blank()
            if self.text.startswith("||", self.at) or not self._skips("|&", "|"):
                break
            self._blank_lines()
            commands.append(self._command())
        return commands[0] if len(commands) == 1 and not negated else Pipeline(tuple(commands), negated, origin)

    def _command(self) -> Command:
        origin = self._origin()
        self._budget.make(2, 0, origin, steps=_COMMAND)
        function = self._matched(_FUNCTION)
        if function is not None:
            body = self._command()
            return Function(function[1] or function[2], body.body if isinstance(body, Group) else (body,), origin)
        if self.text.startswith("((", self.at) and (expression := self._evaluation()) is not None:
            return Evaluation(expression, origin)
        if self._skips("("):
            group = Group(self.body(frozenset()), origin)
            self._expect(")")
            return self._with_redirects(group)
        compound = {
            "{": self._braces,
            "if": self._if,
            "while": self._loop,
            "until": self._loop,
            "for": self._for,
            "select": self._for,
            "case": self._case,
            "[[": self._test,
        }.get(self._reserved())
        return self._with_redirects(compound()) if compound is not None else self._simple()

    def _with_redirects(self, command: Command) -> Command:
        """``command``, past whatever it is redirected to; a here-document is its standard input and not kept."""
        redirects: list[Redirect] = []
        self._blank()
        while self._redirect(redirects):
            self._blank()
        return command

    # --- compound commands

    def _braces(self) -> Group:
        origin = self._origin()
        self._take("{")
        body = self.body(frozenset({"}"}))
        self._take("}")
        return Group(body, origin)

    def _if(self) -> Command:
        origin = self._origin()
        arms: list[tuple[Body, Body]] = []
        self._take("if")
        while True:
            condition = self.body(frozenset({"then"}))
            self._take("then")
            arms.append((condition, self.body(frozenset({"elif", "else", "fi"}))))
            word = self._take("elif", "else", "fi")
            if word == "else":
                arms.append(((), self.body(frozenset({"fi"}))))
                word = self._take("fi")
            if word == "fi":
                return If(tuple(arms), origin)

    def _loop(self) -> Command:
        origin = self._origin()
        until = self._take("while", "until") == "until"
        return Loop(until, self.body(frozenset({"do"})), self._do(), origin)

    def _do(self) -> Body:
        self._take("do")
        body = self.body(frozenset({"done"}))
        self._take("done")
        return body

    def _for(self) -> Command:
        origin = self._origin()
        self._take("for", "select")
        self._blank()
        if self.text.startswith("((", self.at):
            self._evaluation()
            name, words = "", None
        else:
            name, words = self._take_word(), None
            self._blank_lines()
            if self._reserved() == "in":
                self._take("in")
                words = self._words()
        self._blank()
        self._skips(";")
        self._blank_lines()
        body = self._braces().body if self._reserved() == "{" else self._do()
        return For(name, words, body, origin)

    def _case(self) -> Command:
        origin = self._origin()
        self._take("case")
        self._blank()
        word = self._word() or ()
        self._blank_lines()
        self._take("in")
        arms: list[tuple[tuple[Word, ...], Body]] = []
        while True:
            self._blank_lines()
            if self._reserved() == "esac":
                self._take("esac")
                return Case(word, tuple(arms), origin)
            self._skips("(")
            patterns: list[Word] = []
            while True:
                self._blank()
                pattern = self._word()
                if pattern is None:
                    raise self.unexpected()
                patterns.append(pattern)
                self._blank()
                if not self._skips("|"):
                    break
            self._expect(")")
            arms.append((tuple(patterns), self.body(frozenset({"esac"}))))
            self._blank_lines()
            self._skips(";;&", ";;", ";&")

    def _test(self) -> Command:
        origin = self._origin()
        self._take("[[")
        words: list[Word] = []
        while True:
            self._blank_lines()
            start = self._origin()
            operator = self._matched(_TEST_OPERATOR)
            self._part(start)
            if operator is not None:
                words.append((Literal(operator[0], False, start),))
                continue
            word = self._word()
            if word is None:
                raise self.unexpected()
            if len(word) == 1 and isinstance(word[0], Literal) and word[0][:2] == ("]]", False):
                return Test(tuple(words), origin)
            words.append(word)
            if len(word) == 1 and isinstance(word[0], Literal) and word[0].text == "=~":
                words.append(self._regular_expression())

    def _regular_expression(self) -> Word:
        self._blank()
        match = re.compile(r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\\\"']|\\.)+").match(self.text, self.at)
        origin = self._origin()
        if match is None:
            raise self.unexpected()
        self.at = match.end()
        return (Literal(match[0], True, origin),)

    # --- simple commands

    def _simple(self) -> Command:
        origin = self._origin()
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        declares = False
        start = self.at
        if self._reserved() in _ENDS:
            raise self.unexpected()
        while True:
            self._blank()
            if (not words or declares) and (assignment := self._assignment()) is not None:
                assignments.append(assignment)
            elif self._redirect(redirects):
                pass
            else:
                if self.text.startswith("(", self.at) and self.at > start:
                    raise self.unexpected()
                word = self._word()
                if word is None:
                    break
                words += braces_expanded(word, self._budget)
                if len(words) == 1 and len(word) == 1 and isinstance(word[0], Literal):
                    declares = word[0].text in DECLARATIONS
        if self.at == start:
            raise self.unexpected()
        return Simple(tuple(assignments), tuple(words), redirects, origin)

    def _assignment(self) -> Assignment | None:
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return None
        origin = self._origin()
        index = None
        if match[2] is not None:
            index = self._inner(match.start(2) + 1, match.end(2) - 1)
        self.at = match.end()
        append = match[3] == "+="
        if self.text.startswith("(", self.at):
            return Assignment(match[1], origin, None, append, items=self._items())
        return Assignment(match[1], origin, index, append, self._word() or ())

    def _items(self) -> tuple[tuple[Word | None, Word], ...]:
        self.at += 1
        items: list[tuple[Word | None, Word]] = []
        while True:
            self._blank_lines()
            if self._skips(")"):
                return tuple(items)
            key = _KEY.match(self.text, self.at)
            index = None
            if key is not None:
                index = self._inner(*key.span(1))
                self.at = key.end()
            word = self._word()
            if word is None and key is None:
                if self.at >= len(self.text):
                    raise self._error("ends inside an array: a `)` is missing")
                self._part(self._origin())
                self.at += 1  # a stray operator in an array: bash refuses it, and no argument is lost
                continue
            items += [(index, one) for one in braces_expanded(word or (), self._budget)]

    def _words(self) -> tuple[Word, ...]:
        words: list[Word] = []
        while True:
            self._blank()
            word = self._word()
            if word is None:
                return tuple(words)
            words += braces_expanded(word, self._budget)

    def _redirect(self, redirects: list[Redirect]) -> bool:
        match = _REDIRECT.match(self.text, self.at)
        if match is None or self.text.startswith(("<(", ">("), match.start(1)) or PLACEHOLDER.match(self.text, self.at):
            return False
        operator = match[1]
        self.at = match.end()
        self._blank()
        if operator.startswith("<<") and operator != "<<<":
            self._here_document(redirects, operator)
            return True
        target = self._word()
        if target is None:
            raise self.unexpected()
        redirects.append(Redirect(operator, target, operator == "<<<"))
        return True

    def _here_document(self, redirects: list[Redirect], operator: str) -> None:
        start = self.at
        word = self._word()
        if word is None or any(not isinstance(part, Literal) for part in word):
            raise self._error("has a here-document without a plain delimiter")
        delimiter = "".join(part.text for part in word if isinstance(part, Literal))
        literal = any(mark in self.text[start : self.at] for mark in "'\"\\")
        redirects.append(Redirect("<<", (), True))
        self._here.append((redirects, len(redirects) - 1, operator == "<<-", literal, delimiter))

    def _read_here_documents(self) -> None:
        """The bodies of the here-documents of the line that has just ended."""
        pending, self._here = self._here, []
        for redirects, position, strip, literal, delimiter in pending:
            start = self.at
            end = None
            lines: list[str] = []
            while self.at < len(self.text):
                newline = self.text.find("\n", self.at)
                stop = len(self.text) if newline < 0 else newline
                line = self.text[self.at : stop].rstrip("\r")
                line = line.lstrip("\t") if strip else line
                self.at = min(stop + 1, len(self.text))
                if line == delimiter:
                    end = stop
                    break
                self._budget.make(1, len(line))
                lines.append(line + "\n")
            if end is None:
                raise ScriptError(f"ends inside a here-document: no line is {delimiter}", self._origin_at(start))
            body = "".join(lines)
            word: Word
            if literal:
                word = tuple(self._lines_of(body, start, True))
            else:
                word = _Parser(body, self._shifted(start), self._budget).quoted_text("")
            redirects[position] = Redirect("<<", word, True)

    # --- reserved words

    def _reserved(self) -> str:
        """The plain word that stands here, in which reserved words are looked up."""
        match = _RESERVED.match(self.text, self.at)
        return match[0] if match is not None else ""

    def _take_word(self) -> str:
        match = self._matched(_WORD)
        if match is None:
            raise self.unexpected()
        return match[0]

    def _take(self, *words: str) -> str:
        word = self._reserved()
        if word not in words:
            raise self._error(f"is not a shell script that can be read: `{words[-1]}` is missing here")
        self.at += len(word)
        return word
