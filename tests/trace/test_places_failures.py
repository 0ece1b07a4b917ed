"""Models that leave fake tensors: one line that names the operator and the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.trace.job import Job
from memplan.trace.places import Places, UntraceableError, explained
from memplan.trace.recording import BACKWARD, FORWARD, Recording
from memplan.trace.step import traced_step
from memplan.trace.storages import Follow

from .test_step import of

READS = "reads elements of a tensor, which fake tensors have not"
SHAPE = "has a result whose shape depends on elements of a tensor, which fake tensors have not"
ITEM = r"aten\._local_scalar_dense\.default \(\.item\(\), \.tolist\(\), or a condition on a tensor\)"


class Backward(torch.autograd.Function):
    """Reads an element of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient if gradient.sum() > 0 else -gradient


def caught(x: torch.Tensor) -> torch.Tensor:
    """As libraries do: an error of another kind from the one that was there."""
    try:
        return x * x.sum().item()
    except Exception as error:
        raise ValueError("no scale") from error


CODE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), f"{ITEM} {READS}, in model.inner$"),
    "tolist": (lambda x: x * x.tolist()[0], f"{ITEM} {READS}, in model.inner$"),
    "condition": (lambda x: x if x.sum() > 0 else -x, f"{ITEM} {READS}, in model.inner$"),
    "numpy": (lambda x: x.detach().numpy(), rf"^\.numpy\(\) {READS}, in model.inner$"),
    "format": (lambda x: f"{x.detach().sum():.2f}", rf"^format\(\) {READS}, in model.inner$"),
    "mask": (
        lambda x: x[x > 0],
        rf"aten\.nonzero\.default \(nonzero\(\), or a mask as an index\) {SHAPE}, in model.inner$",
    ),
    "unique": (lambda x: x.unique(), rf"aten\._unique2\.default {SHAPE}, in model.inner$"),
    "equal": (
        lambda x: x if torch.equal(x, x) else -x,
        rf"aten\.equal\.default \(torch\.equal\) {READS}, in model.inner$",
    ),
    "shapes": (lambda x: x @ x[:2], r"^RuntimeError: .*, in model.inner$"),
    "raised from it": (caught, "^ValueError: no scale, in model.inner$"),
    "backward": (Backward.apply, f"{ITEM} {READS}, in model.inner, backward$"),  # type: ignore[no-untyped-call]
}


class Inner(torch.nn.Module):
    def __init__(self, code: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(x)


class Outer(torch.nn.Module):
    def __init__(self, code: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = Inner(code)
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.weight * x)


def both_passes(model: torch.nn.ModuleDict, places: Places) -> None:
    places.phase = FORWARD
    out = model["model"](torch.ones(4, 4)).sum()
    places.phase = BACKWARD
    out.backward()


@pytest.mark.parametrize("case", CODE)
def test_operator_and_module(case: str) -> None:
    code, expected = CODE[case]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = torch.nn.ModuleDict({"model": Outer(code)})
        places = Places(model)
        follow = Follow(Recording(), places)
        with follow, places.followed():
            follow.calibrate()
            with pytest.raises(Exception, match=r".") as raised:
                both_passes(model, places)
    line = explained(raised.value)
    assert "\n" not in line
    assert pytest.approx(1) == 1
    import re

    assert re.search(expected, line), line


SMALL: dict[str, Any] = {"vocab_size": 1003, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}
SMALL |= {"intermediate_size": 96}
REAL = {
    "mixtral": (
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "eager"},
        r"nonzero\.default .* in model\.layers\.0\.mlp\.experts \(modeling_mixtral\.py:\d+, forward\)$",
    ),
    "jetmoe": ({**SMALL, "num_key_value_heads": 2}, r"in model\.layers\.0\.\w+.* \(modeling_jetmoe\.py:\d+, \w+\)$"),
    "flaubert": (
        {"vocab_size": 1003, "n_layers": 1, "emb_dim": 64, "n_heads": 4},
        r"\(modeling_flaubert\.py:\d+, \w+\)$",
    ),
}


@pytest.mark.parametrize("kind", REAL)
def test_models_of_transformers(kind: str) -> None:
    config, expected = REAL[kind]
    job, _ = of(model="gpt2", attention="eager", mbs="1", seq="16", layers="1")
    job = Job.from_json({**job.to_json(), "config": {"model_type": kind, **config}})
    with pytest.raises(UntraceableError, match=expected) as raised:
        traced_step(job)
    assert "\n" not in str(raised.value)
