"""Flags that take several values."""

from __future__ import annotations

import pytest

from memplan.commands.app import expanded, with_file_of_csv


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a --compare b c", "a --compare b --compare c"),
        ("--compare b c --json", "--compare b --compare c --json"),
        ("--compare b - --tp 3", "--compare b --compare - --tp 3"),
        ("--vary tp=1,2 pp=1,2 plan", "--vary tp=1,2 --vary pp=1,2 plan"),
        ("--vary tp=1,2 --compare a b", "--vary tp=1,2 --compare a --compare b"),
        ("--compare a --vary tp=1 --compare b", "--compare a --vary tp=1 --compare b"),
        ("a -- --compare b c", "a -- --compare b c"),
        ("--compare=a b", "--compare=a b"),
        ("--tp 1 --compare", "--tp 1 --compare"),
        ("", ""),
    ],
)
def test_each_value_gets_its_flag(written: str, meant: str) -> None:
    assert expanded(written.split()) == meant.split()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--csv", "--csv=-"),
        ("--csv - --tp 2", "--csv=- --tp 2"),
        ("--csv out.csv plan.yaml", "--csv=out.csv plan.yaml"),
        ("--csv plan.yaml", "--csv=- plan.yaml"),
        ("--csv --json", "--csv=- --json"),
        ("--csv=out plan", "--csv=out plan"),
        ("a -- --csv x.csv", "a -- --csv x.csv"),
        ("--csv -- x.csv", "--csv=- -- x.csv"),
    ],
)
def test_csv_has_a_file_or_none(written: str, meant: str) -> None:
    assert with_file_of_csv(written.split()) == meant.split()
