"""What optimizers keep and what their steps take, beside the real ones on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import optimization

from memplan.frameworks.plain import programs as plain
from memplan.layers.module import Options, Parameter
from memplan.optimizers.base import optimizer_states, step_tape, step_temporaries
from memplan.optimizers.muon import is_hidden_matrix
from memplan.plan.plan import Optimizer
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Hold, Seam, Tape, fold
from memplan.tape.program import static
from tests.oracle.optimizer_step import Make, traced

optim: Any = torch.optim
transformers: Any = optimization

MODEL = [
    Parameter("word.weight", (1000, 48)),
    Parameter("norm.weight", (48,)),
    Parameter("up.weight", (400, 48)),
    Parameter("up.bias", (400,)),
    Parameter("down.weight", (48, 400)),
    Parameter("query.weight", (4096, 64)),
    Parameter("norm_2.weight", (130_000,)),
    Parameter("head.weight", (1000, 48)),
]
"""Matrices of both orientations and vectors, hidden ones and others."""

Make1 = Callable[[list[torch.nn.Parameter]], Any]

PYTORCH: list[tuple[Optimizer, Make1]] = [
    (Optimizer(name="sgd", implementation="for-loop"), lambda p: optim.SGD(p, foreach=False)),
    (Optimizer(name="sgd", implementation="foreach"), lambda p: optim.SGD(p, foreach=True)),
    (
        Optimizer(name="sgd", implementation="for-loop", momentum=0.9, weight_decay=0.1),
        lambda p: optim.SGD(p, momentum=0.9, weight_decay=0.1, foreach=False),
    ),
    (
        Optimizer(name="sgd", implementation="foreach", momentum=0.9, weight_decay=0.1),
        lambda p: optim.SGD(p, momentum=0.9, weight_decay=0.1, foreach=True),
    ),
    (
        Optimizer(name="sgd", implementation="fused", momentum=0.9, weight_decay=0.1),
        lambda p: optim.SGD(p, momentum=0.9, weight_decay=0.1, fused=True),
    ),
    (Optimizer(name="adam", implementation="for-loop"), lambda p: optim.Adam(p, foreach=False)),
    (Optimizer(name="adam", implementation="foreach"), lambda p: optim.Adam(p, foreach=True)),
    (Optimizer(name="adam", implementation="fused"), lambda p: optim.Adam(p, fused=True)),
    (
        Optimizer(name="adam", implementation="for-loop", weight_decay=0.1),
        lambda p: optim.Adam(p, weight_decay=0.1, foreach=False),
    ),
    (
        Optimizer(name="adam", implementation="foreach", weight_decay=0.1),
        lambda p: optim.Adam(p, weight_decay=0.1, foreach=True),
    ),
    (Optimizer(name="adamw", implementation="for-loop"), lambda p: optim.AdamW(p, foreach=False)),
    (Optimizer(name="adamw", implementation="foreach"), lambda p: optim.AdamW(p, foreach=True)),
    (Optimizer(name="adamw", implementation="fused"), lambda p: optim.AdamW(p, fused=True)),
    (Optimizer(name="adafactor", implementation="for-loop"), lambda p: optim.Adafactor(p, foreach=False)),
    (Optimizer(name="adafactor", implementation="foreach"), lambda p: optim.Adafactor(p, foreach=True)),
    (
        Optimizer(name="adafactor", implementation="transformers"),
        lambda p: transformers.Adafactor(p, lr=1e-3, scale_parameter=False, relative_step=False),
    ),
]


def muon(adamw: str) -> Make:
    """As one would use it: Muon on the matrices within, AdamW on everything else."""

    def make(tensors: list[torch.nn.Parameter]) -> list[Any]:
        pairs = list(zip(tensors, MODEL, strict=True))
        hidden = [tensor for tensor, parameter in pairs if is_hidden_matrix(parameter)]
        others = [tensor for tensor, parameter in pairs if not is_hidden_matrix(parameter)]
        return [optim.Muon(hidden), optim.AdamW(others, foreach=adamw == "foreach", fused=adamw == "fused")]

    return make


def kept(optimizer: Optimizer, parameters: list[Parameter], dtype: str) -> int:
    states = optimizer_states(optimizer, dtype, embeddings_32bit=True)
    return sum(state.size(parameter) for parameter in parameters for state in states)


def changes(tape: Tape) -> list[int]:
    return [event.bytes if isinstance(event, Hold) else -event.bytes for event in tape if not isinstance(event, Seam)]


def peak(sizes: list[int]) -> int:
    return max(accumulate(sizes, initial=0))


def check(optimizer: Optimizer, make: Make, parameters: list[Parameter], dtype: str) -> None:
    """States, peak and every event of a step, exactly."""
    real = traced(make, parameters, dtype)
    events = [change.sign * change.bytes for change in real.second]
    assert kept(optimizer, parameters, dtype) == real.states
    assert changes(step_tape(optimizer, parameters, dtype)) == events
    assert sum(hold.bytes for hold in step_temporaries(optimizer, parameters, dtype)) == peak(events)


def named(optimizer: Optimizer) -> str:
    decay = "" if optimizer.weight_decay is None else "-decay"
    return f"{optimizer.name}-{optimizer.implementation}{decay}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("optimizer", "make"), PYTORCH, ids=[named(optimizer) for optimizer, _ in PYTORCH])
def test_states_and_every_event_of_a_step_equal_those_of_the_real_optimizer(
    optimizer: Optimizer, make: Make1, dtype: str
) -> None:
    check(optimizer, lambda tensors: [make(tensors)], MODEL, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("adamw", ["for-loop", "foreach", "fused"])
def test_muon_takes_hidden_matrices_and_adamw_the_rest(adamw: Any, dtype: str) -> None:
    check(Optimizer(name="muon", implementation=adamw), muon(adamw), MODEL, dtype)


SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 5000)), st.tuples(st.integers(1, 90), st.integers(1, 90))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PYTORCH), SHAPES, st.sampled_from(["fp32", "bf16", "fp16"]))
def test_any_shapes_in_any_order(case: tuple[Optimizer, Make1], shapes: list[tuple[int, ...]], dtype: str) -> None:
    optimizer, make = case
    parameters = [Parameter(f"p{i}", shape) for i, shape in enumerate(shapes)]
    check(optimizer, lambda tensors: [make(tensors)], parameters, dtype)


def test_fused_apex_and_bitsandbytes_take_nothing() -> None:
    for optimizer in (
        Optimizer(name="adamw", implementation="fused"),
        Optimizer(name="adam", implementation="apex"),
        Optimizer(name="adamw", implementation="bitsandbytes"),
        Optimizer(name="lion", implementation="bitsandbytes"),
        Optimizer(name="adam8bit", block_size=256),
        Optimizer(name="lion8bit", block_size=256),
    ):
        assert step_temporaries(optimizer, MODEL, "bf16") == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("optimizer", "make"), PYTORCH, ids=[named(optimizer) for optimizer, _ in PYTORCH])
def test_a_program_has_the_states_and_the_step_of_the_real_optimizer(
    optimizer: Optimizer, make: Make1, dtype: str
) -> None:
    """A small Llama: what its plan keeps for the optimizer, and by how much its step rises."""
    flags = {"model": "llama-3-8b", "layers": 2, "hidden": 64, "heads": 4, "kv-heads": 2, "head-dim": 16, "ffn": 96}
    flags |= {"vocab": 500, "seq": 16, "dtype": dtype, "attention": "eager"}
    plan = read_plan(None, {name: str(value) for name, value in flags.items()}).plan
    (program,) = plain.programs(resolve(plan.model_copy(update={"optimizer": optimizer})), Options())
    parameters = program.parameter_tensors()
    real = traced(lambda tensors: [make(tensors)], parameters, dtype)
    assert static(program).net_by[Category.OPTIMIZER_STATES] == real.states
    assert fold(program.step).peak == peak([change.sign * change.bytes for change in real.second])
