"""Public "estimated x, used y" reports, from the configuration that each one gives: docs/deepspeed.md tells them.

Where a report leaves a size open (a sequence length, a micro-batch), only what does not depend on it is asserted.
"""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.result import StageEstimate
from memplan.tape.events import Category

from . import deepspeed_documented as zero_documented

GIB = 1 << 30
LLAMA_7B = {"model": "llama-2-7b", "dtype": "fp16", "attention": "eager"}
BOTH_OFFLOADED = {"zero": "3", "offload-optimizer": "cpu", "offload-param": "cpu"}


def deepspeed(**flags: str) -> StageEstimate:
    plan = read_plan(None, {"framework": "deepspeed", "mbs": "1", **{k.replace("_", "-"): v for k, v in flags.items()}})
    (stage,) = estimate(plan.plan).stages
    return stage


def test_llama_7b_on_eight_v100s_dies_in_the_step() -> None:
    """hiyouga/LLaMA-Factory#1221: ZeRO-2, "should just fit": 28.28 GiB allocated when the Adam denominator asks for
    3.14 GiB more, on 31.75 GiB.

    P = 6,738,415,616. 16-bit parameters 2P; of a rank's share P/8 in fp32: main parameters, two states, the gradient,
    the square root that is being divided, and the quotient that does not fit: 4P/8 = 3.138 GiB each.
    """
    stage = deepspeed(
        **LLAMA_7B,
        zero="2",
        gpus="8",
        gpu="v100-32gb",
        seq="512",
        recompute="full",
        optimizer_implementation="for-loop",
    )
    p = 6_738_415_616
    share = 4 * p // 8
    assert share / GIB == pytest.approx(3.14, abs=0.005)
    assert stage.peak.phase == "step"
    assert stage.allocated is not None
    assert stage.of(Category.PARAMETERS) == 2 * p
    assert stage.of(Category.MAIN_PARAMETERS) == stage.of(Category.GRADIENTS) == share
    assert stage.of(Category.OPTIMIZER_STATES) == stage.of(Category.TEMPORARIES) == 2 * share
    assert (stage.allocated - share) / GIB == pytest.approx(28.28, abs=0.03)
    documented = zero_documented.zero2(p, 8).device
    assert documented / GIB == pytest.approx(26.67, abs=0.01), "its formula has neither the root nor the quotient"


def test_llada_8b_asks_for_its_main_parameters() -> None:
    """ZHZisZZ/dllm#9: LLaDA-8B (8,015,581,184 parameters) under ZeRO-2 on two A100s with 40 GB: "Tried to allocate
    14.9 GiB" while the optimizer is built. That is one rank's fp32 copy, and with the 16-bit parameters beside it
    and two such states to come, no batch size helps; the optimizer on the host does."""
    sizes = {"ffn": "12288", "vocab": "126464", "kv_heads": "32"}
    flags = {"model": "llama-3-8b", **sizes, "zero": "2", "gpus": "2", "gpu": "a100-40gb", "seq": "512"}
    stage = deepspeed(**flags)
    assert stage.parameters == 8_015_581_184
    assert stage.of(Category.MAIN_PARAMETERS) == 4 * stage.parameters // 2
    assert stage.of(Category.MAIN_PARAMETERS) / GIB == pytest.approx(14.93, abs=0.005)
    assert stage.static > 40 * GIB
    offloaded = deepspeed(**flags, offload_optimizer="cpu", recompute="full")
    assert offloaded.of(Category.MAIN_PARAMETERS) == 0
    assert offloaded.headline < 40 * GIB


def test_llama_7b_offloaded_needs_more_than_half_a_gigabyte() -> None:
    """deepspeedai/DeepSpeed#4527: ZeRO-3 with both offloads, estimated 0.49 GB, used 14,678 MiB after ``initialize``
    and 19,890 to 21,272 MiB in training. The estimate is 4 bytes for each element of the largest layer, which is
    all that its formula has on the device.

    Live parameters alone come to 10⁹ elements and what one module adds; two buckets of 5·10⁸ elements are in use;
    the rest are activations, which no formula of DeepSpeed has."""
    assert zero_documented.zero3(
        6_805_000_000, 131_072_000, 4, offload=True, offload_parameters=True
    ).device / GIB == pytest.approx(0.49, abs=0.005)
    stage = deepspeed(**LLAMA_7B, **BOTH_OFFLOADED, gpus="4", gpu="a100-80gb", seq="1024")
    known = stage.of(Category.GATHERED_PARAMETERS) + stage.of(Category.COMMUNICATION_BUFFERS)
    assert stage.of(Category.GATHERED_PARAMETERS) >= 2 * 10**9
    assert known > 2.5 * GIB
    assert stage.of(Category.ACTIVATIONS) > 4 * GIB
    assert stage.host > 100 * GIB


