"""Which plans torch's own code runs, as what, and which ranks stand for the others."""

from __future__ import annotations

import pytest

from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.validate.native import native


def plan(words: str) -> Plan:
    return read_plan(None, dict(word.split("=") for word in words.split())).plan


@pytest.mark.parametrize(
    ("words", "ranks", "distinct"),
    [
        ("model=gpt2 framework=single", 1, (0,)),
        ("model=gpt2 framework=ddp gpus=4", 4, (0,)),
        ("model=llama-3-8b framework=fsdp gpus=8", 8, (0,)),
        ("model=llama-3-8b framework=fsdp fsdp-code=torchtitan tp=2 pp=2 gpus=8", 8, (0, 4)),
        ("model=llama-3-8b framework=fsdp fsdp-code=torchtitan pp=4 gpus=8", 8, (0, 2, 4, 6)),
    ],
)
def test_plans_that_run_as_they_are(words: str, ranks: int, distinct: tuple[int, ...]) -> None:
    found = native(plan(words))
    assert found.runs == found.given
    assert found.differs == ""
    assert (found.ranks, found.distinct()) == (ranks, distinct)


def test_the_rank_that_has_most_of_zero_stands_for_all() -> None:
    """GPT-2's table of words has 38.6 of 124 million parameters: who steps it has fewer others, and there are ten."""
    found = native(plan("model=gpt2 framework=ddp zero=1 gpus=10"))
    (rank,) = found.distinct()
    job = found.job(rank)
    assert job.ddp is not None
    assert job.ddp.rank == rank


@pytest.mark.parametrize(
    ("words", "framework", "sizes", "says"),
    [
        ("framework=deepspeed zero=0 gpus=4", "ddp", (1, 1, 4, 0), "DistributedDataParallel"),
        ("framework=deepspeed zero=1 gpus=4", "ddp", (1, 1, 4, 1), "ZeroRedundancyOptimizer"),
        ("framework=deepspeed zero=3 gpus=4", "fsdp", (1, 1, 4, 0), "fully_shard"),
        ("framework=megatron tp=2 pp=2 gpus=8", "fsdp", (2, 2, 2, 0), "torchtitan's Llama with tp 2 and pp 2"),
        ("framework=deepspeed zero=3 gpus=4 optimizer=adam8bit", "fsdp", (1, 1, 4, 0), "adamw in place of adam8bit"),
        ("framework=megatron gpus=4", "ddp", (1, 1, 4, 0), "with gradients accumulated as torch does"),
        ("framework=megatron gpus=4 recompute=selective", "ddp", (1, 1, 4, 0), "without selective recompute"),
        ("framework=deepspeed zero=1 gpus=4 offload-optimizer=cpu", "ddp", (1, 1, 4, 1), "without offload"),
        ("framework=megatron pp=2 gpus=4 first-layers=10", "fsdp", (1, 2, 2, 0), "in stages as torchtitan cuts them"),
    ],
)
def test_plans_of_other_frameworks(words: str, framework: str, sizes: tuple[int, ...], says: str) -> None:
    """They run in torch's shape of them, which is said."""
    found = native(plan(f"model=llama-3-8b seq=2048 {words}"))
    layout = found.runs.layout
    assert found.runs.framework == framework
    assert (layout.tp, layout.pp, layout.dp, layout.zero) == sizes
    assert says in found.differs
    assert f"says nothing of what memplan estimates for {found.given.framework}" in found.differs


def test_zero_2_keeps_parameters_whole() -> None:
    assert not native(
        plan("model=llama-3-8b seq=512 framework=deepspeed zero=2 gpus=4")
    ).runs.fsdp.reshard_after_forward


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("model=gpt2 framework=device-map gpus=2", "framework"),
        ("model=gpt2 framework=megatron tp=2 gpus=2", "model.family"),
        ("model=llama-3-8b framework=megatron cp=2 gpus=2", "layout.cp"),
        ("model=llama-3-8b framework=fsdp gpus=2 optimizer=adam8bit", "optimizer.name"),
        ("model=gpt2 framework=ddp zero=1 gpus=2 optimizer=adam8bit", "optimizer.name"),
        ("model=llama-3-8b framework=single optimizer=lion", "optimizer.name"),
        ("model=llama-3-8b framework=single optimizer=adam8bit paged-optimizer=true", "optimizer.paged"),
        ("model=llama-3-8b framework=single trainer=transformers", "trainer.loop"),
        ("model=llama-3-8b framework=single loss=liger", "loss.kind"),
        ("model=gpt2 framework=single optimizer=adam8bit optimizer-block-size=2048", "optimizer.block_size"),
    ],
)
def test_what_it_has_nothing_for_is_refused(words: str, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        native(plan(words))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
