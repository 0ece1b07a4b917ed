"""Experts in one grouped tensor (``--moe-use-grouped-tensor``), and HybridEP's budget of rows, by hand: of every expert
a multiple of 256 rows (``get_align_size_for_quantization``), in the dispatcher or by a copy (``Fp8Padding``)."""

from __future__ import annotations

import pytest

from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of, module_shapes
from memplan.layers.megatron_core.grouped import padded_rows
from memplan.layers.megatron_core.shape import CoreShape
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from .test_latent_experts import kept

OF = {"model": "qwen3-30b-a3b", "framework": "megatron", "gpus": "8", "ep": "8", "gbs": "8", "te-version": "2.20",
      "gpu": "b200", "seq": "512"}  # fmt: skip
K, E, H, F = 8, 128, 2048, 768
HYBRID = {"moe_dispatcher": "flex", "moe_flex_backend": "hybridep"}


def shape(**flags: str) -> CoreShape:
    given = {**OF, **{name.replace("_", "-"): value for name, value in flags.items()}}
    return layer_shape_of(module_shapes(core_shape(resolve(read_plan(None, given).plan)))[0], 0)


def rows(**flags: str) -> int:
    """Of a rank's 16 experts, as the input of their products is kept."""
    return kept(shape(**flags))["experts_linear_fc1"] // (2 * 2 * F)


@pytest.mark.parametrize("seq", [512, 1000, 4096])
def test_each_expert_has_a_multiple_of_256_rows(seq: int) -> None:
    """By a copy behind the exchange of tokens, or as HybridEP gives them."""
    each = seq * K * 8 // E
    whole = 16 * -(-each // 256) * 256
    alltoall = {"seq": str(seq), "moe_dispatcher": "alltoall"}
    assert rows(**alltoall) == 16 * each
    padded = kept(shape(**{**alltoall, "moe_use_grouped_tensor": "true"}))
    assert padded["experts_linear_fc1"] == whole * 4 * F
    assert ("expert_padded" in padded) is (each % 256 > 0)
    assert padded["experts_linear_fc1_offsets"] == 512
    hybrid = kept(shape(**{**HYBRID, "seq": str(seq), "moe_use_grouped_tensor": "true"}))
    assert hybrid["rows_received"] == whole * 2 * H
    assert "expert_padded" not in hybrid


def test_hybrid_ep_pads_rows_of_products_in_8_bits() -> None:
    """To a multiple of 32 of every expert, on their way (``pad_multiple``); the alltoall dispatcher's are copied."""
    low = {"fp8": "mxfp8", "seq": "544"}
    assert rows(seq="544", **HYBRID) == 16 * 272
    hybrid, alltoall = shape(**low, **HYBRID), shape(**low, moe_dispatcher="alltoall")
    assert (rows(**low, **HYBRID), padded_rows(16 * 288, hybrid)) == (16 * 288, None)
    assert (alltoall.routed.held, padded_rows(16 * 272, alltoall)) == (16 * 272, 16 * 288)


def test_a_budget_is_what_the_buffers_have() -> None:
    """512 tokens of 8 experts each, times the factor, up to a multiple of 256; products take the rows that come."""
    for factor, budget in (("1.0", 4096), ("1.5", 6144), ("1.01", 4352)):
        given = {
            **OF,
            **HYBRID,
            "seq": "512",
            "moe_use_grouped_tensor": "true",
            "moe_expert_rank_capacity_factor": factor,
        }
        assert kept(shape(**given))["rows_received"] == budget * 2 * H


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"moe-expert-rank-capacity-factor": "2"},
            "rank_capacity = 2.0: must be left out: it is modelled only with experts.gr",
        ),
        ({"moe-use-grouped-tensor": "true", "te-version": "2.18"}, "must be false before Transformer Engine 2.19"),
        ({"moe-use-grouped-tensor": "true", "gpu": "a100-80gb"}, "must be false below compute capability 9.0"),
        ({"moe-use-grouped-tensor": "true", "fp8": "mxfp8"}, "must be false with fp8 or fp4"),
        ({"moe-use-grouped-tensor": "true", "moe-grouped-gemm": "false"}, "must be false without experts.grouped_gemm"),
        (
            {"moe-use-grouped-tensor": "true", "moe-expert-rank-capacity-factor": "2", "moe-dispatcher": "alltoall"},
            "only with the flex dispatcher over HybridEP",
        ),
    ],
)
def test_what_is_not_modelled_is_one_line(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError) as raised:
        resolve(read_plan(None, {**OF, **flags}).plan)
    assert problem in str(raised.value)
