"""The frameworks, each in a room of its own. To add one is to add its folder and a line in ``ROOMS``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from .base import Framework, Supports

ROOMS = {
    "single": ".plain.single",
    "ddp": ".ddp.framework",
    "device-map": ".plain.device_map",
    "megatron": ".megatron.framework",
    "megatron-deepspeed": ".megatron_deepspeed.framework",
    "deepspeed": ".deepspeed.framework",
    "fsdp": ".fsdp.framework",
}
"""The module of each framework's object, ``FRAMEWORK``; loaded when a plan names it."""


OF_SIZE_ALONE = ("hardware.gpus", "layout.dp")
"""Fields that any framework takes: those by which a plan means one only if that has a recipe of its model."""
SHARDING = "fsdp"
"""What a plan of several GPUs means that says no more of them."""
IMPLIED_BY: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("fsdp", (("fsdp",),)),
    ("ddp", (("ddp",),)),
    ("device-map", (("device_map",),)),
    ("megatron-deepspeed", (("layout.tp", "layout.pp"), ("layout.zero", "deepspeed"))),
    (
        "megatron",
        (
            (
                *("layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.etp", "layout.vpp"),
                *("experts", "megatron", "precision.fp8", "precision.fp4"),
            ),
        ),
    ),
    ("deepspeed", (("layout.zero", "deepspeed"),)),
    (SHARDING, (OF_SIZE_ALONE,)),
)
"""Which framework a plan means that names none: the first of which, of each group of fields or sections, one is given
(a size if it is more than one, a stage of ZeRO if it is not 0, a word whatever it is)."""
RECIPES = {"megatron": "megatron_core", "megatron-deepspeed": "megatron", "fsdp": "sharded"}
"""The attribute of a family that is not ``None`` where a framework has a recipe of its layers; ``covers`` in others."""
BY_ITSELF = "single"
"""What a plan means that says nothing of the kind."""
REPLICATING = "ddp"
"""What a plan of several GPUs means whose model ``SHARDING`` does not shard."""


STAND_FOR = {
    "fsdp1": {"framework": "fsdp", "fsdp-version": "1"},
    "torchtitan": {"framework": "fsdp", "fsdp-code": "torchtitan"},
    "megatronfsdp": {"framework": "megatron", "megatron-fsdp": "optim_grads_params"},
    **{
        f"{engine}zero{stage}": {"framework": "deepspeed", "zero": str(stage)}
        for stage in (1, 2, 3)
        for engine in ("", "deepspeed")
    },
}
"""Names of frameworks that say more than one flag, written plainly (``plan.spellings.plain``), as flags."""

HINTS = {
    **{
        name: f"that is {flags['framework']} with {' '.join(f'--{flag} {said}' for flag, said in [*flags.items()][1:])}"
        for name, flags in STAND_FOR.items()
    },
    "zero": "that is deepspeed with --zero 1, 2 or 3",
    "accelerate": "it launches others: fsdp, deepspeed or ddp",
    **dict.fromkeys(
        ("huggingface", "hf", "transformers", "trainer", "trl", "axolotl"),
        "it runs on others: single, ddp, fsdp or deepspeed, with --trainer transformers for its Trainer",
    ),
    **dict.fromkeys(("nemo", "megatronbridge"), "its models run on megatron"),
    **dict.fromkeys(
        ("unsloth", "colossalai", "nanotron", "jax", "maxtext", "torchxla", "keras", "tensorflow", "vllm", "mlx"),
        "its own code is not modelled",
    ),
    "torchtune": "it runs on others: single or fsdp",
    **dict.fromkeys(("llamafactory", "peft"), "it runs on others, with --trainer transformers for the Trainer"),
    **dict.fromkeys(("pytorch", "torch"), "on one GPU that is single, on several ddp or fsdp"),
    **dict.fromkeys(
        ("composer", "llmfoundry", "lightning", "pytorchlightning"), "it runs on others: ddp, fsdp or deepspeed"
    ),
}
"""What other names mean here, written plainly (``plan.spellings.plain``)."""


@cache
def framework(name: str) -> Framework:
    """The object of the framework ``name``, one of ``ROOMS``."""
    found = import_module(ROOMS[name], __package__).FRAMEWORK
    assert isinstance(found, Framework)
    return found


def frameworks() -> Iterator[Framework]:
    """Every framework's object: for errors and documents, since it imports all of them."""
    return map(framework, ROOMS)


__all__ = [
    "BY_ITSELF",
    "HINTS",
    "IMPLIED_BY",
    "OF_SIZE_ALONE",
    "RECIPES",
    "REPLICATING",
    "ROOMS",
    "SHARDING",
    "STAND_FOR",
    "Framework",
    "Supports",
    "framework",
    "frameworks",
]
