"""Optimizers and their fields: what is filled in, and what is refused in one line."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category


def plan(**flags: object) -> Plan:
    merged = {"model": "gpt2", "layers": "2", "seq": "64"} | {k.replace("_", "-"): str(v) for k, v in flags.items()}
    return resolve(read_plan(None, merged).plan)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("sgd", "foreach"),
        ("adamw", "foreach"),
        ("adafactor", "transformers"),
        ("lion", "bitsandbytes"),
        ("lion8bit", None),
        ("adam8bit", None),
        ("muon", "foreach"),
    ],
)
def test_each_optimizer_has_a_default_implementation(name: str, implementation: str | None) -> None:
    assert plan(optimizer=name).optimizer.implementation == implementation


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"optimizer": "adafactor", "optimizer_implementation": "fused"}, "must be transformers, for-loop or foreach"),
        ({"optimizer": "lion", "optimizer_implementation": "foreach"}, "must be bitsandbytes for lion"),
        ({"optimizer": "lion8bit", "optimizer_implementation": "bitsandbytes"}, "lion8bit has one implementation"),
        ({"optimizer": "muon", "optimizer_implementation": "bitsandbytes"}, "must be foreach, for-loop or fused"),
        ({"optimizer": "adamw", "paged_optimizer": "true"}, "adamw is not bitsandbytes'"),
        ({"optimizer": "muon", "paged_optimizer": "true"}, "must be false: muon is not bitsandbytes'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "only SGD has momentum"),
        ({"optimizer": "lion", "optimizer_block_size": 256}, "lion has no 8-bit states"),
        ({"optimizer": "lion", "embeddings_32bit": "false"}, "unlike adam8bit and lion8bit"),
        ({"framework": "megatron-deepspeed", "optimizer": "adafactor"}, "must be one of sgd, adam, adamw, adam8bit"),
        ({"framework": "megatron-deepspeed", "optimizer": "adam8bit", "paged_optimizer": "true"}, "must be false with"),
        (
            {"framework": "fsdp", "optimizer": "adam8bit"},
            "take no DTensor (the first step ends in 'got mixed torch.Tensor and DTensor'); FSDP1 runs them",
        ),
        ({"framework": "fsdp", "optimizer": "paged_adamw_8bit"}, "optimizer.name = adam8bit (paged_adamw_8bit): must"),
        ({"framework": "fsdp", "optimizer": "adafactor"}, "Adafactor both fail on DTensor shards"),
        (
            {"framework": "fsdp", "optimizer": "muon"},
            "must be one of sgd, adam, adamw, ao_adamw_8bit, ao_adamw_4bit with framework fsdp: Muon",
        ),
        (
            {"framework": "fsdp", "fsdp_version": "1", "optimizer": "muon"},
            "must be one of sgd, adam, adamw, adam8bit, lion, lion8bit with framework fsdp: Muon",
        ),
        ({"framework": "fsdp", "optimizer": "sgd", "optimizer_implementation": "fused"}, "fused SGD takes no DTensor"),
        (
            {"framework": "megatron", "optimizer": "lion"},
            "must be one of sgd, adam, adamw, muon with framework megatron",
        ),
        ({"framework": "megatron", "optimizer": "sgd", "momentum": 0.5}, "must be left out with framework megatron"),
        ({"framework": "megatron", "weight_decay": 0.5}, "must be left out with framework megatron"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(flags: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(**flags)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pages_are_on_the_host_and_in_no_device_reading() -> None:
    flags = {"optimizer": "adam8bit", "optimizer_block_size": 256, "gpu": "a100-80gb"}
    kept, paged = estimate(plan(**flags)), estimate(plan(**flags, paged_optimizer="true"))
    states = Category.OPTIMIZER_STATES
    moved = kept.stages[0].of(states) - paged.stages[0].of(states)
    assert moved > 0
    assert paged.stages[0].host == pytest.approx(moved, abs=512 * 64)
    assert kept.stages[0].host == 0
    four = estimate(plan(**flags, paged_optimizer="true", framework="ddp", gpus=4))
    assert four.stages[0].host == 4 * paged.stages[0].host
    assert [notice.code for notice in paged.warnings if "managed" in notice.code] == ["states-in-managed-memory"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_pages_of_flat_shares_are_each_ranks_own(zero: int) -> None:
    """Scales and maps stay on the device: an eighth of a byte for each byte that moved, and 2 KiB."""
    flags = {"optimizer": "adam8bit", "framework": "deepspeed", "zero": zero, "gpus": 4}
    kept, paged = estimate(plan(**flags)).stages[0], estimate(plan(**flags, paged_optimizer="true")).stages[0]
    states = Category.OPTIMIZER_STATES
    moved = kept.of(states) - paged.of(states)
    assert paged.host == pytest.approx(4 * moved, abs=4 * 512 * 8)
    assert paged.of(states) == pytest.approx(moved / 64, rel=0.01)


@pytest.mark.parametrize("name", ["sgd", "adafactor", "lion", "lion8bit", "muon"])
@pytest.mark.parametrize("framework", ["single", "ddp", "device-map"])
def test_every_optimizer_estimates_everywhere(framework: str, name: str) -> None:
    gpus = 1 if framework == "single" else 2
    result = estimate(
        plan(optimizer=name, framework=framework, gpus=gpus, gpu="a100-80gb", momentum=0.9 * (name == "sgd"))
    )
    for stage in result.stages:
        assert stage.allocated is not None
        assert stage.requested <= stage.allocated
        assert stage.of(Category.OPTIMIZER_STATES) > 0
