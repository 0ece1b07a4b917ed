"""One line per error: field, value, what is allowed, origin, nearest name."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import ABSENT, Origin, PlanError, is_slip, nearest, shown


def test_a_line_names_origin_field_value_and_what_is_allowed() -> None:
    error = PlanError("layout.tp", 7, "must divide the 80 attention heads (1, 2, 4, …)")
    located = error.located({"layout.tp": Origin("plan.yaml", 12), "": Origin("plan.yaml")})
    assert str(located) == "plan.yaml:12: layout.tp = 7: must divide the 80 attention heads (1, 2, 4, …)"
    assert str(error) == "layout.tp = 7: must divide the 80 attention heads (1, 2, 4, …)"


def test_the_origin_of_a_field_that_was_not_given_is_that_of_its_section() -> None:
    origins = {"": Origin("standard input"), "layout": Origin("standard input", 3)}
    assert str(PlanError("layout.dp", 3, "no").located(origins)) == "standard input:3: layout.dp = 3: no"
    assert str(PlanError("batch.gbs", 3, "no").located(origins)) == "standard input: batch.gbs = 3: no"


def test_an_origin_that_is_known_stays() -> None:
    error = PlanError("layout.tp", 7, "no", origin=Origin("--tp"))
    assert error.located({"layout.tp": Origin("plan.yaml", 1)}) is error


def test_the_nearest_name_is_suggested() -> None:
    assert str(PlanError("framework", "megatron-deepsped", "no", known=["ddp", "megatron-deepspeed"])).endswith(
        "no; did you mean megatron-deepspeed?"
    )
    assert str(PlanError("layout.tpp", ABSENT, "no", known=["tp", "pp"])) == "layout.tpp: no; did you mean tp?"
    assert PlanError("framework", "zzz", "no", known=["ddp"]).suggestion is None
    assert nearest("H100", ["h100-80gb", "h200"]) == "h100-80gb"
    assert nearest("A100", ["a10", "a100-40gb", "a100-80gb", "a100-x"]) == "a100-40gb or a100-80gb"
    assert nearest("embeddings-32bit", ["embeddings_32bit"]) == "embeddings_32bit"


def test_long_and_strange_values_are_cut_and_escaped() -> None:
    assert str(PlanError("a", "x\ny\x1b[31m", "no")) == "a = x\\ny\\x1b[31m: no"
    assert len(shown("x" * 1000)) == 60
    assert shown(10**4000).startswith("a number of")
    assert [shown(value) for value in (None, True, [1, None], {"a": False}, "")] == [
        "null",
        "true",
        "[1, null]",
        "{a: false}",
        "''",
    ]


@given(st.text(), st.one_of(st.text(), st.integers(), st.none(), st.lists(st.text())), st.text(), st.text())
def test_it_is_always_one_line(field: str, value: object, problem: str, source: str) -> None:
    line = str(PlanError(field, value, problem, origin=Origin(source), known=["a", "tp"]))
    assert len(line.splitlines()) <= 1
    assert line.isprintable()


@pytest.mark.parametrize(
    ("wrong", "meant", "is_one"),
    [
        ("--hiden-size", "--hidden-size", True),
        ("--hidden-szie", "--hidden-size", True),
        ("--num_layers", "--num-layers", True),
        ("--num-layer", "--num-layers", True),
        ("--micro-bach-szie", "--micro-batch-size", True),
        ("--use-flash-attn-triton", "--use-flash-attn", False),
        ("--fp4-format", "--fp8-format", False),
        ("--seq-len", "--seq-length", False),
        ("--top", "--tp", True),
        ("--xy", "--tp", False),
    ],
)
def test_what_is_surely_misspelt(wrong: str, meant: str, is_one: bool) -> None:
    assert is_slip(wrong, meant) is is_one


def test_a_size_beyond_any_number_is_said_all_the_same() -> None:
    assert "hardware.capacity = " in str(PlanError("hardware.capacity", 10**400, "is too large"))
    assert "hardware.capacity = 24GiB" in str(PlanError("hardware.capacity", 24 << 30, "is too large"))
