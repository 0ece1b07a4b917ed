"""What a user sees when a plan is wrong: one line with field, value, what is allowed, and where it came from.

Values that remember where they were written, so that an error can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ..bash.origin import Origin as Origin, ScriptError
from ..values import dataclass, pattern

MOST_GUESSES = 32
"""Unknown names of one file for which the nearest known one is looked for."""
LONGEST_VALUE = 60
"""Characters of a wrong value that an error repeats."""


class LackingError(Exception):
    """The environment lacks something. ``str()`` is a line that says what, and how to get it."""


class _Absent:
    """The value of a field that was not given."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()


SIZES = frozenset({"hardware.capacity", "trainer.generation_memory"})
"""Fields that are sizes of memory, in bytes."""


class PlanError(ValueError):
    """The plan cannot be used as it is.

    ``field`` is a dotted path such as ``layout.tp`` (empty for a whole file), ``problem`` says what is
    allowed. Code that only sees values leaves ``origin`` out; whoever read the plan adds it with
    ``located``. ``str()`` is a single line.
    """

    def __init__(
        self,
        field: str,
        value: object,
        problem: str,
        *,
        origin: Origin | None = None,
        known: Iterable[str] = (),
    ) -> None:
        super().__init__(field, value, problem)
        self.field = field
        self.value = value
        self.problem = problem
        self.origin = origin
        self.known = tuple(known)
        """Names that were possible here; the nearest is suggested."""

    @property
    def errors(self) -> tuple[PlanError, ...]:
        """Itself; those that it tells together, where it is several."""
        return (self,)

    @property
    def suggestion(self) -> str | None:
        """The known name that the wrong one was probably meant to be."""
        wrong = self.field.rpartition(".")[2] if self.value is ABSENT else self.value
        return nearest(wrong, self.known) if isinstance(wrong, str) else None

    def but(self, *, problem: str | None = None, origin: Origin | None = None) -> PlanError:
        """The same error with another ``problem`` or ``origin``."""
        problem = self.problem if problem is None else problem
        return PlanError(self.field, self.value, problem, origin=origin or self.origin, known=self.known)

    def each(self, change: Callable[[PlanError], PlanError]) -> PlanError:
        """What ``change`` makes of it; of each, where it is several."""
        return change(self)

    def located(self, origins: Mapping[str, Origin]) -> PlanError:
        """The same error with the origin of its field, or of the nearest section around it."""
        return self.each(lambda one: one if one.origin is not None else one.but(origin=origin_of(one.field, origins)))

    def __str__(self) -> str:
        subject = self.field
        if subject and self.value is not ABSENT:
            size = self.value if subject in SIZES and isinstance(self.value, int) else 0
            value = f"{size / 2**30:g}GiB" if 2**20 <= size < 2**80 else shown(self.value)
            subject = f"{subject} = {value}"
        parts = [str(self.origin) if self.origin else "", subject, guessed(self.problem, self.suggestion)]
        return one_line(": ".join(part for part in parts if part))


MOST_TOLD = 8
"""Errors of one line."""


