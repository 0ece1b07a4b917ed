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
}
"""The module of each optimizer's object; loaded when a plan names it."""


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
