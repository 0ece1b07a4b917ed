"""Communicators that each framework declares, beside groups counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.frameworks import framework
from memplan.frameworks.base import Communicator
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve


def of(stage: int = 0, **flags: object) -> dict[str, Communicator]:
    plan = resolve(read_plan(None, {name.replace("_", "-"): str(value) for name, value in flags.items()}).plan)
    found = framework(plan.framework).communicators(plan, stage)
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "deepspeed", "megatron", "megatron-deepspeed"])
def test_one_gpu_has_none(name: str) -> None:
    assert of(model="gpt2", framework=name, gpus=1) == {}


def test_devices_of_one_process_have_none() -> None:
    assert of(model="gpt2", framework="device-map", gpus=4) == {}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_replicas_alone_are_the_default_group(name: str) -> None:
    (one,) = of(model="gpt2", framework=name, gpus=16).values()
    assert (one.ranks, one.block, one.on_node(8), one.reduces, one.gathers, one.certain) == (
        16,
        16,
        8,
        True,
        True,
        True,
    )


def test_zero_has_a_copy_of_the_default_group() -> None:
    found = of(model="gpt2", framework="deepspeed", zero=3, gpus=16)
    assert [(one.ranks, one.certain) for one in found.values()] == [(16, True), (16, False)]


def test_a_mesh_has_a_group_for_each_axis() -> None:
    """2 stages of 2 replicas of 4 shards of 4 tensor-parallel ranks, on nodes of 8."""
    sizes = {"gpus": 64, "tp": 4, "pp": 2, "gbs": 64, "fsdp_replicas": 2}
    found = of(model="llama-3-8b", framework="fsdp", fsdp_code="torchtitan", **sizes)
    shapes = {name: (one.ranks, one.on_node(8)) for name, one in found.items()}
    assert shapes == {
        "tensor parallel": (4, 4),
        "shards": (4, 2),
        "replicas": (2, 1),
        "data parallel": (8, 2),
        "pipeline": (2, 1),
        "all ranks": (64, 8),
    }
    assert found["pipeline"].peers == 1
    assert not found["all ranks"].certain


MEGATRON = {"model": "gpt2", "framework": "megatron", "gpus": 64, "tp": 2, "cp": 2, "pp": 4, "gbs": 64, "layers": 8}


def test_groups_of_megatron() -> None:
    """2 x 2 x 4 x 4 ranks; the first stage shares its embedding with the last, the others with nobody."""
    first, second = of(0, **MEGATRON, zero=1), of(1, **MEGATRON, zero=1)
    assert {name: (one.ranks, one.on_node(8)) for name, one in first.items()} == {
        "all ranks": (64, 8),
        "gradient statistics": (64, 8),
        "tensor parallel": (2, 2),
        "data parallel": (8, 4),
        "context parallel": (2, 2),
        "pipeline": (4, 1),
        "embeddings": (2, 1),
    }
    assert set(first) - set(second) == {"embeddings"}
    assert (first["pipeline"].peers, second["pipeline"].peers) == (1, 2)
    assert "model parallel" in of(0, **MEGATRON)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, {"context parallel": (8, False, 2)}),
        ({"cp_communication": "a2a"}, {"context parallel": (8, False, 7)}),
        ({"cp_communication": "all_gather"}, {"context parallel": (8, True, 0)}),
        (
            {"cp_communication": "a2a+p2p", "cp_inner": 2},
            {"context parallel, heads": (2, False, 1), "context parallel, ring": (4, False, 2)},
        ),
    ],
)
def test_ways_of_context_parallelism(flags: dict[str, Any], found: dict[str, tuple[int, bool, int]]) -> None:
    """Ranks, whether they gather, and with how many each exchanges: a ring has two neighbours, heads go to all."""
    groups = of(0, model="llama-3-8b", framework="megatron", gpus=16, cp=8, gbs=16, seq=8192, **flags)
    assert found == {
        name: (one.ranks, one.gathers, one.peers) for name, one in groups.items() if name.startswith("context")
    }


def test_lone_sends_of_interleaved_stages_have_communicators_of_two() -> None:
    found = of(0, **MEGATRON, vpp=2)
    assert "pipeline" not in found
    assert (found["neighbouring stages"].ranks, found["neighbouring stages"].times) == (2, 2)
    assert of(0, **MEGATRON, vpp=2, overlap_p2p="false")["pipeline"].peers == 2


def test_experts_are_sent_to_every_peer() -> None:
    flags = {"model": "mixtral-8x7b", "framework": "megatron", "gpus": 16, "ep": 8, "gbs": 16, "zero": 1}
    found = of(0, **flags)
    assert (found["experts"].peers, found["experts"].on_node(8)) == (7, 8)
    assert found["replicas of experts"].ranks == 2
    gathered = of(0, **flags, moe_dispatcher="allgather")
    assert "experts" not in gathered
    assert gathered["experts and their tensors"].gathers


def test_groups_of_bigsciences_fork() -> None:
    flags = {"model": "bigscience-104b", "framework": "megatron-deepspeed", "gpus": 96, "tp": 8, "pp": 3, "gbs": 96}
    found = of(1, **flags, zero=1)
    assert {name: (one.ranks, one.on_node(8)) for name, one in found.items()} == {
        "all ranks": (96, 8),
        "tensor parallel": (8, 8),
        "model parallel": (24, 8),
        "data parallel": (4, 1),
        "data parallel of mpu": (4, 1),
        "neighbouring stages": (2, 1),
        "pipeline": (3, 1),
    }
    assert found["neighbouring stages"].times == 2


def test_channels_that_a_group_is_configured_with() -> None:
    """``min_ctas`` and ``max_ctas`` by the names of groups; with several optimizers' instances replicas have two."""
    sizes = {"model": "llama-3-8b", "framework": "megatron", "gpus": 16, "tp": 2, "zero": 1}
    found = of(**sizes, nccl_blocks="tp=-8,dp_cp=2-16,intra_dp_cp=1-4")
    assert {name: one.blocks for name, one in found.items() if any(one.blocks)} == {
        "tensor parallel": (0, 8),
        "data parallel": (2, 16),
    }
    halves = of(**sizes, nccl_blocks="tp=-8,dp_cp=2-16,intra_dp_cp=1-4", distributed_optimizer_instances=2)
    assert halves["data parallel"].blocks == (1, 4)
    assert not any(any(one.blocks) for one in of(**sizes).values())


def test_switches_reduce_for_data_parallel_ranks() -> None:
    sizes = {"model": "llama-3-8b", "framework": "megatron", "gpus": 16, "tp": 2, "zero": 1}
    found = of(**sizes, use_sharp="true")
    assert [name for name, one in found.items() if one.in_network] == ["data parallel"]
