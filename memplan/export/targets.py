"""The kinds of configuration that a plan can be written as, by the names of ``--to``."""

from __future__ import annotations

from importlib import import_module

from .exported import Target

NAMES = ("megatron", "megatron-deepspeed", "deepspeed", "torchtitan", "device-map")

OF_FRAMEWORK = {
    "megatron": "megatron",
    "megatron-deepspeed": "megatron-deepspeed",
    "deepspeed": "deepspeed",
    "fsdp": "torchtitan",
    "device-map": "device-map",
}
"""Where ``--to`` is left out, by the plan's framework; ``single`` and ``ddp`` are Python, and have none."""


def target(name: str) -> Target:
    """The target ``name``, one of ``NAMES``."""
    module = import_module(f".{name.replace('-', '_')}", __package__)
    found = module.TARGET
    assert isinstance(found, Target)
    return found
