"""Experts as one chain of operations, by hand from ``pytorch/ops/fused/grouped_mlp.py`` and cuDNN's front end: in 8
bits an element of a copy is a byte, and 32 of them share a scale of one."""

from __future__ import annotations

import pytest

from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module, module_shapes
from memplan.layers.megatron_core.grouped_chain import uncovered
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Hold, Seam

from .test_latent_experts import kept

OF = {"model": "qwen3-30b-a3b", "framework": "megatron", "gpus": "8", "ep": "8", "gbs": "8", "gpu": "b200",
      "seq": "512", "fp8": "mxfp8", "fp8-parameters": "true", "zero": "1", "moe-dispatcher": "flex",
      "moe-flex-backend": "hybridep"}  # fmt: skip
H, F, EXPERTS = 2048, 768, 16
N = EXPERTS * 256
ROUTED, SHARED = (
    {"use-transformer-engine-op-fuser": "true"},
    {"moe-shared-chain": "true", "shared-expert-ffn": "1024", "te-version": "2.19"},
)
ON = "1"


def shape(flags: dict[str, str], environment: str = ON) -> CoreShape:
    plan = read_plan(None, {**OF, **flags}).plan
    plan = plan.model_copy(update={"environment": {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": environment}})
    whole = core_shape(resolve(plan))
    assert not [*uncovered(whole)], [*uncovered(whole)]
    return layer_shape_of(module_shapes(whole)[0], 0)


def own(sizes: dict[str, int], name: str) -> dict[str, int]:
    return {one.removeprefix(f"{name}_"): size for one, size in sizes.items() if one.startswith(f"{name}_fc")}


def in_8_bits(rows: int, features: int) -> int:
    return rows * features * 33 // 32


def test_the_product_is_kept_in_16_bits_and_both_inputs_by_columns() -> None:
    sizes = kept(shape(ROUTED))
    assert own(sizes, "experts") == {
        "fc1": N * 2 * F * 2,
        "fc1_columns": N * H, "fc1_column_scales": N * H // 32,
        "fc2_columns": N * F, "fc2_column_scales": N * F // 32,
    }  # fmt: skip
    assert sizes["experts_offsets"] == 1024, "16 int32, and 17 int64 of five kinds"


def held(of: CoreShape, *, forward: bool) -> list[str]:
    """What the chain makes in one direction, in its order."""
    passes = layers_module((of,), Options()).first
    tape = passes.forward if forward else passes.backward
    names = (event.name for event in tape if isinstance(event, Hold))
    return [name.removeprefix("grad_").removeprefix("experts_") for name in names if "experts_" in name]


def test_backward_makes_the_gradient_between_products_in_8_bits_alone() -> None:
    assert held(shape(ROUTED), forward=False) == [
        "fc2_rows", "fc2_row_scales", "fc2_columns", "fc2_column_scales",
        "probabilities_fp32", "scales_ordered", "pointers",
        "fc1_rows", "fc1_columns", "fc1_row_scales", "fc1_column_scales", "probabilities",
        "ones", "scales_ordered", "pointers", "input",
    ]  # fmt: skip


@pytest.mark.parametrize("waits", [False, True])
def test_operands_of_products_that_wait_outlive_the_gradient(waits: bool) -> None:
    """``wgrad_store.put``: both inputs by columns, and the gradient between the products."""
    flags = {**ROUTED, "moe-dispatcher": "alltoall", "moe-wgrad-beside-dispatch": str(waits).lower()}
    passes = layers_module((shape(flags),), Options()).first
    names = {
        event.tensor: event.name
        for tape in (passes.forward, passes.backward)
        for event in tape
        if isinstance(event, Hold)
    }
    told = [
        (isinstance(event, Hold), names.get(event.tensor)) for event in passes.backward if not isinstance(event, Seam)
    ]
    made, saved = told.index((True, "grad_experts_input")), told.index((False, "experts_offsets"))
    for name in ("experts_fc1_columns", "experts_fc2_columns", "grad_experts_fc1_columns", "grad_experts_fc2_columns"):
        assert made < told.index((False, name)), (
            "the second input is a view of what a kernel made, and no product's end ends it"
        )
        assert (saved < told.index((False, name))) is waits


HYBRID = {**OF, **ROUTED, "model": "nemotron-3-nano-30b-a3b", "moe-squared-relu-fusion": "true"}


def test_squared_relu_alone_is_made_again() -> None:
    """``activation_recompute_in_mlp``, which gated activations have, too, and do not heed; nothing is halved."""

    def experts(**flags: str) -> dict[str, int]:
        plan = read_plan(None, {**HYBRID, **flags}).plan
        plan = plan.model_copy(update={"environment": {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": ON}})
        shapes = (layer_shape_of(module_shapes(core_shape(resolve(plan)))[0], i) for i in range(2))
        return next(own(kept(one), "experts") for one in shapes if one.kind == "E")

    rows, inner = 16 * 256, 1856
    both = experts()
    assert both["fc1"] == rows * inner * 2
    again = experts(recompute="selective", **{"recompute-modules": "moe_act"})
    assert {*both} - {*again} == {"fc2_columns", "fc2_column_scales"}
    gated = {"recompute": "selective", "recompute-modules": "moe_act"}
    assert kept(shape({**ROUTED, **gated})) == kept(shape(ROUTED))


@pytest.mark.parametrize("tp", [1, 2])
def test_shared_experts_are_one_whose_rows_have_no_probabilities(tp: int) -> None:
    """Of all tokens, gathered under sequence parallelism, which are kept in no other way."""
    flags = {**SHARED, "tp": str(tp), "etp": "1", "sequence-parallel": str(tp > 1).lower(), "dp": str(8 // tp)}
    sizes = kept(shape(flags))
    f = 1024 // tp
    assert own(sizes, "shared_experts") == {
        "fc1": 512 * 2 * f * 2,
        "fc1_columns": 512 * H, "fc1_column_scales": 512 * H // 32,
        "fc2_columns": 512 * f, "fc2_column_scales": 512 * f // 32,
    }  # fmt: skip
    assert not [name for name in sizes if name.startswith("mlp.shared_experts")]


@pytest.mark.parametrize(
    ("flags", "environment", "problem"),
    [
        (ROUTED, "0", "fuses_operations = true: must be false with experts unless NVTE_CUTEDSL_FUSED_GROUPED_MLP=1"),
        ({**ROUTED, "gpu": "rtx-5090"}, ON, "must be false off Blackwell"),
        ({**ROUTED, "megatron-fsdp": "optim"}, ON, "must be false with sharded parameters"),
        ({"moe-shared-chain": "true"}, ON, "must be false: the model has no shared experts"),
    ],
)
def test_what_stops_is_one_line(flags: dict[str, str], environment: str, problem: str) -> None:
    with pytest.raises(PlanError) as raised:
        shape(flags, environment)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({**ROUTED, "fp8": "tensorwise"}, "without parameters in MXFP8"),
        ({**ROUTED, "fp8-parameters": "false"}, "without parameters in MXFP8"),
        ({**ROUTED, "moe-flex-backend": "deepep"}, "with DeepEP"),
        ({**ROUTED, "expert-ffn": "800"}, "features that are no multiple of 64"),
        ({**SHARED, "seq": "480"}, "a number of tokens that is no multiple of 128"),
        ({**ROUTED, "te-version": "2.16"}, "before Transformer Engine 2.17"),
        ({**SHARED, "te-version": "2.18"}, "of shared experts before Transformer Engine 2.19"),
    ],
)
def test_what_is_not_modelled_is_named(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        shape(flags)
