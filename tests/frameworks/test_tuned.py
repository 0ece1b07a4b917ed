"""Plans that freeze parameters: what is held, what is trained, and where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from memplan.estimate import estimate, programs_of
from memplan.families import family
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.lora import adapter_parameters
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.result import Estimate
from memplan.tape.events import Category
from memplan.tape.program import fold_program

MODELS = ("gpt2", "llama-3-8b", "qwen3-8b", "bert-large", "phi-3-mini", "gemma-2-9b", "opt-6.7b", "gpt-neox-20b")
SMALL = {"layers": "3", "gpu": "h100-80gb", "seq": "128", "attention": "eager"}


def plan(**flags: object) -> Plan:
    merged = {**SMALL, **{k.replace("_", "-"): str(v) for k, v in flags.items()}}
    return resolve(read_plan(None, merged).plan)


def of(result: Estimate, category: Category) -> int:
    return sum(stage.of(category) for stage in result.stages)


def trained(one: Plan) -> list[int]:
    """Elements of the parameters that are trained."""
    programs = programs_of(one, Options())
    return [p.elements for program in programs for p in program.parameter_tensors() if p.trained]


@pytest.mark.parametrize("model", [*MODELS, "gpt-j-6b", "falcon-7b"])
def test_adapters_are_counted_as_peft_does(model: str) -> None:
    one = plan(model=model, lora_rank=8, lora_targets="all-linear")
    assert sum(trained(one)) == adapter_parameters(one)
    assert len(trained(one)) == 2 * (3 * _per_layer(one) + ("transform" in family(one.model.family).linear_layers))


def _per_layer(one: Plan) -> int:
    return len([name for name in family(one.model.family).linear_layers if name != "transform"])


def test_llama_3_8b_has_as_many_adapters_as_reported() -> None:
    """Rank 16 on q_proj and v_proj, "trainable params: 6,815,744": 16 (4096 + 4096 + 4096 + 1024) in 32 layers."""
    assert adapter_parameters(plan(model="llama-3-8b", layers=32, lora_rank=16)) == 6_815_744


def test_adapters_on_latent_attention() -> None:
    """DeepSeek V2 Lite, rank 8, in 3 layers: queries from 2048 to 16 heads of 192, keys and values from a rank of 512
    to 16 heads of 128 + 128, the output from 16 heads of 128 to 2048. V2 makes queries by way of a rank of 1536."""
    one = plan(model="deepseek-v2-lite", lora_rank=8, lora_targets="q_proj,kv_b_proj,o_proj")
    assert sum(trained(one)) == adapter_parameters(one) == 3 * 8 * (2048 + 3072 + 512 + 4096 + 2048 + 2048)
    one = plan(model="deepseek-v2", lora_rank=8, lora_targets="q_a_proj,q_b_proj,kv_a_proj_with_mqa")
    assert sum(trained(one)) == adapter_parameters(one) == 3 * 8 * (5120 + 1536 + 1536 + 128 * 192 + 5120 + 512 + 64)


def test_dora_trains_a_norm_for_every_output() -> None:
    """q_proj of Llama 3 8B: 16 (4096 + 4096) and 4096 norms in each of 3 layers."""
    one = plan(model="llama-3-8b", lora_rank=16, lora_targets="q_proj", use_dora="true")
    assert sum(trained(one)) == adapter_parameters(one) == 3 * (16 * 2 * 4096 + 4096)


def test_a_target_that_names_nothing_is_told() -> None:
    """peft leaves it out where others match (``tuners_utils.py``, ``inject_adapter``)."""
    found = [
        {one.code: one.message for one in estimate(plan(model="llama-3-8b", lora_rank=8, lora_targets=given)).warnings}
        for given in ("q_proj,output_proj", "q_proj")
    ]
    assert "called output_proj (lora.targets), so peft adds no adapter there" in found[0]["targets-left-out"]
    assert "targets-left-out" not in found[1]


def test_gradients_and_states_are_of_adapters_alone() -> None:
    """fp32 adapters over a bf16 model: 8 bytes of states each."""
    one = plan(model="llama-3-8b", lora_rank=16, lora_targets="q_proj,v_proj")
    result = estimate(one)
    assert of(result, Category.OPTIMIZER_STATES) == pytest.approx(8 * adapter_parameters(one), rel=1e-3)
    assert result.stages[0].parameters == estimate(plan(model="llama-3-8b")).stages[0].parameters + adapter_parameters(
        one
    )


def test_double_quantised_weights_take_half_a_byte_and_an_eighth_of_a_bit_more() -> None:
    """A layer of Llama 3 8B: n / 2 bytes, n / 64 of scales, n / 64 / 256 * 4 of theirs."""
    flags = {"model": "llama-3-8b", "lora_rank": 16}
    plain, packed = estimate(plan(**flags)), estimate(plan(**flags, quantisation="nf4", double_quantisation="true"))
    n = 3 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = of(plain, Category.PARAMETERS) - of(packed, Category.PARAMETERS)
    assert saved == pytest.approx(n * (2 - 1 / 2 - 1 / 64 - 4 / 64 / 256), rel=1e-4)


def test_ddp_reduces_adapters_alone() -> None:
    one = plan(model="llama-3-8b", lora_rank=16, framework="ddp", gpus=2)
    buckets = of(estimate(one), Category.COMMUNICATION_BUFFERS)
    assert buckets == pytest.approx(4 * adapter_parameters(one), rel=1e-2)


def test_nothing_is_kept_of_layers_before_the_first_that_is_trained() -> None:
    """Two of three layers, and the embedding, run without a graph."""
    last = plan(model="llama-3-8b", framework="device-map", gpus=3, freeze_embedding="true", freeze_layers=2)
    _, idle, busy = programs_of(last, Options())
    assert not any(span.module.first.backward for span in idle.spans)
    assert fold_program(idle).after_forward == fold_program(idle).static
    assert fold_program(busy).after_forward > fold_program(busy).static
    assert [stage.of(Category.GRADIENTS) > 0 for stage in estimate(last).stages] == [True, False, True]


MIXTRAL = {"model": "mixtral-8x7b", "lora_rank": 8, "lora_target_parameters": "experts.down_proj"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"quantisation": "nf4"}, "experts stay in bf16 and take 5.25 GiB: transformers 5"),
        ({"quantisation": "int8"}, "experts stay in bf16 and take 5.25 GiB: transformers 5"),
        ({"quantisation": "nf4", "versions": "transformers=4.57.1"}, ""),
        ({"quantisation": "nf4", "model": "llama-3-8b"}, ""),
        ({}, ""),
    ],
)
def test_experts_that_are_not_quantised_are_told(flags: dict[str, str], told: str) -> None:
    """Two layers of 8 experts, each of 3 x 4,096 x 14,336 weights of 2 bytes: 5.25 GiB."""
    result = estimate(plan(**{"model": "mixtral-8x7b", "layers": 2, "lora_rank": 8, "dtype": "bf16", **flags}))
    found = [one.message for one in result.warnings if one.code == "experts-not-quantised"]
    assert [one[: len(told)] for one in found] == ([told] if told else [])
    assert not told or 2 * 8 * 3 * 4096 * 14336 * 2 == 5.25 * 2**30


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "llama-3-8b", "lora_rank": 0}, "at least 1"),
        ({"model": "llama-3-8b", "lora_rank": 8, "lora_targets": "c_attn"}, "q_proj, k_proj, v_proj, o_proj"),
        ({"model": "gpt2", "lora_rank": 8, "lora_targets": "wpe"}, "is not modelled as a target in gpt2"),
        ({"model": "phi-3-mini", "lora_rank": 8}, "qkv_proj"),
        ({"model": "llama-3-8b", "lora_rank": 8, "lora_targets": "all-linear,q_proj"}, "all-linear alone"),
        ({"model": "llama-3-8b", "lora_targets": "q_proj"}, "--lora-rank"),
        ({"model": "llama-3-8b", "lora_rank": 8, "lora_dtype": "fp16"}, "bf16 or fp32"),
        ({"model": "llama-3-8b", "lora_rank": 8, "loss": "chunked"}, "must be plain, liger or cut"),
        ({"model": "llama-3-8b", "lora_rank": 8, "freeze_layers": 1}, "freezes the whole model"),
        (
            {"model": "gpt2", "lora_rank": 8, "framework": "megatron-deepspeed", "dtype": "fp16"},
            "single, ddp, device-map, megatron, deepspeed and fsdp",
        ),
        ({"model": "llama-3-8b", "lora_rank": 8, "framework": "megatron", "quantisation": "nf4"}, "fsdp"),
        ({"model": "llama-3-8b", "freeze_layers": 4}, "at most the 3 layers"),
        ({"model": "gpt2", "code": "2020", "dtype": "fp32", "freeze_embedding": "true"}, "code 2020"),
        ({"model": "llama-3-8b", "quantisation": "nf4"}, "cannot be trained"),
        (
            {"model": "llama-3-8b", "lora_rank": 8, "use_dora": "true", "framework": "deepspeed", "gpus": 2, "zero": 3},
            "must be false at stage 3",
        ),
        (
            {
                "model": "gpt2",
                "lora_rank": 8,
                "use_dora": "true",
                "framework": "fsdp",
                "gpus": 2,
                "quantisation": "nf4",
            },
            "packed",
        ),
        ({"model": "llama-3-8b", "lora_rank": 8, "modules_to_save": "norm"}, "embed_tokens and lm_head are"),
        ({"model": "gpt2", "lora_rank": 8, "modules_to_save": "lm_head"}, "share one table"),
        ({"model": "llama-3-8b", "lora_rank": 8, "quantisation": "hqq"}, "can be nf4, fp4, gptq, awq or int8"),
        (
            {
                "model": "llama-3-8b",
                "lora_rank": 8,
                "quantisation": "gptq",
                "dtype": "fp16",
                "lora_targets": "all-linear",
            },
            "finds torch.nn.Linear, and none",
        ),
        ({"model": "llama-3-8b", "lora_rank": 8, "quantisation": "int8", "use_dora": True}, "must be false"),
        ({"model": "llama-3-8b", "lora_rank": 8, "quantisation": "int8", "double_quantisation": True}, "no such"),
        ({"model": "llama-3-8b", "lora_rank": 8, "quantisation": "int8", "framework": "fsdp", "gpus": 2}, "single and"),
        ({"model": "llama-3-8b", "lora_rank": 8, "lora_targets": "lm_head", "loss": "liger"}, "head's own weight"),
        ({"model": "mixtral-8x7b", "lora_rank": 8, "lora_target_parameters": "w1"}, "matches no weight of experts"),
        ({**MIXTRAL, "model": "llama-3-8b"}, "which this model has not: name linear layers (--lora-targets)"),
        ({**MIXTRAL, "lora_dropout": 0.1}, "ParamWrapper refuses it"),
        ({**MIXTRAL, "framework": "deepspeed", "gpus": 2}, "modelled in single"),
        ({**MIXTRAL, "versions": "transformers=4.57.1"}, "experts are modules"),
        ({"model": "llama-3-8b", "lora_rank": 8, "double_quantisation": "true"}, "quantisation.kind is none"),
        ({"model": "falcon-7b", "lora_rank": 8, "quantisation": "nf4"}, "class of their own"),
        (
            {
                "model": "llama-3-8b",
                "lora_rank": 8,
                "quantisation": "nf4",
                "kbit_preparation": "true",
                "attention": "flash",
            },
            "fp32",
        ),
        ({"model": "falcon-7b", "lora_rank": 8, "lora_targets": "dense"}, "query_key_value"),
        ({"model": "gpt2", "kernels": "liger"}, "no kernels are modelled for its layers"),
        ({"model": "gpt2", "loss": "unsloth"}, "its loss is not among fms-acceleration's"),
        ({"model": "bert-large", "loss": "liger-cross-entropy"}, "no head for causal language modelling"),
        ({"model": "mixtral-8x7b", "kernels": "liger"}, "must be eager with experts (--mlp-kernel eager): "),
        ({"model": "olmoe-1b-7b", "kernels": "liger"}, "no kernels are modelled for its layers"),
        ({"model": "qwen3-8b", "kernels": "fms"}, "kernels.norm = unsloth: must be eager or liger for family qwen3"),
        ({"model": "llama-3-8b", "rope_kernel": "unsloth", "framework": "deepspeed"}, "must be eager or liger"),
        ({"model": "llama-3-8b", "lora_rank": 8, "lora_kernel": "unsloth"}, "which Unsloth's functions are for"),
        (
            {"model": "llama-3-8b", "lora_rank": 8, "lora_kernel": "unsloth", "quantisation": "nf4"},
            "without autocast",
        ),
        (
            {"model": "llama-3-8b", "lora_rank": 8, "kernels": "fms", "quantisation": "nf4", "autocast": "true"},
            "nf4 with double quantisation",
        ),
        (
            {
                "model": "llama-3-8b",
                "lora_rank": 8,
                "lora_targets": "all-linear",
                "kernels": "fms",
                "quantisation": "nf4",
                "double_quantisation": "true",
                "autocast": "true",
            },
            "backward of its function multiplies shapes that do not match",
        ),
        ({"model": "llama-3-8b", "lora_rank": 8, "quantisation": "gptq"}, "must be fp16 with quantisation.kind gptq"),
        (
            {"model": "llama-3-8b", "lora_rank": 8, "quantisation": "nf4", "group_size": 64},
            "needs quantisation.kind gptq",
        ),
        ({"model": "llama-3-8b", "loss": "liger", "liger_version": "0.5.1"}, "at least 0.5.3, or 0.3.1 to 0.4.2"),
        ({"model": "gpt-j-6b", "freeze_embedding": "true", "freeze_layers": 1}, "must be 0"),
    ],
)
def test_what_is_contradictory_or_not_modelled_is_one_line(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        estimate(plan(**flags))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    framework=st.sampled_from(["single", "ddp", "device-map"]),
    tuning=st.sampled_from(["lora", "four-bit", "prepared", "frozen", "embedding"]),
    frozen=st.integers(0, 3),
    recompute=st.sampled_from(["none", "full"]),
    microbatches=st.integers(1, 3),
    optimizer=st.sampled_from(["adamw", "sgd", "adam8bit", "adafactor"]),
    flash=st.booleans(),
    liger=st.booleans(),
)
def test_any_tuned_plan_has_readings_in_order_and_categories_that_sum(
    model: str,
    framework: str,
    tuning: str,
    frozen: int,
    recompute: str,
    microbatches: int,
    optimizer: str,
    flash: bool,
    liger: bool,
) -> None:
    """Each hold is dropped once: ``fold_program`` asserts it."""
    gpus = {"single": 1, "ddp": 2, "device-map": 2}[framework]
    flags: dict[str, object] = {"model": model, "framework": framework, "gpus": gpus, "recompute": recompute}
    flags |= {"gbs": microbatches * (gpus if framework == "ddp" else 1), "optimizer": optimizer, "dtype": "bf16"}
    flags |= {"hidden": 64, "heads": 4, "head-dim": 16, "ffn": 96, "vocab": 1000, "seq": 32}
    flags["kv-heads"] = 2 if model in ("llama-3-8b", "qwen3-8b", "gemma-2-9b") else 4
    if flash and tuning != "prepared" and model != "gemma-2-9b":
        flags["attention"] = "flash"
    if tuning in ("frozen", "embedding"):
        flags |= {"freeze-layers": frozen, "freeze-embedding": str(tuning == "embedding").lower()}
    else:
        flags |= {"lora-rank": 4, "lora-targets": "all-linear"}
    if tuning in ("four-bit", "prepared") and model != "bert-large":
        flags |= {
            "quantisation": "nf4",
            "double-quantisation": "true",
            "kbit-preparation": str(tuning == "prepared").lower(),
        }
    if liger and model != "bert-large":
        flags["loss"] = "liger"
    for stage in estimate(plan(**flags)).stages:
        assert stage.allocated is not None
        assert stage.reserved is not None
        assert stage.requested <= stage.allocated <= stage.reserved
        assert sum(stage.breakdown) == stage.allocated
