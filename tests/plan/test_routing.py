"""Records of where tokens went: a factor of each layer, of the rank that has most in all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

ROWS = [[30, 10, 30, 10], [10, 30, 20, 20], [10, 10, 10, 50]]
"""Of three layers with four experts: rank 1 of two has 40, 40 and 60 of 80 tokens."""


def plan_with(record: str) -> Plan:
    flags = {
        "model": "mixtral-8x7b", "framework": "megatron", "gpus": "2", "ep": "2", "layers": "4", "experts": "4",
        "dense-layers": "1", "seq": "4096", "hidden": "256", "expert-ffn": "512", "experts-imbalance": record,
    }  # fmt: skip
    return read_plan(None, flags).plan


@pytest.mark.parametrize("kind", ["list", "mapping", "csv", "csv with a heading"])
def test_factors_of_the_most_loaded_rank(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("record.csv" if "csv" in kind else "record.json")
    if "csv" in kind:
        heading = ["e0, e1, e2, e3"] if "heading" in kind else []
        path.write_text("\n".join([*heading, *(", ".join(map(str, row)) for row in ROWS)]))
    else:
        path.write_text(json.dumps(ROWS if kind == "list" else dict(zip(("0", "2", "3"), ROWS, strict=True))))
    plan = plan_with(str(path))
    assert plan.experts.imbalance == "1.00,1.00,1.50"
    peak, balanced, all_of_it = (
        estimate(resolve(plan_with(one))).stages[0].requested for one in (str(path), "balanced", "1.5")
    )
    assert balanced < peak < all_of_it
    (notice,) = [one for one in estimate(resolve(plan)).warnings if one.code == "experts-imbalance"]
    assert "this estimate: 1.17 times the mean in 3 layers, from 1 to 1.5" in notice.message


@pytest.mark.parametrize(
    ("imbalance", "said"), [("1.5", "1.5 times the mean"), ("worst", "the worst, 4 times the mean")]
)
@pytest.mark.parametrize(("seq", "fits"), [("1024", True), ("2048", False)])
def test_an_imbalance_that_does_not_fit_is_said_to(imbalance: str, said: str, seq: str, fits: bool) -> None:
    """Two of eight experts get a token, a rank gets four times the mean at most."""
    flags = {
        "model": "mixtral-8x7b", "framework": "megatron", "gpus": "8", "ep": "8", "layers": "16", "seq": seq,
        "gpu": "a100-80gb", "zero": "1", "mbs": "1" if fits else "2", "gbs": "16",
    }  # fmt: skip
    plan = read_plan(None, flags).plan
    whole = estimate(resolve(plan))
    assert whole.judged.verdict.fits
    (notice,) = [one for one in whole.warnings if one.code == "experts-imbalance"]
    assert f"({said}{'' if fits else ': does not fit'})" in notice.message
    uneven = plan.model_copy(update={"experts": plan.experts.model_copy(update={"imbalance": imbalance})})
    assert estimate(resolve(uneven)).judged.verdict.fits is fits


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[", "is not JSON"),
        ("[[1, 2, 3, 4]]", "has 1 rows; one for each of the 3 layers with experts is wanted"),
        ("7", "has no rows"),
        (json.dumps([*ROWS[:2], [1, 2, 3]]), "row 2: must have 4 numbers of at least 0"),
        (
            json.dumps([*ROWS[:2], [0, 0, 0, 0]]),
            "row 2: must have 4 numbers of at least 0, one for each expert, not all",
        ),
        (json.dumps([*ROWS[:2], [1, 2, 3, -4]]), "row 2: must have"),
        (json.dumps([*ROWS[:2], [1, 2, 3, "x"]]), "row 2: must have"),
        (json.dumps({"0": ROWS[0], "1": ROWS[1], "2": ROWS[2]}), "has no layer 3, which has experts"),
    ],
)
def test_what_is_no_record(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        plan_with(str(path))
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_record_that_is_not_there() -> None:
    with pytest.raises(PlanError, match="no such file"):
        plan_with("nowhere.csv")
    with pytest.raises(PlanError, match="has 2 factors; one for each of the 3 layers"):
        resolve(plan_with("1.0,2.0"))
