"""``memplan init``: what it writes is the plan of its flags, and ``estimate`` takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan.cli import main
from memplan.formats.exported import as_flag, as_text, differences, flag_words, model_flags
from memplan.plan.fields import plan_fields
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import FOLLOW, resolve
from tests.formats import deepspeed_plans, device_map_plans, megatron_deepspeed_plans, megatron_plans, torchtitan_plans

PLANS = st.one_of(
    deepspeed_plans.plans(),
    device_map_plans.plans(),
    megatron_deepspeed_plans.plans(),
    megatron_plans.plans(),
    torchtitan_plans.plans(),
)


def flags_of(plan: Plan) -> list[str]:
    """The command line that says ``plan``."""
    words = [word for name, value in model_flags(plan.model).items() for word in flag_words(name, value)]
    for path, field in plan_fields().items():
        if field.section == "model" or path == "model" or not field.flag:
            continue
        value = plan.at(path)
        if path == "device_map" and value is not None:
            placed = ", ".join(f"{device}: [{as_text(tuple(layers))}]" for device, layers in value.items())
            words += ["--device-map", f"{{{placed}}}"]
        elif value != field.default or path == "precision.dtype" or _is_said(plan, path):  # which the GPU decides
            words += flag_words(*as_flag(plan, path))
    return words


def _is_said(plan: Plan, path: str) -> bool:
    """Somebody set a field whose default others decide."""
    section, _, name = path.partition(".")
    return path in FOLLOW and name in getattr(plan, section).model_fields_set


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(PLANS)
def test_what_it_writes_is_the_plan_of_its_flags(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("init") / "plan.yaml"
    assert main(["init", str(path), *flags_of(plan)]) == 0
    assert not list(differences(resolve(plan), resolve(read_plan(str(path)).plan)))


TITAN = ["--model", "llama-3-8b", "--framework", "fsdp", "--fsdp-code", "torchtitan", "--gpus", "8", "--seq", "2048"]


@pytest.mark.parametrize(
    "flags",
    [
        [*TITAN, "--tp", "2"],
        [*TITAN, "--pp", "2", "--gbs", "32"],
        [*TITAN, "--model", "qwen3-8b"],
        ["--framework", "ddp", "--gpus", "4"],
        ["--framework", "device-map", "--gpus", "4"],
        ["--framework", "megatron", "--model", "gpt3-175b", "--tp", "8", "--pp", "2"],
    ],
)
def test_estimate_takes_what_it_writes(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    assert main(["init", str(path), *flags]) == 0
    assert main(["estimate", str(path), "-q"]) == 0
    said = capsys.readouterr().out
    assert (
        main(["estimate", *flags, "-q"] if "--model" in flags else ["estimate", "--model=gpt2-xl", *flags, "-q"]) == 0
    )
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--framework", "single", "--tp", "8"], "--tp: layout.tp = 8: must be 1 with framework single"),
        (["--framework", "device-map"], "hardware.gpus: is missing"),
        (["--framework", "megatron", "--tp", "8"], "--tp: layout.tp = 8: must divide the 25 attention heads"),
    ],
)
def test_what_estimate_would_refuse_is_not_written(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    assert main(["init", str(path), *flags]) == 2
    assert line in capsys.readouterr().err
    assert not path.exists()
