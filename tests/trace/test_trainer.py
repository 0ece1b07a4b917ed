"""What transformers' Trainer adds around a model, in traces beside the estimate."""

from __future__ import annotations

import pytest

from memplan.families import family as family_of
from memplan.plan.errors import PlanError
from memplan.tape.events import Category, rounded
from memplan.trace.job import Job
from memplan.trace.step import traced_step

from .equality import assert_equal
from .test_step import FAMILIES, SCALARS, model_flags, of, targets_of

SETTINGS: dict[str, dict[str, str]] = {
    "accumulating": {"dtype": "bf16", "attention": "eager", "gbs": "8"},
    "autocast": {"dtype": "bf16", "attention": "eager", "autocast": "true", "gbs": "4"},
    "fp16-recomputed": {"dtype": "fp16", "attention": "eager", "autocast": "true", "recompute": "full"},
    "ddp": {"dtype": "bf16", "attention": "eager", "framework": "ddp", "gpus": "4", "gbs": "32", "autocast": "true"},
    "decaying": {"dtype": "fp32", "attention": "eager", "weight-decay": "0.1", "optimizer": "sgd", "momentum": "0.9"},
    "adapters": {"dtype": "bf16", "attention": "eager", "autocast": "true", "autocast-parameters": "bf16"},
}
SETTINGS["adapters"] |= {"lora-rank": "8", "lora-targets": "all-linear"}
CASES = [
    pytest.param(family, setting, marks=[] if family == "llama" or turn == at % len(SETTINGS) else [pytest.mark.slow])
    for at, family in enumerate(FAMILIES)
    for turn, (setting, flags) in enumerate(SETTINGS.items())
    if family in ("llama", "gpt2", "bert") or turn == at % len(SETTINGS)
    if "recompute" not in flags or not family_of(family).returns_weights
]


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_trace_equals_estimate(family: str, setting: str) -> None:
    flags = SETTINGS[setting]
    scaled = rounded(4) if flags["dtype"] == "fp16" else 0
    targets = targets_of(family) if "lora-rank" in flags else {}
    job, program = of(**(model_flags(family) | flags | targets), trainer="transformers")
    assert Job.from_json(job.to_json()) == job
    assert_equal(job, program, scalars=SCALARS + scaled)


def test_inputs_of_all_microbatches_are_there() -> None:
    job, _ = of(**model_flags("llama"), trainer="transformers", gbs="8")
    assert (job.microbatches, job.trainer, job.packages) == (2, 4, ("accelerate",))
    assert traced_step(job).setup.net_by[Category.INPUTS] == 4 * 2 * rounded(8 * 2 * 64)


def test_evaluation_is_no_part_of_it() -> None:
    with pytest.raises(PlanError, match=r"trainer\.evaluation_batches = 2: must be left out"):
        of(**model_flags("llama"), trainer="transformers", **{"eval-batches": "2"})
