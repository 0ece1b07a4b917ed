"""Adapters of peft and frozen parameters in traces, beside the estimate."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from memplan.families import family as family_of
from memplan.plan.errors import LackingError
from memplan.tape.events import Category
from memplan.trace import run
from memplan.trace.job import Job
from memplan.trace.step import traced_step

from .equality import assert_equal
from .test_step import FAMILIES, model_flags, of, targets_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")

ALL = {"lora-rank": "8", "lora-targets": "all-linear"}
REPLICATED = {"framework": "ddp", "gpus": "4", "gbs": "16"}
SETTINGS: dict[str, dict[str, str]] = {
    "all": {**ALL, "dtype": "bf16", "attention": "eager", "gbs": "4", "lora-dropout": "0.1"},
    "recomputed": {**ALL, "dtype": "bf16", "attention": "eager", "gbs": "4", "recompute": "full"},
    "flash": {**ALL, "dtype": "bf16", "attention": "flash", "lora-dtype": "bf16", "mbs": "1", "seq": "128"},
    "fp32": {**ALL, "dtype": "fp32", "attention": "eager", "mbs": "3", "seq": "37"},
    "ddp": {**ALL, **REPLICATED, "dtype": "bf16", "attention": "eager", "gradient-as-bucket-view": "true"},
    "ddp-recomputed": {**ALL, **REPLICATED, "dtype": "bf16", "attention": "flash", "recompute": "full"},
}
FROZEN: dict[str, dict[str, str]] = {
    "embedding-and-layer": {"dtype": "fp32", "attention": "eager", "freeze-layers": "1", "freeze-embedding": "true"},
    "recomputed": {"dtype": "bf16", "attention": "eager", "recompute": "full", "freeze-layers": "1", "gbs": "4"},
    "layers": {"dtype": "bf16", "attention": "flash", "freeze-layers": "1", "gbs": "4"},
    "ddp": {**REPLICATED, "dtype": "bf16", "attention": "eager", "freeze-layers": "1", "freeze-embedding": "true"},
}


EVERYWHERE = ("llama", "gpt2")
"""In every setting; BERT, too, where it is slow; other families in one."""


def cases(settings: dict[str, dict[str, str]]) -> list[Any]:
    return [
        pytest.param(
            family,
            setting,
            marks=[] if family in EVERYWHERE or turn == at % len(settings) else [pytest.mark.slow],
        )
        for at, family in enumerate(FAMILIES)
        for turn, (setting, flags) in enumerate(settings.items())
        if family in (*EVERYWHERE, "bert") or turn == at % len(settings)
        if flags["attention"] == "eager" or not family_of(family).no_flash
        if "freeze-embedding" not in flags or not family_of(family).returns_weights
        if "recompute" not in flags or not family_of(family).returns_weights
    ]


@pytest.mark.parametrize(("family", "setting"), cases(SETTINGS))
def test_adapters(family: str, setting: str) -> None:
    assert_equal(*of(**(model_flags(family) | SETTINGS[setting] | targets_of(family))))


@pytest.mark.parametrize(("family", "setting"), cases(FROZEN))
def test_frozen_parts(family: str, setting: str) -> None:
    """With one frozen layer the second is the last that backward reaches, and the third is compared in full."""
    flags = model_flags(family)
    layers = "6" if "full-head-dim" in flags else "4"  # the last of Gemma 4's layers sees all tokens
    assert_equal(*of(**(flags | FROZEN[setting] | {"layers": layers})), layer="layer.2")


def test_adapters_alone_have_states() -> None:
    job, program = of(**model_flags("llama"), **ALL, dtype="bf16", attention="eager")
    assert Job.from_json(job.to_json()) == job
    setup = traced_step(job).setup.net_by
    trained = sum(one.elements for one in program.parameter_tensors() if one.trained)
    assert trained * 8 <= setup[Category.OPTIMIZER_STATES] < setup[Category.PARAMETERS]


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3 where adapters are asked for; frozen parts need nothing."""

    def version(package: str) -> str:
        if package == "peft":
            raise PackageNotFoundError(package)
        return "99.0"

    monkeypatch.setattr(run, "version", version)
    job, _ = of(**model_flags("llama"), **ALL)
    with pytest.raises(LackingError, match="needs peft, which is not installed: pip install 'peft>="):
        run.traced(job, "llama")
    frozen, _ = of(**model_flags("llama"), **{"freeze-layers": "1"})
    assert frozen.packages == ()
