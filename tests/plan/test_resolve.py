"""Defaults that depend on other fields, and rules between fields."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memplan.plan.errors import PlanError
from memplan.plan.fields import by_flag
from memplan.plan.library import examples, model_specs
from memplan.plan.models import load_spec
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from .outcomes import error_of


def resolved(**flags: str) -> Plan:
    return resolve(read_plan(None, {name.replace("_", "-"): value for name, value in flags.items()}).plan)


def refusal(**flags: str) -> str:
    read = read_plan(None, {name.replace("_", "-"): value for name, value in flags.items()})
    with pytest.raises(PlanError) as caught:
        resolve(read.plan)
    return str(caught.value.located(read.origins))


MEGATRON = {"model": "bigscience-104b", "framework": "megatron-deepspeed"}


def test_the_smallest_plan_has_every_default() -> None:
    plan = resolved(model="gpt2", gpu="v100-32gb")
    assert (plan.hardware.gpus, plan.layout.dp) == (1, 1)
    assert plan.hardware.capacity == 32_510 << 20
    assert (plan.batch.gbs, plan.batch.seq) == (1, 1024)
    assert plan.precision.gradients == "fp16"  # Volta's tensor cores take no bf16
    assert resolved(model="gpt2", gpu="v100-32gb", dtype="bf16").precision.gradients == "bf16"
    assert resolved(model="gpt2", gpu="a100-40gb").precision.gradients == "bf16"
    assert (plan.optimizer.implementation, plan.loss.kind) == ("foreach", "plain")


def test_gpus_and_dp_follow_from_each_other() -> None:
    assert resolved(**MEGATRON, tp="4", pp="8", gpus="64").layout.dp == 2
    assert resolved(**MEGATRON, tp="4", pp="8", dp="3").hardware.gpus == 96
    assert resolved(model="gpt2", framework="ddp", gpus="8").layout.dp == 8
    assert refusal(**MEGATRON, tp="4", pp="8", gpus="65") == (
        "--gpus: hardware.gpus = 65: must be a multiple of tp x pp x cp = 4 x 8 x 1 = 32: 64 and 96 GPUs work"
    )
    assert "must be tp x pp x dp x cp = 4 x 8 x 2 x 1 = 64" in refusal(**MEGATRON, tp="4", pp="8", dp="2", gpus="32")


def test_megatron_deepspeed_has_its_own_defaults() -> None:
    plan = resolved(**MEGATRON, tp="4", pp="8", dp="2", recompute="full")
    assert (plan.optimizer.implementation, plan.loss.kind, plan.recompute.layers) == ("apex", "vocab-parallel", 1)
    assert plan.batch.gbs == 16
    assert resolved(**MEGATRON, optimizer="sgd").optimizer.implementation == "foreach"
    assert resolved(**MEGATRON, optimizer="adam8bit").optimizer.block_size == 2048


def test_blocks_of_8_bit_states_are_of_the_codes_age() -> None:
    """bitsandbytes took 2048 elements until 0.43, and 256 since 0.44."""

    def size(**flags: str) -> int | None:
        return resolved(optimizer="adam8bit", **flags).optimizer.block_size

    assert [size(model="gpt2", framework=framework) for framework in ("single", "ddp")] == [256, 256]
    assert size(model="gpt2", optimizer_block_size="2048") == 2048
    assert size(model="gpt2", code="2020", dtype="fp32") == size(**MEGATRON) == 2048
    assert size(**MEGATRON, optimizer_block_size="256") == 256


def test_adaptive_softmax_has_cutoffs_for_larger_vocabularies() -> None:
    flags = {"framework": "megatron-deepspeed", "loss": "adaptive-softmax"}
    assert resolved(model="bigscience-104b-250k", **flags).loss.cutoffs == (20_000, 80_000)
    assert resolved(model="gpt2", **flags).loss.cutoffs == (20_000,)
    assert "a vocabulary of 100 has no default" in refusal(model="gpt2", vocab="100", **flags)


def test_a_device_map_is_equal_shares_unless_given() -> None:
    plan = resolved(model="gpt2", framework="device-map", gpus="5")
    assert plan.device_map == {0: (0, 1, 2), 1: (3, 4, 5), 2: (6, 7), 3: (8, 9), 4: (10, 11)}
    assert resolved(model="gpt2", framework="device-map", device_map="{0: 0-5, 1: 6-11}").hardware.gpus == 2
    assert "needs the number of devices" in refusal(model="gpt2", framework="device-map")


def test_the_batch_of_a_process_that_sees_several_gpus() -> None:
    flags = {"model": "gpt2", "framework": "device-map", "gpus": "4", "multiply_by_visible_gpus": "true"}
    assert resolved(**flags, mbs="2").batch.gbs == 8
    assert refusal(**flags, gbs="6") == (
        "--gbs: batch.gbs = 6: must be a multiple of mbs 1 x 4 visible GPUs x dp 1 = 4"
    )
    assert "device-map has several GPUs in one process" in refusal(model="gpt2", multiply_by_visible_gpus="true")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({**MEGATRON, "tp": "7"}, "--tp: layout.tp = 7: must divide the 80 attention heads (1, 2, 4, 5, 8, 10, 16, "
        "20, 40, 80)"),
        ({"model": "llama-3-8b", "framework": "megatron-deepspeed", "tp": "16"}, "must divide the 8 key/value heads "
        "(1, 2, 4, 8)"),
        ({**MEGATRON, "pp": "65"}, "--pp: layout.pp = 65: must be at most the 64 layers of the model"),
        ({**MEGATRON, "layers": "2", "pp": "4"}, "--pp: layout.pp = 4: must be at most the 2 layers"),
        ({**MEGATRON, "mbs": "3", "gbs": "4"}, "--gbs: batch.gbs = 4: must be a multiple of mbs 3 x dp 1 = 3"),
        ({**MEGATRON, "seq": "4096"}, "--seq: batch.seq = 4096: must be at most 2048, the number of learned positions"),
        ({**MEGATRON, "zero": "2"}, "--zero: layout.zero = 2: must be at most 1 with framework megatron-deepspeed; "
        "deepspeed has ZeRO-2"),
        ({**MEGATRON, "cp": "2"}, "--cp: layout.cp = 2: must be 1 with framework megatron-deepspeed; megatron and "
        "fsdp have context parallelism"),
        ({**MEGATRON, "ep": "2"}, "--ep: layout.ep = 2: must be 1 with framework megatron-deepspeed; megatron and "
        "fsdp have expert parallelism"),
        ({**MEGATRON, "vpp": "2"}, "--vpp: layout.vpp = 2: must be 1 with framework megatron-deepspeed; megatron and "
        "fsdp have virtual stages"),
        ({**MEGATRON, "tp": "4", "sequence_parallel": "true"}, "--sequence-parallel: layout.sequence_parallel = true: "
        "must be false"),
        ({"model": "gpt2", "framework": "fsdp", "tp": "2"}, "--tp: layout.tp = 2: must be 1 with framework fsdp"),
        ({"model": "gpt2", "framework": "single", "tp": "2"}, "--tp: layout.tp = 2: must be 1 with framework single"),
        ({"model": "gpt2", "framework": "ddp", "pp": "2"}, "--pp: layout.pp = 2: must be 1 with framework ddp"),
        ({"model": "gpt2", "framework": "single", "zero": "1"}, "--zero: layout.zero = 1: must be 0 with framework "
        "single"),
        ({"model": "gpt2", "framework": "ddp", "zero": "2"}, "--zero: layout.zero = 2: must be at most 1 with "
        "framework ddp; deepspeed has ZeRO-"),
        ({"model": "gpt2", "framework": "single", "static-graph": "true"}, "--static-graph: ddp.static_graph = true: "
        "must be left out with framework single"),
        ({"model": "gpt2", "framework": "single", "dp": "2"}, "--dp: layout.dp = 2: must be 1 with framework single"),
        ({"model": "gpt2", "framework": "single", "gpus": "2"}, "--gpus: hardware.gpus = 2: must be 1 with framework"),
        ({"model": "gpt2", "framework": "device-map", "gpus": "2", "dp": "2"}, "--dp: layout.dp = 2: must be 1 with "
        "framework device-map"),
        ({"model": "gpt2", "gpu": "h1000"}, "--gpu: hardware.gpu = h1000: is not a known GPU (`memplan gpus` lists "
        "40); for another GPU, give its memory: --capacity 24GiB; did you mean h100-80gb?"),
        ({"model": "gpt2", "gpu": "p4d.24xlarge"}, "hardware.gpu = p4d.24xlarge: is no GPU, but means 8 x a100-40gb: "
        "--gpu a100-40gb --gpus 8"),
        ({"model": "gpt2", "optimizer_implementation": "apex"}, "must be foreach, for-loop, fused or bitsandbytes for "
        "adamw with framework single"),
        ({**MEGATRON, "optimizer": "sgd", "optimizer_implementation": "apex"}, "must be foreach, for-loop or fused "
        "for sgd"),
        ({"model": "gpt2", "optimizer": "adam8bit", "optimizer_implementation": "fused"}, "must be left out: adam8bit"),
        ({"model": "gpt2", "optimizer_block_size": "256"}, "must be left out: adamw has no 8-bit states"),
        ({"model": "gpt2", "gradients": "fp32"}, "--gradients: precision.gradients = fp32: must be bf16 with "
        "framework single"),
        ({**MEGATRON, "dtype": "fp16", "gradients": "bf16"}, "must be fp16 or fp32 with framework megatron-deepspeed"),
        ({"model": "gpt2", "loss": "vocab-parallel"}, "--loss: loss.kind = vocab-parallel: must be plain, liger, cut, "
        "chunked, liger-cross-entropy or unsloth with framework single; megatron, megatron-deepspeed and fsdp have"),
        ({"model": "gpt2", "loss": "adaptive-softmax"}, "with framework single; megatron-deepspeed has "
        "adaptive-softmax"),
        ({"model": "gpt2", "div_value": "2"}, "--div-value: loss.div_value = 2.0: needs loss.kind adaptive-softmax, "
        "not plain"),
        ({"model": "gpt2", "embeddings_32bit": "false"}, "--embeddings-32bit: optimizer.embeddings_32bit = false: "
        "must be left out: adamw has no 8-bit states"),
        ({"model": "gpt2", "schedule": "gpipe"}, "--schedule: pipeline.schedule = gpipe: must be left out with "
        "framework single; megatron-deepspeed and fsdp have it"),
        ({"model": "gpt2", "framework": "ddp", "partition": "uniform"}, "--partition: pipeline.partition = uniform: "
        "must be left out with framework ddp"),
        ({"model": "gpt2", "framework": "device-map", "gpus": "2", "partition": "0,4,8"}, "must be left out with "
        "framework device-map"),
        ({"model": "gpt2", "env": "PYTORCH_NO_CUDA_MEMORY_CACHING=1"}, "--env: "
        "environment.PYTORCH_NO_CUDA_MEMORY_CACHING = 1: must be left out: it turns off the caching allocator"),
        ({"model": "gpt2", "cutoffs": "10"}, "--cutoffs: loss.cutoffs = [10]: needs loss.kind adaptive-softmax"),
        ({"model": "gpt2", "framework": "megatron-deepspeed", "loss": "adaptive-softmax", "cutoffs": "20,10"}, "must "
        "increase and stay below the vocabulary of 50257"),
        ({"model": "gpt2", "framework": "megatron-deepspeed", "loss": "adaptive-softmax", "cutoffs": "50257"}, "must "
        "increase and stay below"),
        ({"model": "bert-large", "framework": "megatron-deepspeed", "loss": "adaptive-softmax"}, "the head of "
        "bert-large has no adaptive softmax"),
        ({"model": "gpt2", "recompute_layers": "2"}, "--recompute-layers: recompute.layers = 2: needs recompute.mode "
        "full"),
        ({"model": "gpt2", "recompute_method": "block"}, "needs recompute.mode full, not none"),
        ({"model": "gpt2", "recompute": "full", "recompute_layers": "13"}, "must be at most the 12 layers"),
        ({"model": "llama-3-8b", "code": "2020"}, "--code: code = 2020: must be current"),
        ({"model": "gpt2", "code": "2020", "attention": "flash"}, "must be eager with code 2020"),
        ({"model": "gpt2", "code": "2020", "attention": "eager"}, "must be fp32 with code 2020"),
        ({"model": "gpt2", "partition": "even"}, "--partition: pipeline.partition = even: must be uniform, "
        "parameters, type:REGEX"),
        ({"model": "gpt2", "partition": "type:("}, "is not a regular expression"),
        ({"model": "gpt2", "headroom": "lots"}, "--headroom: headroom = lots: must be bytes"),
        ({"model": "llama-3-8b", "kv_heads": "7"}, "--kv-heads: model.kv_heads = 7: must divide the 32 attention "
        "heads"),
        ({"model": "llama-3-8b", "head_dim": "3"}, "must be even: rotary positions"),
        ({"model": "llama-3-8b", "mbs": "2147483648", "seq": "2147483648"}, "is more than 1,099,511,627,776 tokens "
        "per micro-batch"),
    ],
)  # fmt: skip
def test_a_contradiction_gets_one_line(flags: dict[str, str], line: str) -> None:
    found = refusal(**flags)
    assert line in found
    assert len(found.splitlines()) == 1


def test_defaults_that_are_written_out_pass_where_they_mean_nothing() -> None:
    written = {"schedule": "1f1b", "partition": "type:transformer", "div_value": "4", "embeddings_32bit": "true"}
    assert resolved(model="gpt2", **written) == resolved(model="gpt2")


def test_rotary_and_alibi_may_go_beyond_the_longest_trained() -> None:
    assert resolved(model="llama-3-8b", seq="16384").batch.seq == 16384
    assert resolved(model="bloom-176b", seq="4096").batch.seq == 4096


@pytest.mark.parametrize("name", examples())
def test_examples_resolve(name: str) -> None:
    plan = resolve(read_plan(name).plan)
    assert plan.hardware.capacity


@pytest.mark.parametrize("name", model_specs())
def test_every_model_resolves(name: str) -> None:
    spec = load_spec(name)
    of_megatron = (spec.experts or spec.layer_pattern or spec.layer_blocks) and not spec.index_heads
    framework = {"framework": "megatron"} if of_megatron else {"framework": "fsdp"} if spec.index_heads else {}
    plan = resolved(model=name, **framework)
    assert plan.batch.seq == min(plan.model.positions_max, 4096)


FLAGS: dict[str, st.SearchStrategy[str]] = {
    **{name: st.integers(1, 16).map(str) for name in ("tp", "pp", "dp", "gpus", "mbs", "gbs", "layers", "cutoffs")},
    **{name: st.sampled_from(field.choices) for name, field in by_flag().items() if field.choices and name != "family"},
    "zero": st.sampled_from(["0", "1"]),
    "div-value": st.sampled_from(["2", "4"]),
    "embeddings-32bit": st.sampled_from(["true", "false"]),
    "partition": st.sampled_from(["uniform", "parameters", "type:embed|transformer", "type:(", "0,1", "0,5,9"]),
    "multiply-by-visible-gpus": st.sampled_from(["true", "false"]),
}


@settings(deadline=None)
@given(st.sampled_from(["gpt2", "llama-3-8b", "bert-large"]), st.fixed_dictionaries({}, optional=FLAGS))
def test_resolving_gives_a_plan_or_one_line_and_twice_changes_nothing(model: str, flags: dict[str, Any]) -> None:
    line = error_of(lambda: resolve(read_plan(None, {"model": model, **flags}).plan))
    assert len(line.splitlines()) <= 1
    if not line:
        once = resolve(read_plan(None, {"model": model, **flags}).plan)
        assert resolve(once) == once
