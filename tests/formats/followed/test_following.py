"""Statements of followed Python, beside what Python itself makes of them."""

from __future__ import annotations

import pytest

from memplan.formats.followed.following import Following
from memplan.formats.followed.python_values import Dialect, Made, Unknown, Value
from memplan.plan.errors import Node, PlanError

DIALECT = Dialect("give another file", lambda made: made.name == "Job")


def returned(body: str) -> Value | None:
    text = "def made():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return Following(text, "recipe.py", None, DIALECT).configuration("made")


TRIED = """
try:
    {tried}
except KeyError:
    found = "a key"
except ({caught}):
    found = "caught"
else:
    found = "followed"
return found
"""


@pytest.mark.parametrize(
    ("tried", "caught"),
    [
        ("raise ValueError('no')", "ValueError, TypeError"),
        ("raise ValueError('no')", "Exception"),
        ("raise KeyError", "ValueError"),
        ("found = 1", "ValueError"),
        ("pass", "ValueError"),
    ],
)
def test_what_catches_an_exception_is_for_its_class_and_else_is_for_none(tried: str, caught: str) -> None:
    body = TRIED.format(tried=tried, caught=caught)
    names: dict[str, object] = {}
    exec("def made():\n" + "".join(f"    {line}\n" for line in body.splitlines()), names)
    found = returned(body)
    assert isinstance(found, Node)
    assert found.value == names["made"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    "body",
    [
        "try:\n    raise ValueError('no')\nexcept KeyError:\n    pass\nreturn 1",
        "try:\n    raise ValueError('no')\nfinally:\n    found = 1\nreturn found",
    ],
)
def test_an_exception_that_nothing_catches_leaves_the_function(body: str) -> None:
    found = returned(f"def inner():\n{''.join(f'    {line}{chr(10)}' for line in body.splitlines())}return inner()")
    assert isinstance(found, Unknown)
    assert found.why is not None
    assert "raises ValueError('no')" in str(found.why)


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ("isinstance('bf16', str)", True),
        ("isinstance('bf16', (int, str))", True),
        ("isinstance('bf16', int | str)", True),
        ("isinstance(4, (list, tuple))", False),
        ("isinstance([4], (list, tuple))", True),
        ("isinstance([4], tuple)", None),
        ("isinstance(LoRA(), LoRA)", True),
        ("isinstance(LoRA(), str)", False),
        ("isinstance(LoRA(), PEFT)", None),
        ("isinstance('lora', PEFT)", False),
        ("isinstance(4)", None),
        ("getattr(LoRA())", None),
        ("hasattr()", None),
    ],
)
def test_what_a_value_is_an_instance_of(asked: str, known: bool | None) -> None:
    """A base class and a tuple are not told from a class and a list: these are not known."""
    found = returned(f"return {asked}")
    assert isinstance(found, Unknown) if known is None else isinstance(found, Node) and found.value is known


def test_functions_that_are_known_take_their_arguments_by_name() -> None:
    def taken(owner: Value | None, given: object, where: object) -> Value:
        assert isinstance(given, list)
        return Made("Taken", dict(enumerate(given)), where)  # type: ignore[arg-type]

    dialect = Dialect("give another file", lambda made: False, known={"takes": taken})
    following = Following("def made():\n    return takes(1, size=2)\n", "recipe.py", None, dialect)
    found = following.configuration("made")
    assert isinstance(found, Made)
    assert [one.value for one in found.fields.values() if isinstance(one, Node)] == [1, 2]


DOUBLED = {
    "a list": ("['x'] * 4000", "found + found"),
    "text": ("'x'", "found + found"),
    "a part of text": ("'x'", "f'{found}{found}'"),
    "a list within two": ("['x']", "[found, found]"),
    "a mapping within two": ("['x']", "{'a': found, 'b': found}"),
    "what a class makes": ("Job()", "Job(a=found, b=found)"),
    "a copy of it": ("Job()", "deepcopy(Job(a=found, b=found))"),
}


@pytest.mark.parametrize("what", DOUBLED)
def test_what_doubles_with_every_line_is_bounded(what: str) -> None:
    """30 lines make 2³⁰ parts, of which none is written out."""
    first, doubled = DOUBLED[what]
    lines = [f"found = {first}", *[f"found = {doubled}"] * 30, "return found"]
    with pytest.raises(PlanError, match=r"over the limit of 128 MiB|takes more work to read"):
        returned("\n".join(lines))


def test_what_has_itself_as_a_part_is_nested_too_deeply() -> None:
    with pytest.raises(PlanError, match="is nested more than 48 deep"):
        returned("found = Job()\nfound.own = found\nreturn found")


def test_an_import_of_thousands_of_parts_is_not_given_to_the_parser() -> None:
    """Of 60,000 parts CPython 3.11 takes 3.7 GiB and 6 s."""
    text = f"from a{'.a' * 60_000} import made\n"
    with pytest.raises(PlanError, match=r"is no Python that can be read \(an import with more than 200 dots\)"):
        Following(text, "recipe.py", None, DIALECT)
