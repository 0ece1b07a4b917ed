from __future__ import annotations

import pytest

from memplan.device.gpus import GPUS
from memplan.search.time import best_published, published_error
from memplan.search.time.efficiency import default
from memplan.search.time.hardware import SPEEDS
from memplan.search.time.rates import (
    BEST_MFU,
    BEST_MFU_OF_EXPERTS,
    ERROR_OF_ADAPTERS,
    ERROR_OF_EXPERTS,
    PUBLISHED_ERRORS,
)

from .plans import plan


def test_every_figure_is_of_a_gpu_whose_speed_is_known() -> None:
    assert {*PUBLISHED_ERRORS, *BEST_MFU} <= set(SPEEDS)
    assert all("https://" in best.source and 0 < best.value < 1 for best in BEST_MFU.values())


def of(gpu: str, **flags: object) -> float:
    return published_error(plan(**{"model": "llama-3-8b", "framework": "fsdp", "gpu": gpu, "gpus": 8, **flags}))


def test_a_gpu_that_nobody_compared_has_the_largest_error() -> None:
    assert of("mi300x") == of("a800-80gb") == max(PUBLISHED_ERRORS.values()) > of("a100-80gb")


def test_a_gpu_whose_products_nobody_measured_has_the_spread_of_those_of_others() -> None:
    """B200's median and MI300X's are both a third below that of all."""
    shares = [default(gpu, GPUS[gpu].compute_capability).matrix for gpu in SPEEDS]
    middle = default("l4", GPUS["l4"].compute_capability).matrix
    spread = max(abs(share / middle - 1) for share in shares)
    assert of("l4") == of("h20") == of("mi355x", model="mixtral-8x7b", framework="megatron") == spread > 0.3
    assert of("l40s") < spread


@pytest.mark.parametrize("name", ["mixtral-8x7b", "nemotron-h-8b"])
def test_experts_and_hybrids_have_an_error_of_their_own(name: str) -> None:
    found = of("a100-80gb", model=name, framework="megatron")
    assert found == ERROR_OF_EXPERTS > max(PUBLISHED_ERRORS.values())


def test_adapters_and_trls_loops_have_no_more_than_was_compared() -> None:
    """Four runs with LoRA on A100; none of DPO."""
    assert of("a100-80gb", lora_rank=16) == ERROR_OF_ADAPTERS > of("a100-80gb")
    assert of("h100-80gb", lora_rank=16) == of("h100-80gb") > ERROR_OF_ADAPTERS
    dpo = of("a100-80gb", trainer="dpo", precompute_ref_log_probs="true")
    assert dpo == max(PUBLISHED_ERRORS.values())


def test_the_best_published_is_cited_above_it_alone() -> None:
    best = BEST_MFU["h100-80gb"]
    assert best_published("h100-80gb", "bf16", best.value + 0.01) == best
    assert best_published("h100-80gb", "bf16", best.value) is None
    assert best_published("h100-80gb", "fp32", 0.9) is None
    assert best_published("l4", "bf16", 0.9) is None
    experts = BEST_MFU_OF_EXPERTS["h100-80gb"]
    assert best_published("h100-80gb", "bf16", experts.value + 0.01, experts=True) == experts
    assert best_published("b200", "bf16", 0.9, experts=True) == BEST_MFU["b200"]
