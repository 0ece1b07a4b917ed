"""Launch scripts of Megatron-LM's hybrids."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Options
from memplan.plan.count import further, parameters
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.resolve import resolve
from memplan.tape.program import fold_program

SPEC = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
PATTERN = "--hybrid-layer-pattern"


def read(pattern: str | None, gpus: int = 8, **more: object) -> Plan:
    given: dict[str, Any] = {
        "--hidden-size": 1024, "--num-attention-heads": 16, "--seq-length": 4096, "--max-position-embeddings": 4096,
        "--micro-batch-size": 4, "--global-batch-size": 32, "--bf16": True, "--position-embedding-type": "none",
        "--untie-embeddings-and-output-weights": True, "--disable-bias-linear": True, "--normalization": "RMSNorm",
        "--spec": f"[{SPEC}]",
    }  # fmt: skip
    given |= {} if pattern is None else {PATTERN: pattern}
    given |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    return plan_of_arguments(given, gpus=gpus, family="hybrid", vocabulary=32000).plan


def test_a_pattern_is_the_model() -> None:
    """Defaults are Megatron-LM's: 128 states, heads of 64 features, 8 groups, twice the hidden size."""
    model = read("M-M*-E", num_layers=99, num_experts=4, moe_ffn_hidden_size=512).model
    assert (model.layer_pattern, model.layers, model.family) == ("M-M*-E", 6, "hybrid")
    assert (model.mamba_heads, model.mamba_head_dim, model.mamba_groups, model.mamba_state_dim) == (32, 64, 8, 128)
    assert [model.has_experts(layer) for layer in range(6)] == [False] * 5 + [True]
    assert read("M-", squared_relu=True).model.activation == "relu2"


def test_bars_cut_it_into_stages() -> None:
    """Segments of chunk 0 on every stage, then of chunk 1."""
    plan = read("M-|M*-|M|MM", pipeline_model_parallel_size=2)
    assert (plan.layout.vpp, plan.pipeline.layout, plan.model.layer_pattern) == (2, "Ett|ttt|t|ttL", "M-M*-MMM")
    even = read("M-M*", pipeline_model_parallel_size=2)
    assert (even.layout.vpp, even.pipeline.layout) == (1, None)


def test_layers_behind_a_slash_predict_further_tokens() -> None:
    """One for both tokens, which is counted once; or one for each. Every parameter is in the program."""
    more: dict[str, object] = {"num_experts": 4, "moe_ffn_hidden_size": 512, "moe_grouped_gemm": True}
    shared = read("M*E/*E/*E", **more, mtp_use_repeated_layer=True, gpus=1, global_batch_size=4)
    apart = read("M*E", **more, mtp_num_layers=2, mtp_hybrid_override_pattern="*E", gpus=1, global_batch_size=4)
    assert (shared.model.mtp_pattern, shared.model.mtp_layers, shared.model.mtp_shared) == ("*E", 2, True)
    assert apart.model == shared.model.model_copy(update={"mtp_shared": False})
    assert parameters(apart.model) - parameters(shared.model) == further(shared.model)
    for plan in (shared, apart):
        (stage,) = programs(resolve(plan), Options())
        chunk = stage.order.chunks[0]  # type: ignore[attr-defined]
        held = sum(one.elements * len(span.names) for span in chunk.spans for one in span.module.parameters)
        assert held == parameters(plan.model)


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "pattern"),
    [
        (12, 0.0, 0.0, "M" * 12),
        (10, 0.2, 0.0, "MMM*MM*MMM"),
        (8, 0.0, 0.5, "M-M-M-M-"),
        (12, 0.08, 0.5, "M-M-M-*-M-M-"),
    ],
)
def test_ratios_of_older_releases(layers: int, attention: float, mlp: float, pattern: str) -> None:
    """``pattern_from_ratios``, run by hand."""
    plan = read(None, num_layers=layers, hybrid_attention_ratio=attention, hybrid_mlp_ratio=mlp)
    assert plan.model.layer_pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "more", "problem"),
    [
        ("MD*", {}, "has 'D': sparse attention are not modelled yet"),
        ("GE*", {"num_experts": 4, "moe_ffn_hidden_size": 64, "linear_num_key_heads": 6}, "multiple of the 6 heads"),
        ("G*", {"experimental_attention_variant": "gdn2"}, "must be gdn or left out: gated delta nets with decays"),
        ("M+", {}, "has '+': latent attention are not modelled yet"),
        ("MX", {}, "has 'X': it is no kind of layer"),
        ("M*/M*/M", {}, "has different layers behind each /"),
        ("M*/MD", {}, "has 'D': sparse attention are not modelled yet"),
        ("M|*|M", {"pipeline_model_parallel_size": 2}, "has 3 segments, which the 2 ranks of the pipeline must divide"),
        ("M*", {"num_virtual_stages_per_pipeline_rank": 2}, "must be left out with --hybrid-layer-pattern"),
        ("M*", {"spec": "[my.module spec]"}, "hybrids need a specification of layers"),
        ("M*", {"mamba_head_dim": 48}, "must divide 2048, twice the hidden size"),
        (None, {}, "--hybrid-layer-pattern: is missing"),
        ("M*", {"hybrid_override_pattern": "M*"}, "must be left out with --hybrid-layer-pattern"),
        ("M*E", {}, "must be given with layers E"),
        ("M*", {"mamba_num_heads": 30}, "must divide the 30 Mamba heads"),
        (
            "M*",
            {"tensor_model_parallel_size": 8, "mamba_num_groups": 4},
            "must divide the 32 Mamba heads and their groups",
        ),
        (
            "M*",
            {"context_parallel_size": 4, "mamba_num_heads": 6, "mamba_num_groups": 2},
            "must divide the 6 Mamba heads",
        ),
        ("M*", {"swiglu": True, "squared_relu": True}, "must be left out with --swiglu"),
    ],
)
def test_what_is_not_modelled_is_one_line(pattern: str | None, more: dict[str, object], problem: str) -> None:
    with pytest.raises(PlanError) as raised:
        resolve(read(pattern, **more))
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_kernels_and_states_of_mamba_layers() -> None:
    """Convolution and scan apart keep more; without Mamba-2 layers both arguments do nothing, and a plan of memplan's
    own is refused."""
    given = read("M-M*", disable_mamba_mem_eff_path=True, mamba_training_ssm_states_dtype="fp32")
    assert (given.megatron.mamba_apart, given.megatron.mamba_states) == (True, "fp32")
    (apart,), (together,) = (programs(resolve(plan), Options()) for plan in (given, read("M-M*")))
    assert fold_program(apart).peak > fold_program(together).peak
    without = read("*-", disable_mamba_mem_eff_path=True, mamba_training_ssm_states_dtype="fp32")
    assert (without.megatron.mamba_apart, without.megatron.mamba_states) == (False, None)
    changed = without.model_copy(update={"megatron": given.megatron})
    with pytest.raises(PlanError, match="the model has no Mamba-2 layers"):
        programs(resolve(changed), Options())
