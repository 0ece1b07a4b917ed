"""YAML: lines are known, surprises are refused, and no document costs more than its length."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.plan.library import examples, model_specs
from memplan.plan.text import _simple, parse_yaml
from memplan.plan.yaml_parser import parse_events

from .outcomes import error_of


def read(text: str) -> object:
    return parse_yaml(text, "plan.yaml").plain()


def refusal(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        parse_yaml(text, "plan.yaml")
    return str(caught.value)


def test_every_value_knows_its_line() -> None:
    node = parse_yaml("model: gpt2\nlayout:\n  tp: 4\n  pp:\n    8\nlist:\n- 1\n- 2\n", "p")
    origins = {path: origin.line for path, origin in node.origins()}
    assert origins == {
        "": 1,
        "model": 1,
        "layout": 2,
        "layout.tp": 3,
        "layout.pp": 4,
        "list": 6,
        "list.0": 7,
        "list.1": 8,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-3", -3),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("true", True),
        ("null", None),
        ("~", None),
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2021-01-01", "2021-01-01"),
        (".inf", ".inf"),
        ("1e999", "1e999"),
        ("'8'", "8"),
        ('"true"', "true"),
        ("type:embed|transformer", "type:embed|transformer"),
    ],
)
def test_unquoted_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    found = read(f"a: {text}")
    assert found == {"a": value}
    assert type(found["a"]) is type(value)  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "plan.yaml: is empty"),
        ("# only a comment\n", "plan.yaml: is empty"),
        ("a: 1\nb: 2\na: 3\n", "plan.yaml:3: gives a twice (first on line 1); keep one"),
        ("a: 1\n---\nb: 2\n", "plan.yaml:2: holds a second document after `---`; a plan is one document"),
        ("a: !!python/object/apply:os.system [true]\n", "plan.yaml:1: has the YAML tag tag:yaml.org,2002:python"),
        ("a: !!int '8'\n", "plan.yaml:1: has the YAML tag tag:yaml.org,2002:int; only plain values are read"),
        ("x: &x {a: 1}\nb:\n  <<: *x\n", "plan.yaml:3: uses a merge key"),
        ("a: &a [*a]\n", "plan.yaml:1: repeats *a, which is not complete"),
        ("a: *b\n", "plan.yaml:1: repeats *b"),
        ("? [1]\n: 2\n", "plan.yaml:1: has a list or a mapping as a field's name"),
        ("a: [1,\nb: 2\n", "plan.yaml:2: is not valid YAML: "),
        ("a: 1\n b: 2\n", "plan.yaml:2: is not valid YAML: mapping values are not allowed"),
        ("a: \x07", "plan.yaml:1: contains a control character"),
        ("a:\n\t- b\n", "plan.yaml:2: is not valid YAML: found character"),
    ],
)
def test_what_is_refused_says_where_and_why(text: str, line: str) -> None:
    assert refusal(text).startswith(line)


def test_a_billion_laughs_are_refused_at_once() -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.process_time()
    assert "takes more work to read than the limit of 4,000,000 steps" in refusal("\n".join(lines))
    assert time.process_time() - start < 1


def test_deep_nesting_is_refused_at_once() -> None:
    start = time.process_time()
    assert "nested more than" in refusal("[" * 500_000)
    assert "nested more than" in refusal("{a: " * 100_000)
    assert time.process_time() - start < 2


def test_aliases_in_reason_are_read() -> None:
    assert read("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1), values, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_json_reads_as_json(value: object) -> None:
    assert parse_yaml(json.dumps(value, indent="\t"), "plan.json").plain() == value


@given(st.text(max_size=300) | st.text("ab: -[]{},&*!|>'\"%#\n\t?~<", max_size=120))
def test_any_text_gives_a_value_or_one_line(text: str) -> None:
    assert len(error_of(lambda: parse_yaml(text, "plan.yaml")).splitlines()) <= 1


@pytest.mark.parametrize("name", [*examples(), *model_specs()])
def test_what_is_built_in_is_simple(name: str) -> None:
    text = {**examples(), **model_specs()}[name].read_text()
    assert _simple(text, name, True) == parse_events(text, name, True)


LINES = (
    "a: 1", "b: x y", "c:", "  a: 2", "  b: true", 'd: "a # b"', "# e", "", "  # f", "e: 0-10, 3", "a: null", "f: 1 ",
    "g:  2", "  0: .5", "---", "...", "- a", "h: ", "i: x|y", "j: 1:2", "k: -", "l: a #b", "m: 010", "n: [1]", "o: ~",
    "    q: 1", "r: -3", "s: a;(b)/c", "t", "2: 3e4", "u: a, b", "v: .", "w: 1.", "x: +1", "y: ''",
    "z: b:1, c:d", "a: b: c", "b: c:", "c: d:e:",
)  # fmt: skip


@given(st.lists(st.sampled_from(LINES), max_size=6), st.booleans())
def test_a_simple_document_is_what_the_parser_says(lines: list[str], numbered: bool) -> None:
    text = "\n".join(lines)
    simple = _simple(text, "p", numbered)
    assert simple is None or simple == parse_events(text, "p", numbered)
