"""Parameter counts: against the published totals, and against transformers' own models."""

from __future__ import annotations

import pytest

from memplan.plan.count import parameters
from memplan.plan.library import model_specs
from memplan.plan.models import load_spec


def _rounding(total: int) -> int:
    """Half a unit of the last digit that is not zero: what a published figure was rounded by."""
    digits = str(total)
    zeros = len(digits) - len(digits.rstrip("0"))
    return 10**zeros // 2 if zeros >= 6 else 0


WITHOUT = {
    *("bigscience-104b-250k", "llama-3.3-nemotron-super-49b", "llama-3.1-nemotron-ultra-253b"),
    *("deepseek-v3.2", "muse-glimmer-30b", "ministral-3-8b", "exaone-4.0-1.2b", "granite-4.0-1b"),
    *(f"qwen3.5-{size}" for size in ("0.8b", "2b", "4b", "9b", "27b", "35b-a3b", "122b-a10b", "397b-a17b")),
}
"""Models of which only billions were published, in their names, or none."""


@pytest.mark.parametrize("name", model_specs())
def test_counts_what_was_published(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert spec.source
    if spec.published_parameters is None:
        assert name in WITHOUT, "every other model has a published total"
        return
    assert abs(parameters(spec) - spec.published_parameters) <= _rounding(spec.published_parameters)


def test_the_larger_vocabulary_costs_its_rows() -> None:
    small, large = load_spec("bigscience-104b"), load_spec("bigscience-104b-250k")
    assert parameters(large) - parameters(small) == (250_100 - 50_257) * 11_600


def test_every_spec_of_the_foundation_is_there() -> None:
    assert set(model_specs()) >= {
        *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b"),
        *("megatron-22b", "megatron-530b", "megatron-1t", "bigscience-104b", "bigscience-104b-250k", "bloom-176b"),
        *("bert-large", "bert-5.1b", "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3-405b"),
        *("mistral-7b", "qwen3-8b", "qwen3-32b"),
    }
