"""Flags that take several values."""

from __future__ import annotations

import pytest

from memplan.commands.app import expanded


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
