"""Modules are recorded for the first micro-batch, and once more for later ones where these record something else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from memplan.estimate import programs_of
from memplan.frameworks.plain import hooked
from memplan.layers import module
from memplan.layers.module import Options, Tapes, _tapes, recorded
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

MEGATRON = {"framework": "megatron", "gpus": "8", "tp": "2", "gbs": "16", "dtype": "bf16", "gpu": "h100-80gb"}
ALIKE: dict[str, dict[str, str]] = {
    "dense": {"model": "llama-3-8b", **MEGATRON},
    "full recompute": {"model": "llama-3-8b", **MEGATRON, "recompute": "full"},
    "experts and latent attention": {
        "model": "deepseek-v2-lite", **MEGATRON, "tp": "1", "ep": "4", "recompute": "selective",
        "recompute-modules": "moe_act,mla_up_proj",
    },
    "tied embedding": {"model": "gpt2", **MEGATRON, "cross-entropy-fusion": "te"},
    "fp8": {"model": "llama-3-8b", **MEGATRON, "fp8": "delayed"},
    "adapters": {"model": "llama-3-8b", **MEGATRON, "lora-rank": "16"},
    "ZeRO 2": {"model": "llama-3-8b", "framework": "deepspeed", "zero": "2", "gpus": "8", "gbs": "16", "dtype": "bf16"},
}  # fmt: skip
DIFFERENT: dict[str, dict[str, str]] = {
    "plain": {"model": "gpt2", "framework": "single", "gbs": "16", "mbs": "4"},
    "DDP": {"model": "gpt2", "framework": "ddp", "gpus": "8", "gbs": "16"},
}


def modules(flags: dict[str, str], monkeypatch: pytest.MonkeyPatch, *places: Any) -> list[tuple[str, bool]]:
    """Names of what ``places`` record for a plan, of a sequence that no other test has, and whether once for both
    roles; if so, a later micro-batch is recorded, too, and is the same."""
    found = []

    def compared(*given: Any) -> Any:
        made, recorder = recorded(*given)
        name, recipe, interface, options, make = given[:5]
        if not options.counts:
            found.append((name, made.first is made.steady))
            later, _ = _tapes(name, recipe, interface, make(False, True), options)
            for one in fields(Tapes) if made.first is made.steady else ():
                assert getattr(later, one.name) == getattr(made.first, one.name), (name, one.name)
        return made, recorder

    for one in places:
        monkeypatch.setattr(one, "recorded", compared)
    programs_of(
        resolve(read_plan(None, {**flags, "seq": "1808" if flags["model"] != "gpt2" else "904"}).plan), Options()
    )
    return found


@pytest.mark.parametrize("name", ALIKE)
def test_what_gradients_do_not_stay_of_is_recorded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = modules(ALIKE[name], monkeypatch, module, hooked)
    assert [once for kind, once in found if kind == "layer"]
    assert all(once for _, once in found)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_leaves_gradients_is_recorded_in_both_roles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = modules(DIFFERENT[name], monkeypatch, module)
    assert found
    assert not any(once for _, once in found)
