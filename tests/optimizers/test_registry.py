"""An optimizer is one file and a line in the registry: a toy, in this file, is estimated, searched and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from memplan.cli import main
from memplan.layers.autograd import Recorder
from memplan.optimizers import ROOMS, algorithm, algorithms, trainer_names
from memplan.optimizers.base import Algorithm, FieldsByName, Parameters, State, Steps, full, like
from memplan.plan.errors import PlanError
from memplan.plan.plan import Optimizer, Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.schema import plan_schema
from memplan.search.time.updates import step_bytes
from memplan.tape.events import Category


def halves(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """A step that copies every gradient, one after the other."""
    for parameter in parameters:
        copied = like(r, parameter, dtype, "copied")
        del copied


class Toy(Algorithm):
    """Three states in fp32 for every parameter."""

    name = "toy"
    implementations = ("for-loop",)
    steps: ClassVar[Steps] = {"for-loop": halves}
    trainer: ClassVar[FieldsByName] = {"toy_32bit": {"name": "toy"}}

    def moments(self, optimizer: Optimizer) -> int:
        return 3

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        return tuple(full(f"moment_{i}", Category.OPTIMIZER_STATES, "fp32") for i in range(3))

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        return ("a toy",)


OPTIMIZERS = {"toy": Toy()}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ROOMS, "toy", __name__)
    yield
    algorithm.cache_clear()


def plan(**flags: str) -> Plan:
    return read_plan(None, {"model": "gpt2", "seq": "64", "optimizer": "toy"} | flags).plan


def answer(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    job = ["--model=gpt2", "--layers=2", "--seq=64", "--gpu=a100-80gb", "--optimizer=toy"]
    assert main([*command.split(), *job, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("framework", ["--framework=single", "--framework=ddp --gpus=2"])
def test_a_new_optimizer_is_estimated_and_reported(capsys: pytest.CaptureFixture[str], framework: str) -> None:
    found = answer(capsys, f"estimate {framework}")
    (stage,) = found["stages"]
    assert stage["breakdown"]["optimizer_states"] == pytest.approx(3 * 4 * stage["parameters"], rel=0.01)
    assert "a toy" in found["assumptions"]
    assert found["plan"]["optimizer"]["name"] == "toy"
    assert found["plan"]["optimizer"]["implementation"] == "for-loop"


def test_a_new_optimizer_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "suggest-partition --framework=ddp --gpus=2 --gbs=8")
    assert found["recommended"]["plan"]["optimizer"]["name"] == "toy"


def test_its_time_is_its_own() -> None:
    """bf16: the gradient's 2 bytes, the parameter and three states read and written."""
    assert step_bytes(resolve(plan())) == 2 + 2 * 3 * 2 + 2 * 2


def test_other_tools_names_and_the_schema_have_it() -> None:
    assert trainer_names()["toy_32bit"] == {"name": "toy"}
    assert "toy" in plan_schema()["$defs"]["Optimizer"]["properties"]["name"]["enum"]


def test_a_name_that_nobody_registered_is_refused() -> None:
    with pytest.raises(PlanError, match=r"must be one of sgd, adam, adamw"):
        plan(optimizer="nobody")


def test_every_optimizer_says_what_it_is() -> None:
    for one in algorithms():
        optimizer = Optimizer(name=one.name, implementation=one.implementations[0], block_size=256)
        assert algorithm(one.name) is one
        assert set(one.steps) <= set(one.implementations)
        assert optimizer.algorithm.bytes_moved(optimizer, 4, 4) > 0
        assert one.in_8_bits is None or algorithm(one.in_8_bits).eight_bit
