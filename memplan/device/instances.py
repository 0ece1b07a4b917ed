"""Machines that clouds rent, by what they call them, and the GPUs that stand in one: to say what a plan calls those.

Sources: Amazon's "Accelerated computing instances", Google Cloud's "GPU machine types", Microsoft's "GPU accelerated
virtual machine sizes" (ND and NC families).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

_ONE = dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1)
_OF_G5 = {**_ONE, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_SIZES: Mapping[str, tuple[str, Mapping[str, int]]] = MappingProxyType(
    {
        "p3": ("v100-16gb", {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
        "p3dn": ("v100-32gb", {"24xlarge": 8}),
        "p4d": ("a100-40gb", {"24xlarge": 8}),
        "p4de": ("a100-80gb", {"24xlarge": 8}),
        "p5": ("h100-80gb", {"4xlarge": 1, "48xlarge": 8}),
        "p5e": ("h200", {"48xlarge": 8}),
        "p5en": ("h200", {"48xlarge": 8}),
        "p6-b200": ("b200", {"48xlarge": 8}),
        "p6-b300": ("b300", {"48xlarge": 8}),
        "g4dn": ("t4", {**_ONE, "12xlarge": 4, "metal": 8}),
        "g5": ("a10g", _OF_G5),
        "g6": ("l4", _OF_G5),
        "g6e": ("l40s", _OF_G5),
        "a2-highgpu": ("a100-40gb", {f"{count}g": count for count in (1, 2, 4, 8)}),
        "a2-megagpu": ("a100-40gb", {"16g": 16}),
        "a2-ultragpu": ("a100-80gb", {f"{count}g": count for count in (1, 2, 4, 8)}),
        "a3-highgpu": ("h100-80gb", {f"{count}g": count for count in (1, 2, 4, 8)}),
        "a3-megagpu": ("h100-80gb", {"8g": 8}),
        "a3-edgegpu": ("h100-80gb", {"8g": 8}),
        "a3-ultragpu": ("h200", {"8g": 8}),
        "a4-highgpu": ("b200", {"8g": 8}),
        "g2-standard": ("l4", {"4": 1, "8": 1, "12": 1, "16": 1, "32": 1, "24": 2, "48": 4, "96": 8}),
        "nd40rs": ("v100-32gb", {"v2": 8}),
        "nd96asr": ("a100-40gb", {"v4": 8, "a100-v4": 8}),
        "nd96amsr": ("a100-80gb", {"a100-v4": 8}),
        "nd96isr": ("h100-80gb", {"h100-v5": 8}),
        "nd96isr-h200": ("h200", {"v5": 8}),
        "nd96isr-mi300x": ("mi300x", {"v5": 8}),
        "nc24ads": ("a100-80gb", {"a100-v4": 1}),
        "nc48ads": ("a100-80gb", {"a100-v4": 2}),
        "nc96ads": ("a100-80gb", {"a100-v4": 4}),
        "nc40ads": ("h100-94gb", {"h100-v5": 1}),
        "nc80adis": ("h100-94gb", {"h100-v5": 2}),
    }
)
"""By family: the GPU, and how many of them a machine of each size has."""


def machines() -> Iterator[tuple[str, str, int]]:
    """Every machine: its name in small letters with hyphens, its GPU, and how many of them it has."""
    for family, (gpu, sizes) in _SIZES.items():
        for size, count in sizes.items():
            yield _plain(f"{family}-{size}"), gpu, count


def gpu_of_folder(name: str) -> str | None:
    """The GPU of Google's machines that the folder ``name`` keeps recipes for: ``a3ultra``, of ``a3-ultragpu``
    (https://github.com/AI-Hypercomputer/gpu-recipes, ``training``)."""
    folders = {
        family.removesuffix("gpu").replace("-", ""): gpu for family, (gpu, _) in _SIZES.items() if "gpu" in family
    }
    return folders.get(name.lower())


def _plain(name: str) -> str:
    return re.sub(r"[._\s]+", "-", re.sub(r"(?i)^(?:standard_|ml\.)", "", name.strip())).lower()


def flags_of(name: str) -> str | None:
    """The flags that say what the machine ``name`` has, or those of the family ``name``; nothing for none of them."""
    written = _plain(name)
    for machine, gpu, count in machines():
        if machine == written:
            return f"{count} x {gpu}: --gpu {gpu} --gpus {count}"
    gpus = {gpu for machine, gpu, _ in machines() if machine.startswith(f"{written}-")}
    return f"machines with {(gpu := gpus.pop())}: --gpu {gpu} --gpus N" if len(gpus) == 1 else None
