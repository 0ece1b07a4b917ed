"""The parts of a shell script, as far as a training command's arguments can depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .origin import Origin

DECLARATIONS = frozenset({"export", "declare", "typeset", "local", "readonly"})
"""Commands whose arguments are assignments."""


class Literal(NamedTuple):
    """Text that stands for itself. ``quoted`` text is neither split into words nor a pattern."""

    text: str
    quoted: bool
    origin: Origin


class Parameter(NamedTuple):
    """``$NAME`` or ``${NAME…}``: ``item`` its index; ``operator`` ``:-``, ``#``, ``//`` …, ``operand`` what follows."""

    name: str
    quoted: bool
    origin: Origin
    item: Word | None = None
    operator: str = ""
    operand: Word = ()
    replacement: Word = ()


class Substitution(NamedTuple):
    """``$(…)`` or the same in backquotes; ``text`` is how it was written."""

    body: Body
    text: str
    quoted: bool
    origin: Origin


class Arithmetic(NamedTuple):
    """``$((…))``."""

    expression: Word
    text: str
    quoted: bool
    origin: Origin


class Placeholder(NamedTuple):
    """``<path to the data>``, as an example has it where its reader should write something."""

    text: str
    quoted: bool
    origin: Origin


Part: TypeAlias = "Literal | Parameter | Substitution | Arithmetic | Placeholder"
Word: TypeAlias = "tuple[Part, ...]"
Body: TypeAlias = "tuple[Command, ...]"


@dataclass(frozen=True, slots=True)
class Assignment:
    """``NAME=word``, ``NAME+=word``, ``NAME[index]=word`` or, with ``items``, ``NAME=(word …)``."""

    name: str
    origin: Origin
    index: Word | None = None
    append: bool = False
    value: Word = ()
    items: tuple[tuple[Word | None, Word], ...] | None = None


@dataclass(frozen=True, slots=True)
class Redirect:
    """``> word``, ``< word``; ``here`` is the text of a here-document or here-string."""

    operator: str
    target: Word
    here: bool = False


@dataclass(frozen=True, slots=True)
class Simple:
    """``NAME=value … command word … < > redirects``. Arguments of ``export`` and the like are assignments."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: Sequence[Redirect]
    """Filled in by the parser when it reaches the here-documents behind the line."""
    origin: Origin


@dataclass(frozen=True, slots=True)
class Test:
    """``[[ … ]]``; operators are words of one unquoted literal."""

    words: tuple[Word, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``(( … ))``."""

    expression: Word
    origin: Origin


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with the commands under each; the last condition is empty for ``else``."""

    arms: tuple[tuple[Body, Body], ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Loop:
    """``while`` and ``until``."""

    until: bool
    condition: Body
    body: Body
    origin: Origin


@dataclass(frozen=True, slots=True)
class For:
    """``for NAME in words``; without words over the script's own arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: Body
    origin: Origin


@dataclass(frozen=True, slots=True)
class Case:
    """``case word in pattern | pattern) … ;; esac``."""

    word: Word
    arms: tuple[tuple[tuple[Word, ...], Body], ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Group:
    """``{ …; }`` or ``( … )``."""

    body: Body
    origin: Origin


@dataclass(frozen=True, slots=True)
class Function:
    """``NAME() { …; }``."""

    name: str
    body: Body
    origin: Origin


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``command | command …``, or a single one after ``!``."""

    commands: Body
    negated: bool
    origin: Origin


@dataclass(frozen=True, slots=True)
class Chain:
    """``command && command || command``: ``rest`` is operator and command."""

    first: Command
    rest: tuple[tuple[str, Command], ...]
    origin: Origin


Command: TypeAlias = "Simple | Test | Evaluation | If | Loop | For | Case | Group | Function | Pipeline | Chain"