class PlanErrors(PlanError):  # noqa: N818 (it is several)
    """Several, told in one line; field, value and origin are the first one's."""

    def __init__(self, errors: Sequence[PlanError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.problem, origin=first.origin, known=first.known)
        self._errors = tuple(errors)

    @property
    def errors(self) -> tuple[PlanError, ...]:
        return self._errors

    def each(self, change: Callable[[PlanError], PlanError]) -> PlanError:
        return PlanErrors([one.each(change) for one in self.errors])

    def __str__(self) -> str:
        told = [f"({number}) {error}" for number, error in enumerate(self.errors[:MOST_TOLD], 1)]
        more = len(self.errors) - len(told)
        return f"{len(self.errors)} errors: {' '.join(told)}" + (f" and {more} more" if more else "")


def together(errors: Iterable[PlanError]) -> PlanError:
    """All of ``errors``, of which there is one at least, as one that says once what is wrong with one value."""
    apart: dict[tuple[object, ...], PlanError] = {}
    for part in (part for error in errors for part in error.errors):
        where = part.field if part.origin is None or part.value is ABSENT else repr(part.value)
        apart.setdefault((part.origin, where, part.problem), part)
    first, *others = apart.values()
    return PlanErrors([first, *others]) if others else first


def wrong_at(place: Origin | str, problem: str) -> PlanError:
    """What is wrong at ``place``, and with no field: a line of a file, a flag, standard input."""
    return PlanError("", ABSENT, problem, origin=Origin(place) if isinstance(place, str) else place)


def check_choice(flag: str, value: str, choices: Collection[str]) -> None:
    """``PlanError`` where ``value`` of a flag is none of ``choices``."""
    if value not in choices:
        raise wrong_at(flag, guessed(f"{value} must be one of {', '.join(choices)}", nearest(value, choices)))


def guessed(problem: str, guess: str | None) -> str:
    """``problem`` with the name that was probably meant."""
    return f"{problem}; did you mean {guess}?" if guess else problem


def refused(error: ScriptError) -> PlanError:
    """The error of a file that cannot be followed, or that takes more than reading one may take."""
    return PlanError("", ABSENT, error.problem, origin=error.origin)


def origin_of(field: str, origins: Mapping[str, Origin]) -> Origin | None:
    """Origin of ``field`` or of the closest enclosing section that has one; ``""`` is the whole plan."""
    while field and field not in origins:
        field = field.rpartition(".")[0]
    return origins.get(field)


def nearest(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``wrong`` begins, two of several (``a or b``), or else the one that it resembles."""
    import difflib

    by_plain_name = {name.lower().replace("_", "-"): name for name in known}
    plain = wrong[:LONGEST_VALUE].lower().replace("_", "-")
    starts = [name for plain_name, name in by_plain_name.items() if len(plain) > 2 and plain_name.startswith(plain)]
    if starts:
        return " or ".join(starts[:2])
    for match in difflib.get_close_matches(plain, by_plain_name, n=1, cutoff=cutoff):
        return by_plain_name[match]
    return None


def is_slip(wrong: str, meant: str) -> bool:
    """Whether ``wrong`` is surely ``meant``, misspelt: a letter or two are left out, added, another or swapped. Other
    digits are another name."""
    if abs(len(wrong) - len(meant)) > 2:
        return False
    wrong, meant = (name.lower().replace("_", "-") for name in (wrong, meant))
    if [c for c in wrong if c.isdigit()] != [c for c in meant if c.isdigit()]:
        return False
    return _apart(wrong, meant) <= (2 if len(meant) >= 12 else 1)


def _apart(one: str, other: str) -> int:
    """The number of letters to change, add, leave out or swap (optimal string alignment)."""
    before: list[int] = []
    above = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        row = [at]
        for position, its in enumerate(other, 1):
            least = min(above[position] + 1, row[-1] + 1, above[position - 1] + (letter != its))
            if at > 1 and position > 1 and letter == other[position - 2] and one[at - 2] == its:
                least = min(least, before[position - 2] + 1)
            row.append(least)
        before, above = above, row
    return above[-1]


@dataclass(slots=True)
class Guesses:
    """What the unknown names of one file were probably meant to be: of the first ones, since each is compared with all
    names that are known."""

    nearest: Callable[[str], str | None]
    left: int = MOST_GUESSES

    def of(self, wrong: str) -> str | None:
        """The known name that is nearest to ``wrong``."""
        self.left -= 1
        return self.nearest(wrong) if self.left >= 0 else None


def shown(value: object) -> str:
    """``value`` as an error repeats it: as YAML would write it, cut if long."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > 200:
            return f"a number of {(value.bit_length() - 1) * 30_103 // 100_000 + 1} digits"
        case Mapping():
            text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in list(value.items())[:8]) + "}"
        case list() | tuple():
            text = "[" + ", ".join(shown(item) for item in value[:16]) + "]"
        case _:
            text = str(value) or "''"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def one_line(text: str) -> str:
    """``text`` with whatever would break the line, not show, or steer a terminal, escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def lines(text: str) -> str:
    """``text`` with its line ends as they are, and everything else escaped as in ``one_line``."""
    return "\n".join(map(one_line, text.split("\n")))


Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Node] | dict[str, Node]"


_INTEGER = pattern(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = pattern(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_LONGEST_NUMBER = 400
VALUE = 80
"""Steps of reading a value: what becomes of it later is among them."""


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, list or mapping with the origin of its first character.

    ``text`` is what was written for an unquoted scalar: ``010``, ``yes`` or ``2020``, which a field of
    text keeps as it is.
    """

    value: Value
    origin: Origin
    text: str | None = None

    @property
    def mapping(self) -> dict[str, Node]:
        """The items of a mapping; nothing for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self) -> object:
        """The value without its origins: what JSON would hold."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    @property
    def whole(self) -> int:
        """The value of one that was checked to be a whole number."""
        assert isinstance(self.value, int)
        return self.value

    def at(self, path: str) -> Node | None:
        """What is at the dotted ``path`` below this mapping; nothing where it ends before."""
        node: Node | None = self
        for name in path.split("."):
            node = node.mapping.get(name) if node is not None else None
        return node

    def wrong(self, field: str, problem: str, *, known: Iterable[str] = ()) -> PlanError:
        """What is wrong with this value of ``field``."""
        return PlanError(field, self.plain(), problem, origin=self.origin, known=known)

    def lacks(self, field: str, problem: str, *, known: Iterable[str] = ()) -> PlanError:
        """What is wrong with ``field`` here, where it has no value, or none to repeat."""
        return PlanError(field, ABSENT, problem, origin=self.origin, known=known)

    def origins(self, path: str = "") -> Iterator[tuple[str, Origin]]:
        """Dotted path and origin of this node and of all below it."""
        yield path, self.origin
        prefix = f"{path}." if path else ""
        if isinstance(self.value, dict):
            for key, node in self.value.items():
                yield from node.origins(prefix + key)
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                yield from node.origins(f"{prefix}{index}")

    def with_items(self, items: dict[str, Node]) -> Node:
        """This mapping with ``items`` added or replaced."""
        return Node({**self.mapping, **items}, self.origin)

    @staticmethod
    def of(value: object, origin: Origin) -> Node:
        """A plain value, all of it from one place."""
        if isinstance(value, Mapping):
            return Node({str(key): Node.of(item, origin) for key, item in value.items()}, origin)
        if isinstance(value, (list, tuple)):
            return Node([Node.of(item, origin) for item in value], origin)
        assert value is None or isinstance(value, (bool, int, float, str))
        return Node(value, origin)

    def put(self, path: str, node: Node) -> Node:
        """This mapping with ``node`` at the dotted ``path``."""
        name, _, rest = path.partition(".")
        inside = self.mapping.get(name, Node({}, self.origin))
        return self.with_items({name: inside.put(rest, node) if rest else node})

    def without(self, *keys: str) -> Node:
        """This mapping without ``keys``."""
        return Node({key: node for key, node in self.mapping.items() if key not in keys}, self.origin)


def scalar(text: str, origin: Origin) -> Node:
    """What ``text`` means when written without quotes.

    As YAML 1.2 says ``true``, ``null`` and decimal numbers are special; ``yes``, ``010``, ``1_000`` and ``1:30`` are
    text, which a field that wants a number refuses by name.
    """
    return Node(_meaning(text), origin, text)


def _meaning(text: str) -> Scalar:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            return number if abs(number) != float("inf") else text
    return text
