"""Digits that are not ASCII, numbers of more digits than Python converts, names as long: in every field and path."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan.cli import main
from memplan.plan.errors import PlanError
from memplan.plan.fields import plan_fields
from memplan.plan.read import read_plan

MANY = "9" * 5000
ODD = ("²", "٣", MANY, f"-{MANY}", f"0.{MANY}", f"{MANY}.{MANY}", f"1e{MANY}", f"0-{MANY}", f"x{MANY}", "\ud800", "0x²")
MORE = {
    "environment": [{"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:{odd}"} for odd in ODD]
    + [{"CUBLAS_WORKSPACE_CONFIG": f":{odd}:{odd}"} for odd in ODD],
    "device_map": [{"0": odd} for odd in ODD] + [{odd: "0-11"} for odd in ODD] + [{f"h.{odd}": 0} for odd in ODD],
}
FRAMEWORKS = ("megatron", "fsdp", "ddp")


@st.composite
def plans(draw: st.DrawFn) -> dict[str, object]:
    """GPT-2 in any framework, one field odd."""
    path = draw(st.sampled_from(sorted(plan_fields())))
    value = draw(st.sampled_from(MORE.get(path) or [*ODD, *([odd] for odd in ODD), *({odd: odd} for odd in ODD)]))
    plan: dict[str, object] = {
        "model": {"base": "gpt2"},
        "framework": draw(st.sampled_from(["megatron", "fsdp", "ddp"])),
    }
    section, _, name = path.partition(".")
    plan[section] = {**({"base": "gpt2"} if section == "model" else {}), name: value} if name else value
    return plan


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_an_odd_value_is_taken_or_refused_in_one_line(
    plan: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    code = main(["estimate", str(path), "-q"])
    _, errors = capsys.readouterr()
    assert code in (0, 1) or (code, errors.count("\n")) == (2, 1), errors


NAMES = ("²" * 200, "x" * 256, "x" * 5000, "~nosuchuser/x", "x/" * 3000, "\udcff", "a\0b", "/dev/null/x")
PLACES = (
    ["estimate", "NAME"],
    ["estimate", "--model", "NAME.json"],
    ["estimate", "--from", "megatron", "NAME.sh"],
    ["estimate", "gpt2-xl-4gpu", "--compare", "NAME"],
    ["init", "NAME/x"],
    ["export", "gpt2-xl-4gpu", "-o", "NAME/x"],
    ["suggest-partition", "gpt2-xl-4gpu", "--write", "NAME/x"],
    ["suggest-partition", "gpt2-xl-4gpu", "--plot", "NAME/x.svg"],
    ["runs", "--import", "NAME"],
    ["runs", "NAME"],
    ["runs", "NAME", "--export", "NAME"],
    ["validate", "--model", "gpt2", "--record", "NAME/x"],
)


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_a_name_that_cannot_be_is_refused_in_one_line(
    place: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        code = main([word.replace("NAME", name) for word in place])
        out, errors = capsys.readouterr()
        assert (code, out, errors.count("\n")) == (2, "", 1), (name[:20], errors[:300])
    assert os.listdir() == []  # noqa: PTH208


def test_a_family_that_is_no_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("model: {base: gpt2, family: [gpt2]}\nhardware: {gpus: 2}")
    with pytest.raises(PlanError, match=r"model\.family"):
        read_plan(str(tmp_path / "plan.yaml"))
