from __future__ import annotations

import pytest

from memplan.device.gpus import GPUS
from memplan.search.time import best_published, error_between_layouts, published_error
from memplan.search.time.efficiency import default
from memplan.search.time.hardware import SPEEDS
from memplan.search.time.rates import (
    ADAPTERS,
    BEST_MFU,
    BEST_MFU_OF_EXPERTS,
    DIVIDED,
    DIVIDED_LOW,
    ERROR_OF_EXPERTS,
    ERRORS_OF_ONE,
    PUBLISHED_ERRORS,
    REPLICAS,
    rates_of,
)

from .plans import plan


def test_every_figure_is_of_a_gpu_whose_speed_is_known() -> None:
    assert {*BEST_MFU, *(gpu for of in PUBLISHED_ERRORS.values() for gpu in of)} <= set(SPEEDS)
    assert all("https://" in best.source and 0 < best.value < 1 for best in BEST_MFU.values())


def of(gpu: str, **flags: object) -> float:
    return published_error(plan(**{"model": "llama-3-8b", "framework": "fsdp", "gpu": gpu, "gpus": 8, **flags}))


LARGEST = max(PUBLISHED_ERRORS[REPLICAS].values())


def test_a_gpu_code_or_layout_that_nobody_compared_has_the_largest_error() -> None:
    assert of("mi300x") == of("a800-80gb") == of("h800") == LARGEST > of("a100-80gb")
    assert of("a100-80gb", framework="ddp") == of("a100-80gb", framework="deepspeed", zero=3) == LARGEST
    assert of("a100-80gb", fsdp_code="torchtitan", tp=2) == LARGEST > of("a100-80gb", fsdp_code="torchtitan")


def test_one_gpu_was_compared_where_several_were_not() -> None:
    assert of("h200") == LARGEST > max(of("h100-80gb"), ERRORS_OF_ONE["h200"])
    assert of("h200", gpus=1, framework="single") == ERRORS_OF_ONE["h200"]


def test_layers_that_megatron_divides_have_errors_of_their_own() -> None:
    """On H100 those of FSDP's steps, which are a quarter of it, stood there; in 8 bits others were compared."""
    divided, low = PUBLISHED_ERRORS[DIVIDED], PUBLISHED_ERRORS[DIVIDED_LOW]
    assert of("h100-80gb", framework="megatron", tp=2) == divided["h100-80gb"]
    assert divided["h100-80gb"] == pytest.approx(3.8 * of("h100-80gb"), rel=0.01)
    assert of("h100-80gb", framework="megatron", fp8="tensorwise") == low["h100-80gb"] < divided["h100-80gb"]
    assert of("h200", framework="megatron") == of("gb200", framework="megatron") == max(divided.values())


def test_what_all_steps_of_a_code_are_wrong_by_does_not_make_layouts_equally_fast() -> None:
    """Megatron's steps on H100 are 8 % off, all of them too fast; FSDP's there say how far single ones scatter."""

    def apart(gpu: str, **flags: object) -> float:
        return error_between_layouts(plan(**{"model": "llama-3-8b", "framework": "megatron", "gpu": gpu, **flags}))

    assert apart("h100-80gb", tp=2) == PUBLISHED_ERRORS[REPLICAS]["h100-80gb"] < of("h100-80gb", framework="megatron")
    assert apart("b200") == PUBLISHED_ERRORS[DIVIDED]["b200"]
    assert apart("h100-80gb", model="mixtral-8x7b") == ERROR_OF_EXPERTS


def test_the_same_chip_is_as_fast() -> None:
    """Whatever its memory: H200's is the faster one of an H100's with 96 GB."""
    for torch in ("2.4", "2.11"):
        job = {"model": "llama-3-8b", "framework": "single", "dtype": "bf16", "torch": torch}
        rates = [rates_of(plan(**job, gpu=gpu)) for gpu in ("h100-80gb", "h100-96gb", "gh200-144gb", "h200")]
        assert max(rate.matrix for rate in rates) == pytest.approx(min(rate.matrix for rate in rates), rel=1e-3)
        assert len({rate.power for rate in rates}) == 1


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
    assert found == ERROR_OF_EXPERTS > PUBLISHED_ERRORS[DIVIDED]["a100-80gb"]


def test_adapters_beside_experts_have_the_larger_of_both() -> None:
    assert of("h200", model="mixtral-8x7b", lora_rank=16) == PUBLISHED_ERRORS[ADAPTERS]["h200"] > ERROR_OF_EXPERTS


def test_adapters_and_trls_loops_have_no_more_than_was_compared() -> None:
    """Runs with LoRA on A100, two on H200, whose error others have; none of DPO."""
    assert of("a100-80gb", lora_rank=16) == of("a100-80gb") > PUBLISHED_ERRORS[ADAPTERS]["a100-80gb"]
    assert (
        of("h100-80gb", lora_rank=16)
        == of("h200", lora_rank=16)
        == PUBLISHED_ERRORS[ADAPTERS]["h200"]
        > of("h100-80gb")
    )
    dpo = of("a100-80gb", trainer="dpo", precompute_ref_log_probs="true")
    assert dpo == LARGEST


def test_the_best_published_is_cited_above_it_alone() -> None:
    best = BEST_MFU["h100-80gb"]
    assert best_published("h100-80gb", "bf16", best.value + 0.01) == best
    assert best_published("h100-80gb", "bf16", best.value) is None
    assert best_published("h100-80gb", "fp32", 0.9) is None
    assert best_published("h200", "bf16", best.value + 0.01) == best_published("h800", "bf16", 0.9) == best
    assert best_published("l4", "bf16", 0.9) is None
    experts = BEST_MFU_OF_EXPERTS["h100-80gb"]
    assert best_published("h100-80gb", "bf16", experts.value + 0.01, experts=True) == experts
    assert best_published("b200", "bf16", 0.9, experts=True) == BEST_MFU["b200"]
