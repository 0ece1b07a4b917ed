"""Gemma 4's experts beside an MLP, in frameworks that see parameters in their order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from memplan.families import family
from memplan.frameworks import framework
from memplan.frameworks.plain.hooked import model_of
from memplan.frameworks.plain.programs import layer_shape
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.shape import model_flops

from ..layers.test_against_transformers import LAYERS, config_of

NAME = "gemma4_text-experts"


def plan(folder: Path, **flags: str) -> ResolvedPlan:
    config_of(NAME).to_json_file(folder / "config.json", use_diff=False)
    given = {"model": str(folder), "seq": "64", "dtype": "bf16", **flags}
    return resolve(read_plan(None, {name.replace("_", "-"): value for name, value in given.items()}).plan)


def test_parameters_come_as_transformers_registers_them(tmp_path: Path) -> None:
    """A router's two scales before the weight of its linear layer (``Module.named_parameters``)."""
    shape = layer_shape(plan(tmp_path, framework="ddp", gpus="2"))
    found = model_of(shape, LAYERS, Options(), False, False).parameters
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(NAME))
    assert [one.shape for one in found] == [tuple(one.shape) for one in model.parameters()]


def test_zero_3_is_refused_with_experts_alone(tmp_path: Path) -> None:
    known = family("gemma4_text")
    with pytest.raises(PlanError, match=r"layout\.zero = 3: must be 0, 1 or 2 with experts of family gemma4_text"):
        framework("deepspeed").programs(plan(tmp_path, framework="deepspeed", gpus="2", zero="3"), Options())
    assert not known.no_zero3


def test_flops_of_a_step_are_those_of_its_products(tmp_path: Path) -> None:
    """Of three layers, each with an MLP and experts; what a model needs is all that it runs with eager attention."""
    made = plan(tmp_path, framework="single", attention="eager")
    entries = framework("single").time.entries(made)
    assert model_flops(made) == 2 * entries.layer.flops + entries.dense.flops + entries.head.flops
