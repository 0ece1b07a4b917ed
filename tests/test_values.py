"""``memplan.values.dataclass`` and ``NamedTuple`` do what the standard library's do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import typing
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.values import HashedOnce, NamedTuple, dataclass, pattern, replace


@dataclass(frozen=True, slots=True)
class Point:
    """Two numbers and a note that no comparison sees."""

    x: int
    y: int = 2
    seen: list[int] = field(default_factory=list, compare=False, repr=False)

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclass(frozen=True, slots=True)
class Named(Point):
    """A point with a name, and a sum that follows."""

    name: str = ""
    doubled: int = field(init=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.sum)


@dataclass(frozen=True, eq=False)
class Unlike:
    """Equal to nothing but itself."""

    x: int


@dataclass
class Loose:
    """Can change, and has no hash."""

    x: int
    more: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Own:
    """Has methods of its own."""

    x: int

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "own"


class Pair(NamedTuple):
    """A tuple with names."""

    left: int
    """The first."""
    right: tuple[int, ...] = ()

    @property
    def many(self) -> int:
        return self.left + len(self.right)

    @classmethod
    def of(cls, left: int) -> Pair:
        return cls(left, (left,))


def test_a_named_tuple_is_that_of_the_standard_library() -> None:
    """Names, defaults, methods and text are those of ``collections.namedtuple``, which ``typing.NamedTuple`` makes,
    too."""
    pair = Pair.of(2)
    assert (pair, pair.left, pair.right, pair.many) == ((2, (2,)), 2, (2,), 3)
    assert (Pair._fields, Pair._field_defaults, Pair(1)) == (("left", "right"), {"right": ()}, (1, ()))
    assert (repr(pair), pair._replace(left=5)) == ("Pair(left=2, right=(2,))", (5, (2,)))
    assert (Pair.__name__, Pair.__module__, Pair.__doc__, type(pair)) == (
        "Pair",
        __name__,
        "A tuple with names.",
        Pair,
    )
    assert typing.get_type_hints(Pair) == {"left": int, "right": tuple[int, ...]}
    for other in (copy.copy(pair), pickle.loads(pickle.dumps(pair))):
        assert (other, type(other)) == (pair, Pair)
    wrong: Any = Pair
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'left'"):
        wrong()


def test_a_named_tuple_needs_annotations_that_are_text() -> None:
    """Without ``from __future__ import annotations`` the body of a class has none in Python 3.14 (PEP 749), and the
    tuple would have no fields."""
    made: Any = type(NamedTuple)
    with pytest.raises(TypeError, match="Empty is made where annotations are no text"):
        made("Empty", (NamedTuple,), {"__module__": __name__, "__qualname__": "Empty"})
    for file in Path(memplan.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if re.search(r"values import .*\bNamedTuple\b", text):
            assert "from __future__ import annotations" in text, file


def test_fields_are_set_by_place_by_name_and_by_default() -> None:
    assert (Point(1).x, Point(1).y, Point(1, 3).y, Point(y=5, x=4).sum) == (1, 2, 3, 9)
    assert Point(1).seen == []
    assert Point(1).seen is not Point(1).seen
    assert Named(1, 2, name="a").doubled == 6
    wrong: Any = Point
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        wrong()
    with pytest.raises(TypeError, match="unexpected keyword"):
        wrong(1, z=3)


def test_equality_hash_and_text_are_those_of_the_standard_library() -> None:
    assert Point(1) == Point(1, 2, [3])
    assert Point(1) != Point(2)
    assert Point(1) != Named(1)
    assert hash(Point(1)) == hash(Point(1, 2, [3])) == hash((1, 2))
    assert repr(Point(1)) == "Point(x=1, y=2)"
    assert repr(Named(1, name="a")) == "Named(x=1, y=2, name='a', doubled=6)"
    assert Unlike(1) != Unlike(1)
    assert len({Unlike(1), Unlike(1)}) == 2
    assert (hash(Own(1)), repr(Own(1))) == (7, "own")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Loose(1))


def test_what_is_frozen_cannot_change() -> None:
    for one in (Point(1), Named(1), Unlike(1), Own(1)):
        with pytest.raises(FrozenInstanceError):
            one.x = 2  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del one.x
    loose = Loose(1)
    loose.x = 2
    assert loose == Loose(2)


def test_copies_replacements_and_pickles_are_equal() -> None:
    named = Named(1, 5, [9], "a")
    assert replace(named, x=3) == Named(3, 5, name="a")
    assert replace(named, x=3).doubled == 16
    for other in (copy.copy(named), copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
        assert other == named
        assert other.seen == [9]
    assert dataclasses.asdict(Loose(1, {"a": 2})) == {"x": 1, "more": {"a": 2}}
    assert [one.name for one in dataclasses.fields(Named)] == ["x", "y", "seen", "name", "doubled"]
    assert Point.__match_args__ == ("x", "y", "seen")


def test_no_method_is_compiled_before_it_is_worth_it() -> None:
    @dataclass(frozen=True, slots=True)
    class Late:
        """Not made yet."""

        x: int

    before = Late.__init__
    assert Late(1) == Late(x=1)
    assert before is Late.__init__
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Late()  # type: ignore[call-arg]
    assert before is not Late.__init__
    assert Late.__init__.__code__.co_varnames[:2] == ("self", "x")
    assert not hasattr(Late(1), "__dict__")


@dataclass(frozen=True, slots=True)
class Remembering(HashedOnce):
    """Keeps its hash."""

    x: Any
    y: int = 2


def test_a_hash_that_is_kept_is_that_of_the_fields_and_no_part_of_the_value() -> None:
    """It is not copied to what ``replace`` makes, nor written by ``pickle``: hashes of texts differ from process to
    process."""
    one = Remembering("a")
    assert hash(one) == hash(Remembering("a")) == hash(("a", 2))
    assert hash(one) == hash(one)
    assert one == Remembering("a")
    assert hash(replace(one, y=3)) == hash(("a", 3))
    assert not hasattr(pickle.loads(pickle.dumps(one)), "_hash")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Remembering([]))


def test_a_pattern_is_compiled_when_it_is_first_used_and_then_does_what_the_standard_librarys_does() -> None:
    made = pattern(r"([a-z]+)=(\d+)")
    assert vars(made) == {"_text": r"([a-z]+)=(\d+)"}
    assert made.sub(r"\2", "tp=4") == "4"
    assert [*vars(made)] == ["_text", "sub"]
    found = made.fullmatch("pp=16")
    assert found is not None
    assert found.groups() == ("pp", "16")


@pytest.mark.parametrize("wrong", [((), {}), ((1, 2, 3, 4), {}), ((1,), {"x": 1}), ((1,), {"z": 1})])
def test_what_is_wrong_is_said_by_the_compiled_method(wrong: tuple[tuple[int, ...], dict[str, int]]) -> None:
    """As the standard library's does: too few, too many, twice the same, and one that is not there."""

    @dataclasses.dataclass
    class Known:
        x: int
        y: int = 2

    @dataclass
    class Late:
        x: int
        y: int = 2

    with pytest.raises(TypeError) as known:
        Known(*wrong[0], **wrong[1])
    with pytest.raises(TypeError) as late:
        Late(*wrong[0], **wrong[1])
    assert str(late.value).replace("Late", "Known") == str(known.value)


def test_every_call_of_many_sets_the_same() -> None:
    """Some are before ``__init__`` is compiled, some behind."""
    made = [Named(n, name="n") for n in range(40)]
    assert [(one.x, one.y, one.seen, one.name, one.doubled) for one in made] == [
        (n, 2, [], "n", 2 * (n + 2)) for n in range(40)
    ]
