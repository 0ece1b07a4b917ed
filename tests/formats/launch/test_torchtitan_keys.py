"""torchtitan's keys and the days on which they were keys; pipeline stages; lines of TOML."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memplan.formats.torchtitan.keys import Era, era_of, key_of, keys, parse_toml
from memplan.formats.torchtitan.settings import Settings
from memplan.formats.torchtitan.stages import stages
from memplan.plan.errors import Node, Origin, PlanError

from ...plan.outcomes import error_of


def test_every_key_says_why_or_which_way() -> None:
    assert len(keys()) == 302
    for key in keys().values():
        assert key.since < key.until
        if key.table.value == "irrelevant":
            assert key.why
        if key.table.value == "not-modelled":
            assert key.why.partition(": ")[0] in ("more", "less", "either", "refused")
    assert all(key_of(condition) for key in keys().values() for condition in key.conditions)


@given(st.sampled_from([key for key in keys().values() if key.since < "2026-02-23"]))
def test_a_toml_with_one_key_is_of_a_day_that_has_it(key: Any) -> None:
    """Its day is a release's if any has the key."""
    era = era_of([key.name], is_json=False, version=None)
    assert key.was(era.day)
    assert (" 0." in era.label) == any(key.was(day) for day in ("2025-06-17", "2025-10-17", "2025-12-26", "2026-02-20"))


@given(
    st.integers(1, 60),
    st.integers(2, 8),
    st.booleans(),
    st.sampled_from(["2024-12-26", "2025-06-17", "2026-02-20"]),
)
def test_stages_are_in_order_and_even(layers: int, pp: int, several: bool, day: str) -> None:
    origin = Origin("job.toml")
    name = ("experimental" if day < "2025" else "parallelism") + ".pipeline_parallel_schedule"
    schedule = Node("Interleaved1F1B" if several else "1F1B", origin)
    settings = Settings({name: schedule}, origin, Era(day, ""))
    if layers + (2 if day > "2025" else 0) < pp * (2 if several else 1):
        with pytest.raises(PlanError, match="too many"):
            stages(settings, layers, pp)
        return
    cut = stages(settings, layers, pp)
    assert cut.first[0] == 0
    assert cut.first[-1] == layers + 3
    assert len(cut.first) - 1 == pp * cut.chunks
    sizes = [after - before for before, after in zip(cut.first, cut.first[1:], strict=False)]
    sizes[-1] -= 1
    if day > "2025":
        assert max(sizes) - min(sizes) <= 1


def test_lines_of_toml() -> None:
    text = "a = 1\n[s.t]  # section\nb = [\n 1,\n]\n'c.d' = 2\n\"e\" = '''\nx = 1\n'''\n[[many]]\nf = 2020-01-01\n"
    nodes = parse_toml(text, "f.toml").mapping
    section = nodes["s"].mapping["t"]
    assert [str(node.origin) for node in (nodes["a"], section, section.mapping["b"])] == [
        "f.toml:1",
        "f.toml:2",
        "f.toml:3",
    ]
    assert str(section.mapping["e"].origin) == "f.toml:7"
    assert nodes["many"].plain() == [{"f": "2020-01-01"}]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["", "   ", "# a = 1", "\t# [x]"]),
            st.sampled_from(
                [" a = 1", "b.c = 'x = 1'", '"d e" = 2', "f=[1, 2] # g = 1", "h = '#'", "i.'j' = 3", "k\t=\t1"]
            ),
            st.sampled_from(["[s]", " [ t . u ] # [v]", '["w.x"]']),
        ),
        unique=True,
    )
)
def test_every_key_of_toml_has_its_line(lines: list[str]) -> None:
    root, section = parse_toml("\n".join([*lines, "end = 1"]), "f.toml"), ""
    for number, line in enumerate(lines, 1):
        name = line.partition("#")[0].partition("=")[0].strip()
        section = name if name.startswith("[") else section
        path = [part.strip(" '\"[]") for part in (name if name.startswith("[") else f"{section}.{name}").split(".")]
        if name and '"' not in section + name:
            node = root
            for part in filter(None, path):
                node = node.mapping[part]
            assert node.origin.line == number


@pytest.mark.parametrize("before", ["", "[model]\n", "a = '''\n", "[", "a = ", "a = [", "a."])
@pytest.mark.parametrize("unit", [" ", "[ ", "a.", "a ", '"', "\n", "[[", "1,", "9", "a={", "\t\n", "'.'"])
@pytest.mark.parametrize("size", [3_000, 200_000])
def test_any_toml_is_read_or_refused_in_time(before: str, unit: str, size: int) -> None:
    began = time.process_time()
    said = error_of(lambda: parse_toml(before + unit * (size // len(unit)), "f.toml"))
    assert "\n" not in said
    assert time.process_time() - began < 2


@settings(max_examples=30, deadline=None)
@given(st.integers(33, 4000), st.booleans())
def test_what_is_too_deep_is_one_line(parts: int, header: bool) -> None:
    key = ".".join(["a"] * parts)
    said = error_of(lambda: parse_toml(f"x = 1\n[{key}]\nb = 1" if header else f"x = 1\n{key} = 1", "f.toml"))
    assert said.startswith(
        "f.toml:2: has a line with more than 200 dots" if parts > 201 else "f.toml:2: is nested more than 32"
    )


@settings(max_examples=10, deadline=None)
@given(st.integers(4301, 30_000))
def test_long_numbers_are_one_line(digits: int) -> None:
    assert error_of(lambda: parse_toml(f"a = 1\nb = {'7' * digits}\n", "f.toml")).startswith(
        "f.toml:2: has a number of more than 4,300 digits"
    )