def test_gpt_j_offloaded_is_the_same_on_two_and_four() -> None:
    """deepspeedai/DeepSpeed#4093: GPT-J 6B under ZeRO-3, estimated 0.77 GB, used about 13 GB, and as much on four
    GPUs as on two. With parameters and optimizer on the host there is next to nothing on the device that more ranks
    would share: gathered parameters, buckets and activations are a rank's own."""
    two, four = (
        deepspeed(model="gpt-j-6b", **BOTH_OFFLOADED, gpus=gpus, gpu="v100-32gb", seq="512", dtype="fp16")
        for gpus in ("2", "4")
    )
    assert two.headline > 10 * 0.77 * GIB
    assert 0 <= two.headline - four.headline < 0.1 * two.headline
    shared_by_nobody = (Category.ACTIVATIONS, Category.GATHERED_PARAMETERS, Category.COMMUNICATION_BUFFERS)
    for category in shared_by_nobody:
        assert two.of(category) == four.of(category)


def knobs(bucket: float, overlap: str) -> int:
    """Reserved bytes of ZeRO-2 on eight GPUs; the report's own model is a vision transformer."""
    stage = deepspeed(
        model="gpt2-xl", zero="2", gpus="8", mbs="4", seq="256", dtype="fp16", attention="eager",
        reduce_bucket_size=f"{bucket:.0f}", overlap_comm=overlap,
    )  # fmt: skip
    assert stage.reserved is not None
    return stage.reserved


def test_knobs_of_buckets() -> None:
    """deepspeedai/DeepSpeed#1302: ZeRO-2 needs more than ZeRO-1. Measured in MiB: 21,152 with two buckets of 5·10⁸
    elements, 20,198 with one (``overlap_comm`` off). A bucket in fp16 is 10⁹ bytes: 953.7 MiB, the difference."""
    assert knobs(5e8, "true") - knobs(5e8, "false") == pytest.approx((21_152 - 20_198) * 2**20, abs=2**21)
    sizes = [knobs(bucket, "true") for bucket in (5e8, 1e8, 1e7)]
    assert sizes == sorted(sizes, reverse=True)


def test_stage_2_needs_more_than_stage_1_where_gradients_are_few() -> None:
    """deepspeedai/DeepSpeedExamples#123: BERT-large, micro-batch 32 on four GPUs: 8,900 MB under ZeRO-1, 9,600 under
    ZeRO-2. 335 million parameters make 0.6 GiB of 16-bit gradients, and the bucket that replaces them has 0.93."""
    flags = {"model": "bert-large", "gpus": "4", "mbs": "32", "seq": "128", "dtype": "fp16", "attention": "eager"}
    one, two = (deepspeed(**flags, zero=zero, overlap_comm="false") for zero in ("1", "2"))
    assert one.reserved is not None
    assert two.reserved is not None
    assert two.reserved - one.reserved == pytest.approx((9_600 - 8_900) * 10**6, rel=0.1)
    assert two.of(Category.COMMUNICATION_BUFFERS) == 10**9


def test_pythia_fits_at_stage_1_and_not_at_stage_2() -> None:
    """deepspeedai/DeepSpeedExamples#336: Pythia 2.8B with sequences of 1,280 tokens on four A10Gs trains under
    ZeRO-1 and not under ZeRO-2, whose bucket of 5·10⁸ elements is taken when backward begins, with all
    activations still there."""
    pythia = {"model": "gpt-neox-20b", "layers": "32", "hidden": "2560", "heads": "32", "head_dim": "80"}
    sizes = {"ffn": "10240", "vocab": "50304", "kv_heads": "32", "seq": "1280", "gpus": "4", "gpu": "a10g"}
    one, two = (deepspeed(**pythia, **sizes, dtype="fp16", attention="eager", zero=zero) for zero in ("1", "2"))
    assert one.parameters == 2_775_208_960
    assert one.reserved is not None
    assert two.reserved is not None
    assert two.reserved - one.reserved == pytest.approx(10**9, rel=0.01)


def test_opt_66b_needs_stage_3() -> None:
    """deepspeedai/DeepSpeed#2131: OPT-66B under ZeRO-2 on 16 GPUs with 80 GB: 16-bit parameters alone, which stage 2
    does not shard, are 122.93 GiB. Stage 3 with the states on the device needs 62 GiB between steps."""
    opt = {"model": "opt-30b", "layers": "64", "hidden": "9216", "heads": "72", "head_dim": "128", "ffn": "36864"}
    flags = {**opt, "kv_heads": "72", "gpus": "16", "gpus_per_node": "16", "seq": "2048", "dtype": "fp16"}
    two, three = (deepspeed(**flags, attention="eager", recompute="full", zero=zero) for zero in ("2", "3"))
    documented = zero_documented.zero2(66_000_000_000, 16, offload=True)
    assert documented.device / GIB == pytest.approx(122.93, abs=0.01)
    assert two.of(Category.PARAMETERS) / GIB == pytest.approx(122.4, abs=0.1)
    assert three.static < 80 * GIB < two.static
