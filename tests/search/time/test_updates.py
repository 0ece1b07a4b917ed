"""What FSDP's units cost, against bytes counted by hand: Llama 3 8B on one node of eight H100.

NCCL's rings reach 370 GB/s there (nccl-tests, issue 212). Seven eighths of a tensor pass each link, and a rank's own
eighth takes 0.45 of such a step. PyTorch's kernels reach 0.88 of the memory's 3,350 GB/s. Parameters are gathered in
bf16 and copied out of the buffer (2 + 2 bytes); gradients are copied into another one (2 + 4 bytes), which is reduced
in fp32."""

from __future__ import annotations

import pytest

from memplan.search.time import rates_of, step_time
from memplan.search.time.collectives import collective, group
from memplan.search.time.updates import bucketed

from .plans import plan

LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
VOCABULARY = 128_256 * 4096
GATHERED = 2 * 7.45 / 8 / 370e9
REDUCED = 4 * 7.45 / 8 / 370e9
COPIED_OUT, COPIED_IN = 4 / (0.88 * 3350e9), 6 / (0.88 * 3350e9)
JOB = {"model": "llama-3-8b", "framework": "fsdp", "gpu": "h100-80gb", "gpus": 8, "dtype": "bf16", "seq": 4096}


def exposed(**flags: object) -> float:
    return step_time(plan(**{**JOB, **flags})).data_parallel


def test_nothing_hides_the_only_layer() -> None:
    """Neither its gather, before which there is the root's, nor its scatter, behind which is the root's."""
    elements = LAYER + 2 * VOCABULARY + 4096
    spent = elements * (GATHERED + REDUCED + COPIED_OUT + COPIED_IN)
    assert exposed(layers=1, reshard_after_forward="false") == pytest.approx(spent, rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_root_that_is_resharded_is_gathered_again(microbatches: int) -> None:
    flags = {"layers": 4, "mbs": 1, "gbs": 8 * microbatches, "versions": "accelerate=1.13"}
    more = exposed(**flags, reshard_root="true") - exposed(**flags)
    assert more == pytest.approx(microbatches * (2 * VOCABULARY + 4096) * (GATHERED + COPIED_OUT), rel=0.02)


def test_torchtitan_gathers_again_its_norm_and_head_alone() -> None:
    flags = {"layers": 4, "fsdp_code": "torchtitan", "fsdp_newest": "true"}
    more = exposed(**flags, reshard_root="true") - exposed(**flags)
    assert more == pytest.approx((VOCABULARY + 4096) * (GATHERED + COPIED_OUT), rel=0.02)


def test_a_head_apart_is_gathered_beside_the_last_layer() -> None:
    flags = {"layers": 8, "mbs": 2, "gbs": 16, "fsdp_code": "torchtitan", "reshard_after_forward": "false"}
    less = exposed(**flags) - exposed(**flags, fsdp_newest="true")
    assert less == pytest.approx((VOCABULARY + 4096) * (GATHERED + REDUCED) * (1 - 0.41), rel=0.1)


def test_without_gradients_to_reduce_backward_gathers_all_the_same() -> None:
    """Under ``no_sync`` four micro-batches more gather everything in forward and the layer in backward, whose flat
    parameters need no copies."""
    flags = {"layers": 1, "mbs": 1, "seq": 128, "fsdp_version": 1, "fsdp_backward_prefetch": "none"}
    four, eight = (exposed(**flags, gradient_sync="false", gbs=8 * n) for n in (4, 8))
    assert eight - four == pytest.approx(4 * (2 * LAYER + 2 * VOCABULARY + 4096) * GATHERED, rel=0.02)


def test_each_bucket_has_its_latency() -> None:
    """A billion gradients in 40 buckets take 40 all-reduces of 25 million; without buckets one."""
    rates, across = rates_of(plan(**JOB)), group(8, 1, 8)
    for bucket, count in ((25e6, 40), (float("inf"), 1)):
        spent = bucketed(rates, "all-reduce", 1e9, 4, across, bucket)
        assert spent == pytest.approx(count * collective(rates, "all-reduce", 4e9 / count, across))


def test_smaller_buckets_of_ddp_cost_more_up_to_one_for_each_gradient() -> None:
    """Between 16 nodes a short all-reduce is mostly latency. A layer of GPT-2 XL has 12 tensors of 31 million elements,
    which no smaller bucket cuts."""
    flags = {"model": "gpt2-xl", "framework": "ddp", "gpu": "h100-80gb", "gpus": 128, "dtype": "bf16", "seq": 64}
    usual, small, least = (step_time(plan(**flags, bucket_cap_mb=size)).data_parallel for size in (25, 0.5, 0.001))
    assert small > 1.3 * usual
    assert least == pytest.approx(small, rel=0.5)


def test_fsdp1_gathers_what_autocast_would_cast() -> None:
    """Mistral 7B on 4 A100 with Trainer's ``bf16``, 8 sequences of 4,096 tokens each, recomputed with reentrance and
    with Unsloth's kernels: 9.48 s (foundation-model-stack's runs); a second more if hidden states were in fp32."""
    job = {"model": "mistral-7b", "vocab": 32_001, "gpu": "a100-80gb", "gpus": 4, "framework": "fsdp", "torch": "2.4.1"}
    batch = {"mbs": 8, "gbs": 32, "seq": 4096, "recompute": "full", "attention": "flash_attention_2", "dtype": "bf16"}
    run = {"fsdp_version": 1, "autocast": "true", "use_reentrant": "true", "kernels": "fms"}
    assert step_time(plan(**job, **batch, **run)).total == pytest.approx(9.48, rel=0.04)


def test_bitsandbytes_takes_longer_to_dequantise_before_its_table() -> None:
    """Mistral 7B on one A100, four sequences: three times 6.98 billion weights, 1.7 times as long before 0.48."""
    job = {"model": "mistral-7b", "gpu": "a100-80gb", "framework": "single", "dtype": "bf16", "recompute": "full"}
    tuned = {"quantisation": "nf4", "lora_rank": 16, "seq": 4096, "mbs": 4, "attention": "flash_attention_2"}
    older, newer = (
        step_time(plan(**job, **tuned, versions=f"bitsandbytes={one},transformers=4.48.1,peft=0.13.2")).total
        for one in ("0.43.3", "0.48")
    )
    rows = 3 * 6.98e9 * (1850 - 1100) * 1e-15 * (67 / 19.5 / 2)  # H200 and A100: lanes and clock
    assert older - newer == pytest.approx(rows, rel=0.15)
