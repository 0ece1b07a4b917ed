"""Every argument of the parsers is in exactly one table, with the parser's own idea of its values."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.formats.settings import Table, arguments_of, nearest_argument, parsed_line

PARSERS: list[tuple[str, str]] = [
    ("megatron", "megatron_parser.txt"),
    ("megatron-deepspeed", "megatron_deepspeed_parser.txt"),
]
OLDER = {"--activations-checkpoint-method"}
"""Arguments that parsers no longer have, named to say what they are called now."""
DIRECTIONS = ("more", "less", "either", "refused")


@pytest.mark.parametrize(("framework", "file"), PARSERS)
def test_tables_have_every_argument_of_the_parser_and_no_other(framework: str, file: str) -> None:
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    parser = {
        name: parsed_line(line, Table.MODELLED, "")
        for line in lines
        for name in parsed_line(line, Table.MODELLED, "").names
    }
    tables = arguments_of(framework)
    assert tables.keys() - OLDER == parser.keys() - OLDER
    for name, argument in parser.items():
        ours = tables[name]
        assert (ours.names, ours.type, ours.count, ours.choices) == (
            argument.names,
            argument.type,
            argument.count,
            argument.choices,
        ), name


@pytest.mark.parametrize("framework", [framework for framework, _ in PARSERS])
def test_no_argument_is_named_twice(framework: str) -> None:
    folder = Path(__file__).parents[3] / "memplan/formats/arguments"
    lines = (folder / f"{framework}.txt").read_text(encoding="utf-8").splitlines()
    names = [word for line in lines if line.startswith("--") for word in line.split() if word.startswith("--")]
    assert len(names) == len(set(names)) == len(arguments_of(framework))


@pytest.mark.parametrize("framework", [framework for framework, _ in PARSERS])
def test_every_argument_says_why_or_which_way(framework: str) -> None:
    for argument in arguments_of(framework).values():
        if argument.table in (Table.IRRELEVANT, Table.REFUSED):
            assert argument.why
        elif argument.table is Table.NOT_MODELLED:
            direction, _, what = argument.why.partition(": ")
            assert direction in DIRECTIONS
            assert what


def test_counts() -> None:
    tables = [argument.table for argument in set(arguments_of("megatron").values())]
    assert len(tables) == 879
    counts = {table: tables.count(table) for table in Table}
    assert counts[Table.MODELLED] > 80
    assert counts[Table.NOT_MODELLED] == 0


def test_the_nearest_name_is_found() -> None:
    assert nearest_argument("--num-layrs", "megatron") == "--num-layers"
    assert nearest_argument("--hiden-size", "megatron") == "--hidden-size"
    assert nearest_argument("--my-own-thing", "megatron") is None
