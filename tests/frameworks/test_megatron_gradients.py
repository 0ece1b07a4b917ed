"""Gradients that are summed, or accumulate, in fp32 beside buffers in 16 bits, by hand."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Options, Parameter
from memplan.tape.events import Hold, Tape
from memplan.tape.program import Kept, Program

from .test_megatron import plan, refusal

SUMS = {"ddp_reduce_scatter_with_fp32_accumulation": "true", "gradients": "bf16", "zero": 1, "dp": 4}


WITHOUT = {"ddp_reduce_scatter_with_fp32_accumulation": "false"}


def program(**flags: object) -> Program:
    return programs(plan(gpu="h100-80gb", **flags), Options())[0]


def kept(**flags: object) -> Kept:
    found = program(**flags).kept
    assert found is not None
    return found


def made(tape: Tape, name: str) -> list[int]:
    return [one.bytes for one in tape if isinstance(one, Hold) and one.name == name]


def test_every_rank_receives_a_bucket_and_sums_its_shard() -> None:
    """All gradients are one bucket: as many bytes as the buffer are received, and a quarter of its elements summed."""
    found = kept(**SUMS)
    (buffer,) = made(found.construction, "grad_data")
    assert made(found.step, "gradients_received") == [buffer]
    (summed,) = made(found.step, "gradients_summed")
    assert 0 <= summed - 4 * (buffer // 2 // 4) < 512
    assert found.step.excursion.peak >= buffer + summed
    assert found.step.excursion.net == kept(**SUMS | WITHOUT).step.excursion.net


@pytest.mark.parametrize("flags", [{"zero": 0}, {"gradients": "fp32"}, {"optimizer": "muon"}])
def test_nothing_is_received_where_gradients_are_all_reduced_or_in_fp32(flags: dict[str, object]) -> None:
    """Megatron-Core turns it off in fp32 (``validate_args``), and reduces as it does without it elsewhere."""
    assert kept(**SUMS | flags).step == kept(**SUMS | flags | WITHOUT).step


def test_a_bucket_arrives_beside_passes() -> None:
    """With several buckets the largest but the last is there while others are made; one that is all gradients arrives
    when backward is done."""
    cut = SUMS | {"overlap_grad_reduce": "true", "bucket_size": 1_000_000}
    given, without = (estimate(plan(gpu="h100-80gb", **one)).stages[0] for one in (cut, cut | {"gradients": "fp32"}))
    assert given.static < without.static
    order = program(**cut).order
    assert 2 * 1_000_000 <= order.received < 2 * 2_000_000  # type: ignore[attr-defined]
    assert program(**cut | {"bucket_size": 10**9}).order.received == 0  # type: ignore[attr-defined]
    whole = program(**cut).order.whole
    alone = program(**cut | WITHOUT).order.whole
    assert whole.peak - alone.peak == order.received  # type: ignore[attr-defined]
    assert whole.net == alone.net


def of_kind(parameters: list[Parameter], part: str) -> list[int]:
    return sorted(4 * one.elements for one in parameters if part in one.name)


def test_parameters_that_accumulate_in_fp32() -> None:
    """4 bytes an element of those that a pattern names, by the names of ``Float16Module``'s parameters."""
    for pattern, part in (("*linear_fc1.weight", "linear_fc1.weight"), ("module.decoder.*.linear_proj.weight", "proj")):
        whole = program(gradients="bf16", fp32_gradients_of=pattern)
        assert whole.kept is not None
        found = made(whole.kept.construction, "main_grad_in_fp32")
        assert sorted(found) == of_kind(whole.parameter_tensors(), part)
        assert len(found) == 8
    (embedding,) = made(kept(gradients="bf16", fp32_gradients_of="*word_embeddings*").construction, "main_grad_in_fp32")
    assert embedding == 4 * 1024 * 256
    every = program(gradients="bf16", fp32_gradients_of="all")
    assert every.kept is not None
    assert len(made(every.kept.construction, "main_grad_in_fp32")) == len(every.parameter_tensors())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"fp32_gradients_of": "all"}, "must be left out with gradients in fp32"),
        ({"fp32_gradients_of": "*layers.1.*", "gradients": "bf16"}, "must not tell layers apart"),
        ({**SUMS, "distributed_optimizer_instances": 2}, "several distributed_optimizer_instances"),
        ({**SUMS, "pp": 2, "vpp": 2, "overlap_grad_reduce": "true"}, "virtual stages"),
        ({**SUMS, "megatron_fsdp": "optim"}, "with Megatron-FSDP"),
    ],
)
def test_refused(flags: dict[str, object], said: str) -> None:
    assert said in refusal(gpu="h100-80gb", **flags)


def test_buffers_of_nccl_lie_in_pools_of_their_own() -> None:
    """What modules leave when their parameters move into the buffer serves no buffer of NCCL's."""
    flags = {"zero": 1, "dp": 2}
    holds = [one for one in kept(**flags, use_nccl_ub="true").construction if isinstance(one, Hold)]
    assert {(one.name, one.stream) for one in holds if one.stream} == {("param_data", 16), ("grad_data", 16)}
    given, without = (
        estimate(plan(gpu="h100-80gb", **flags, **more)).stages[0] for more in ({"use_nccl_ub": "true"}, {})
    )
    assert given.requested == without.requested
    assert given.reserved is not None
    assert without.reserved is not None
    assert given.reserved >= without.reserved
    segments = {"env": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "torch": "2.10"}
    assert "before PyTorch 2.11" in refusal(use_nccl_ub="true", gpu="h100-80gb", **segments)
