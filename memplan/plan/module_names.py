"""Maps of modules to devices, as Accelerate takes them, read as maps of devices to layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..families import families
from ..families.base import ModuleNames
from .errors import Node, PlanError

WITHOUT_MEMORY = frozenset({"transformer.drop", "gpt_neox.emb_dropout"})
"""Dropouts, which maps of ``infer_auto_device_map`` also name."""

_LAYER = re.compile(r"(.+)\.([0-9]{1,6})")
_DEVICE = re.compile(r"(?:cuda:)?([0-9]{1,6})")


def is_by_module(written: Node) -> bool:
    """``written`` is a map of modules to devices, as Accelerate takes it, and not of devices to layers."""
    return any(not name.strip().isdecimal() for name in written.mapping)


def by_device(written: Node) -> Node:
    """The layers of every device in a map of modules to devices."""
    known, placed = modules(), dict[int, list[Node]]()
    devices = {name: _device(name, node) for name, node in written.mapping.items()}
    containers = {names.layers for names in known.values()}
    first, last = _ends(known)
    for name, device in devices.items():
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[1] in containers:
            placed.setdefault(device, []).append(Node(int(layer[2]), written.mapping[name].origin))
        elif name not in first | last | WITHOUT_MEMORY:
            raise written.mapping[name].lacks(
                f"device_map.{name}", "cannot be placed by itself; place embedding, layers, final norm and head"
            )
    _check_ends(written, devices, placed, first, last)
    return Node(
        {str(device): Node(placed[device], placed[device][0].origin) for device in sorted(placed)}, written.origin
    )


def modules() -> dict[str, ModuleNames]:
    """By family; Megatron's GPT runs as GPT-2 there."""
    return {one.name: one.modules for one in families() if one.modules is not None}


def _ends(known: Mapping[str, ModuleNames]) -> tuple[frozenset[str], frozenset[str]]:
    """Modules that the estimate takes to be on the first device (``embed_out`` is GPT-NeoX's head before 5.0), and on
    the last (transformers 4's ``parallelize``)."""
    first = frozenset(name for names in known.values() for name in (*names.embedding, *names.head)) | {"embed_out"}
    return first, frozenset(name for names in known.values() for name in names.norm)


def _check_ends(
    written: Node,
    devices: Mapping[str, int],
    placed: Mapping[int, list[Node]],
    on_first: frozenset[str],
    on_last: frozenset[str],
) -> None:
    """Embedding and head are on the first device that has layers, the final norm is on the last."""
    if not placed:
        raise written.lacks("device_map", "places no layers")
    for names, wanted, which in ((on_first, min(placed), "first"), (on_last, max(placed), "last")):
        for name in names & devices.keys():
            if devices[name] != wanted:
                problem = f"must be {wanted}, the {which} device: other devices are not modelled"
                raise PlanError(f"device_map.{name}", devices[name], problem, origin=written.mapping[name].origin)


def _device(name: str, node: Node) -> int:
    if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value >= 0:
        return node.value
    match = _DEVICE.fullmatch(node.value) if isinstance(node.value, str) else None
    if match is None:
        raise node.wrong(f"device_map.{name}", "must be the number of a GPU: other places are not modelled")
    return int(match[1])
