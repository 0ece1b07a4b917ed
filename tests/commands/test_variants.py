"""Which plans one command estimates, and what it calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.commands.estimate import read_variants
from memplan.plan.errors import PlanError


def test_every_combination_of_values_has_its_name() -> None:
    variants = read_variants("llama-3-8b", {"seq": "512"}, [], ["optimizer=adamw,adam8bit", "mbs=1,2"])
    assert list(variants) == [
        "optimizer=adamw mbs=1",
        "optimizer=adamw mbs=2",
        "optimizer=adam8bit mbs=1",
        "optimizer=adam8bit mbs=2",
    ]
    last = variants["optimizer=adam8bit mbs=2"]
    assert (last.plan.optimizer.name, last.plan.batch.mbs, last.plan.batch.seq) == ("adam8bit", 2, 512)
    assert str(last.origins["batch.mbs"]) == "--vary mbs"
    assert str(last.origins["batch.seq"]) == "--seq"


def test_plans_are_compared_with_the_same_flags(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: llama-3-8b\nbatch: {mbs: 4}\n")
    mine = str(tmp_path / "mine.yaml")
    variants = read_variants("llama-3-8b", {"seq": "512"}, [mine], [])
    assert list(variants) == ["llama-3-8b", mine]
    assert [read.plan.batch.seq for read in variants.values()] == [512, 512]
    assert [read.plan.batch.mbs for read in variants.values()] == [1, 4]
    assert len(read_variants("llama-3-8b", {}, [mine], ["mbs=1,2"])) == 4


def test_flags_alone_are_a_plan_only_if_they_name_a_model() -> None:
    assert list(read_variants(None, {"seq": "512"}, ["llama-3-8b"], [])) == ["llama-3-8b"]
    assert list(read_variants(None, {"model": "gpt2"}, ["llama-3-8b"], [])) == ["flags", "llama-3-8b"]


def test_values_that_are_lists_are_separated_by_semicolons() -> None:
    one = read_variants("llama-3-8b", {}, [], ["partition=uniform,parameters"])
    assert [read.plan.pipeline.partition for read in one.values()] == ["uniform", "parameters"]
    two = read_variants("llama-3-8b", {}, [], ["partition=0,4,8;0,5,8"])
    assert [read.plan.pipeline.partition for read in two.values()] == [(0, 4, 8), (0, 5, 8)]
    three = read_variants("llama-3-8b", {}, [], ["cutoffs=10,20"])
    assert [read.plan.loss.cutoffs for read in three.values()] == [(10, 20)]
    four = read_variants("llama-3-8b", {}, [], ["env=A=1,A=2"])
    assert [read.plan.environment for read in four.values()] == [{"A": "1"}, {"A": "2"}]


@pytest.mark.parametrize("assignment", ["tp", "tp=", "tp=1,,2", "=1", "nothing=1"])
def test_other_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(PlanError, match=r"^--vary: "):
        read_variants("llama-3-8b", {}, [], [assignment])
