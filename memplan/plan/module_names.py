"""Modules of transformers' models that a device map places, and maps by their names as maps of layers.

Names are those of ``transformers/models/*/modeling_*.py`` 5.23: of the class with a language-modelling head, and of
every submodule that has parameters or buffers of its own (``accelerate/utils/modeling.py``, ``check_device_map``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .errors import ABSENT, PlanError
from .node import Node


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """What a model of one family is made of."""

    embedding: tuple[str, ...]
    """With rotary tables, which are made once for all layers."""
    layers: str
    norm: tuple[str, ...]
    head: tuple[str, ...]


_LLAMA = ModuleNames(("model.embed_tokens", "model.rotary_emb"), "model.layers", ("model.norm",), ("lm_head",))
_GPT2 = ModuleNames(("transformer.wte", "transformer.wpe"), "transformer.h", ("transformer.ln_f",), ("lm_head",))

MODULES: Mapping[str, ModuleNames] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "gpt": _GPT2,
        "bert": ModuleNames(("bert.embeddings",), "bert.encoder.layer", (), ("cls",)),
        **dict.fromkeys(("llama", "mistral", "qwen3", "qwen2", "phi3", "gemma2"), _LLAMA),
        "opt": ModuleNames(
            ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
            "model.decoder.layers",
            ("model.decoder.final_layer_norm",),
            ("lm_head",),
        ),
        "gpt_neox": ModuleNames(
            ("gpt_neox.embed_in", "gpt_neox.rotary_emb"),
            "gpt_neox.layers",
            ("gpt_neox.final_layer_norm",),
            ("lm_head",),
        ),
        "gptj": ModuleNames(("transformer.wte",), "transformer.h", ("transformer.ln_f",), ("lm_head",)),
        "falcon": ModuleNames(
            ("transformer.word_embeddings", "transformer.rotary_emb"),
            "transformer.h",
            ("transformer.ln_f",),
            ("lm_head",),
        ),
    }
)
"""By family; Megatron's GPT runs as GPT-2 there."""

FIRST = frozenset(name for names in MODULES.values() for name in (*names.embedding, *names.head)) | {"embed_out"}
"""Modules that the estimate takes to be on the first device (``embed_out`` is GPT-NeoX's head before 5.0),"""
LAST = frozenset(name for names in MODULES.values() for name in names.norm)
"""and on the last (transformers 4's ``parallelize``)."""
WITHOUT_MEMORY = frozenset({"transformer.drop", "gpt_neox.emb_dropout"})
"""Dropouts, which maps of ``infer_auto_device_map`` also name."""

_LAYER = re.compile(r"(.+)\.([0-9]{1,6})")
_DEVICE = re.compile(r"(?:cuda:)?([0-9]{1,6})")


def is_by_module(written: Node) -> bool:
    """``written`` is a map of modules to devices, as Accelerate takes it, and not of devices to layers."""
    return any(not name.strip().isdigit() for name in written.mapping)


def by_device(written: Node) -> Node:
    """The layers of every device in a map of modules to devices."""
    placed: dict[int, list[Node]] = {}
    devices = {name: _device(name, node) for name, node in written.mapping.items()}
    containers = {names.layers for names in MODULES.values()}
    for name, device in devices.items():
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[1] in containers:
            placed.setdefault(device, []).append(Node(int(layer[2]), written.mapping[name].origin))
        elif name not in FIRST | LAST | WITHOUT_MEMORY:
            problem = "is no module that is placed by itself; embedding, each layer, final norm and head are"
            raise PlanError(f"device_map.{name}", ABSENT, problem, origin=written.mapping[name].origin)
    _check_ends(written, devices, placed)
    return Node(
        {str(device): Node(placed[device], placed[device][0].origin) for device in sorted(placed)}, written.origin
    )


def _check_ends(written: Node, devices: Mapping[str, int], placed: Mapping[int, list[Node]]) -> None:
    """Embedding and head are on the first device that has layers, the final norm is on the last."""
    if not placed:
        raise PlanError("device_map", ABSENT, "places no layers", origin=written.origin)
    for names, wanted, which in ((FIRST, min(placed), "first"), (LAST, max(placed), "last")):
        for name in names & devices.keys():
            if devices[name] != wanted:
                problem = f"must be {wanted}, the {which} device: elsewhere it is not modelled"
                raise PlanError(f"device_map.{name}", devices[name], problem, origin=written.mapping[name].origin)


def _device(name: str, node: Node) -> int:
    if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value >= 0:
        return node.value
    match = _DEVICE.fullmatch(node.value) if isinstance(node.value, str) else None
    if match is None:
        problem = "must be the number of a device: other places are not modelled"
        raise PlanError(f"device_map.{name}", node.plain(), problem, origin=node.origin)
    return int(match[1])
