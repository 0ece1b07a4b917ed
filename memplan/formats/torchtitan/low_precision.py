"""torchao's converters of linear layers to float8, MXFP8 and NVFP4 in torchtitan's configurations.

``torchtitan/components/quantization``: ``float8.py``, ``mx.py``, ``nvfp4.py``. A job in TOML names sections in
``model.converters``; one in Python has objects, whose arguments stand in sections of their own here (``registry.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...frameworks import framework
from ...plan.errors import Node
from ..settings import Reader
from .settings import Settings

FLOAT8 = ("quantize.linear.float8", "quantize.dense.float8", "float8")
"""Sections of torchao's converter, which bear its name in ``model.converters``."""
IN_PYTHON: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Float8LinearConverter": ("model_spec.float8", "rowwise"),
        "MXFP8LinearConverter": ("model_spec.mxfp8", "mxfp8"),
        "NVFP4LinearConverter": ("model_spec.nvfp4", "nvfp4"),
    }
)
"""The same in a configuration in Python, by its class: where its arguments stand, and the recipe if none is named."""
OF_EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        "MXFP8GroupedExpertsConverter": "MXFP8LinearConverter",
        "Float8GroupedExpertsConverter": "Float8LinearConverter",
    }
)
"""Converters of experts, by the converter of linear layers that each may stand beside."""
PADDED = ("model_spec.mxfp8_experts.pad_multiple", 32, 16)
"""How many rows of MXFP8 an expert gets a multiple of, its default, and those of float8 (``PAD_MULTIPLE``)."""
ALONE = "MXFP8GroupedExpertsConverter"
"""The one that is modelled without another."""
NO_LINEAR = "inner_experts"
"""Stands for linear layers to convert where experts alone are."""
BLOCKS = ("mxfp8", "nvfp4")
"""Recipes of converters that name what they convert."""
FILTERED = "2025-04-07"
"""The day from which a configuration names the layers that stay in bf16; before, the head did."""
CONVERTERS = (
    "model.converters",
    "float8.enable_float8_linear",
    "training.enable_float8_linear",
    "model_spec.converters",
)
ADAPTERS = "LoRAConverter"
"""The converter that puts adapters on linear layers, which may stand beside the others,"""
OF_ADAPTERS = {"rank": 8, "alpha": 16.0}
"""and its defaults (``LoRAConverter.Config``)."""
SCALED = ("input", "weight", "grad_output")
ALL_GATHER, SCALES = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"


def low_keys(settings: Settings) -> tuple[str, Node, str] | None:
    """The key that puts linear layers in 8 or 4 bits and nothing else, the recipe, and the section of its settings."""
    found = settings.first(*CONVERTERS)
    if found is None:
        return None
    name, node = found
    if adapters_alone(settings):
        return None
    section, default = name.rpartition(".")[0], "tensorwise"
    if name == CONVERTERS[-1]:
        every = [one for one in settings.words(name) if one != ADAPTERS]
        grouped = [one for one in every if one in OF_EXPERTS]
        linear = [one for one in every if one in IN_PYTHON]
        alone = grouped == every == [ALONE]
        converter = OF_EXPERTS[ALONE] if alone else linear[0] if len(linear) == 1 else ""
        beside = not grouped or (len(grouped) == 1 and OF_EXPERTS[grouped[0]] == converter)
        if not converter or not beside or len(every) != len(grouped) + len(linear):
            return None
        section, default = IN_PYTHON[converter]
    elif name == CONVERTERS[0]:
        converters = settings.words(name)
        if len(converters) != 1 or converters[0] not in FLOAT8:
            return None
        section = converters[0]
    elif not node.value:
        return None
    delayed = any(_text(settings, f"{section}.scaling_type_{one}") == "delayed" for one in SCALED)
    recipe = _text(settings, f"{section}.recipe_name") or default
    other = delayed or settings.switch(f"{section}.emulate").value or (recipe in BLOCKS and recipe != default)
    if other or recipe not in framework("fsdp").supports.low_precision:
        return None
    return name, Node(recipe, node.origin), section


def adapters_alone(settings: Settings) -> bool:
    """Whether the one converter is that of adapters."""
    return settings.has(CONVERTERS[-1]) and settings.words(CONVERTERS[-1]) == [ADAPTERS]


def read_adapters(reader: Reader) -> None:
    """Rank, scale and layers of adapters; which of these layers there are, a model's code says (``reader.py``)."""
    settings, building = reader.settings, reader.building
    rank, alpha, targets = (f"model_spec.lora.{one}" for one in ("rank", "alpha", "target_modules"))
    if not settings.has(CONVERTERS[-1]) or ADAPTERS not in settings.words(CONVERTERS[-1]):
        building.because((rank, alpha, targets), "no adapters")
        return
    building.put("lora.rank", settings.integer(rank, default=int(OF_ADAPTERS["rank"])), rank, CONVERTERS[-1])
    building.put("lora.alpha", settings.number(alpha, default=OF_ADAPTERS["alpha"]), alpha)
    given = settings.given.get(targets)
    if given is not None and given.value is not None:
        building.put("lora.targets", Node([Node(one, given.origin) for one in settings.words(targets)], given.origin))
    building.because(targets, "lora.targets")


def _text(settings: Settings, name: str) -> str:
    node = settings.given.get(name)
    return str(node.value) if node is not None and node.value is not None else ""


def read_low(reader: Reader) -> None:
    """The recipe, and which layers have it; a filter is of the code since ``FILTERED``; shards are gathered in 8 bits
    where no recipe is named."""
    settings, building, found = reader.settings, reader.building, low_keys(reader.settings)
    if found is None:
        return
    name, recipe, section = found
    every = [one for one in settings.words(name) if one != ADAPTERS] if name == CONVERTERS[-1] else []
    key, default, of_float8 = PADDED
    if ALONE in every:
        building.put("fsdp.pad_multiple", settings.integer(key, default=default), key)
    elif any(one in OF_EXPERTS for one in every):
        building.put("fsdp.pad_multiple", Node(of_float8, recipe.origin), name)
    if recipe.value in BLOCKS:
        building.put("precision.fp4" if recipe.value == "nvfp4" else "precision.fp8", recipe, name)
        alone = Node([Node(NO_LINEAR, recipe.origin)], recipe.origin)
        words = alone if every == [ALONE] else _words(settings, f"{section}.fqns")
        building.put("fsdp.fqns", words, f"{section}.fqns")
        return
    building.put("precision.fp8", recipe, name)
    filters = f"{section}.filter_fqns"
    if settings.era.day >= FILTERED:
        building.put("fsdp.filter_fqns", _words(settings, filters, lm_head="output"), filters)
    for field, key in (("float8_all_gather", ALL_GATHER), ("float8_scales", SCALES)):
        building.put(f"fsdp.{field}", settings.switch(f"{section}.{key}"), f"{section}.{key}")


def _words(settings: Settings, name: str, lm_head: str = "lm_head") -> Node:
    """The words at ``name``, and what the head is called among them."""
    given = settings.given.get(name)
    origin = given.origin if given is not None else settings.origin
    return Node([Node(one.replace("lm_head", lm_head), origin) for one in settings.words(name)], origin)
