"""The optimizers. To add one is to add a file with its object in ``OPTIMIZERS``, and its line in ``ROOMS``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Algorithm

ROOMS = {
    "sgd": ".sgd",
    "adam": ".adam",
    "adamw": ".adam",
    "adam8bit": ".adam",
    "adafactor": ".adafactor",
    "lion": ".lion",
    "lion8bit": ".lion",
    "muon": ".muon",
    "ao_adamw_8bit": ".torchao",
    "ao_adamw_4bit": ".torchao",
}
"""The module of each optimizer's object; loaded when a plan names it."""


NOT_MODELLED: Mapping[str, str] = {
    "galore": "gradients are projected to a low rank, layer by layer in backward at times",
    "apollo": "gradients are projected to a low rank",
    "lomo": "parameters are updated in backward, and no gradient stays",
    "adalomo": "parameters are updated in backward, and no gradient stays",
    "grokadamw": "it keeps a third state",
    "schedulefree": "it keeps other states than Adam",
    "ademamix": "it keeps a third state",
    "aoadamwfp8": "torchao's states in fp8 are not modelled; ao_adamw_8bit has as many bits",
    "adamwfp8": "torchao's states in fp8 are not modelled; ao_adamw_8bit has as many bits",
    "stableadamw": "it keeps other numbers than Adam",
    "adagrad": "its state is not modelled",
    "rmsprop": "its states are not modelled",
    "sophia": "its states are not modelled",
    "shampoo": "its preconditioners are not modelled",
    "soap": "its preconditioners are not modelled",
    "came": "its factored states are not modelled",
}
"""What other optimizers do that no object here does, by the beginning of their names, written plainly."""


ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("cpuadam", "deepspeedcpuadam"), "is AdamW on the host: --optimizer adamw --offload-optimizer cpu in deepspeed"
    ),
    **dict.fromkeys(
        ("none", "no", "inference"),
        "is not modelled: training without an optimizer, or inference; sgd without momentum keeps no state",
    ),
    **dict.fromkeys(("momentum", "sgd+momentum", "sgdmomentum", "sgdwithmomentum"), "is sgd with --momentum 0.9"),
    **dict.fromkeys(
        ("zerooptimizer", "zeroredundancyoptimizer"), "is ZeRO-1 around an optimizer: --framework ddp --zero 1"
    ),
    **dict.fromkeys(
        ("distributedoptimizer", "distopt", "distadam"), "is Megatron's ZeRO-1: --framework megatron --zero 1"
    ),
    "distmuon": "is Muon whose whole parameters are dealt out to ranks: --framework megatron --optimizer muon --zero 1",
}
"""What says more than an optimizer, written plainly."""


def not_modelled(name: str) -> str:
    """Why the optimizer called ``name``, written plainly, is refused; empty where nobody knows it."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    found = next((why for begin, why in NOT_MODELLED.items() if name.startswith(begin)), "")
    return f"is not modelled: {found}; {', '.join(ROOMS)} are" if found else ""


@cache
def algorithm(name: str) -> Algorithm:
    """The object of the optimizer ``name``, one of ``ROOMS``."""
    found: Algorithm = import_module(ROOMS[name], __package__).OPTIMIZERS[name]
    return found


def algorithms() -> Iterator[Algorithm]:
    """Every optimizer's object."""
    return map(algorithm, ROOMS)


def trainer_names() -> Mapping[str, Mapping[str, object]]:
    """Values of the Trainer's ``optim``, and the fields of a plan's ``optimizer`` that each stands for; bitsandbytes'
    block size is that of 0.43 and later."""
    return {name: fields for one in algorithms() for name, fields in one.trainer.items()}


def class_names() -> Mapping[str, Mapping[str, object]]:
    """Classes of other libraries whose names are not the optimizers', and the fields that each stands for."""
    return {name: fields for one in algorithms() for name, fields in one.classes.items()}
