"""What configurations say of ``torch.compile`` of a model: the Trainer's arguments and Accelerate's own.

transformers 5.23, ``training_args.py`` (``__post_init__``: a backend or a mode turns it on); accelerate 1.15,
``utils/dataclasses.py`` (``TorchDynamoPlugin``) and ``accelerator.py`` (``prepare_model``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..plan.errors import Node
from .rows import Building

OFF = ("NO", "NONE", "FALSE", "")
"""Backends that compile nothing."""
_ON = (True, "true", "True", "auto")


class Compiler(NamedTuple):
    """What turns the compiler on, and what has it compile regions, if anything does."""

    on: Node
    regions: Node | None

    def put(self, building: Building, *names: str) -> None:
        """What the settings ``names`` say of the plan."""
        building.put("compile", self.on, *names)
        building.put_said("compile_regions", self.regions)


def compiled(given: Mapping[str, Node], prefix: str) -> Compiler | None:
    """What turns the compiler on among ``given``, whose keys begin with ``prefix`` (``dynamo_``); nothing where nothing
    does. ``PlanError`` where it is another compiler than the one that is modelled: Inductor, in its default mode."""
    backend, mode = given.get(f"{prefix}backend"), given.get(f"{prefix}mode")
    if backend is None or str(backend.plain()).upper() in OFF:
        return None
    if str(backend.value).lower() != "inductor":
        raise backend.wrong(
            f"{prefix}backend",
            "must be inductor: what other backends keep is not modelled; without a compiler it must be left out",
        )
    if mode is not None and mode.value not in (None, "default"):
        raise mode.wrong(
            f"{prefix}mode",
            "must be default: CUDA graphs of compiled code, and kernels chosen by running them, are not modelled",
        )
    regional = given.get(f"{prefix}use_regional_compilation")
    regions = regional is not None and regional.value in _ON
    return Compiler(
        Node(True, backend.origin), Node(True, regional.origin) if regional is not None and regions else None
    )


def of_trainer(given: Mapping[str, Node]) -> Compiler | None:
    """The same among the Trainer's arguments: ``torch_compile``, or a backend or a mode that turns it on."""
    names = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    said = {name: given[name] for name in names if name in given and given[name].value is not None}
    on = next((node for name, node in said.items() if name != names[0] or node.value in _ON), None)
    if on is None:
        return None
    return compiled({names[1]: Node("inductor", on.origin), **said}, "torch_compile_")
