"""What the stages of a pipeline hold, and the fields of a plan that say so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..plan.megatron_layout import layout_text


class Work(NamedTuple):
    """What one chunk of a stage runs."""

    layers: int
    embedding: bool = False
    head: bool = False
    has_norm: bool | None = None
    """Whether the final norm is in it, where that is not where the head is."""
    until: int = 0
    """BigScience's layer list: the first entry of the next stage, where it is no layer of its own."""

    @property
    def final_norm(self) -> bool:
        return self.head if self.has_norm is None else self.has_norm


Works = tuple[tuple[Work, ...], ...]
"""By stage, then by chunk."""


def layers_of(works: Works) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(sum(work.layers for work in stage) for stage in works)


Fields = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=4096)
def fields_of(framework: str, works: Works) -> Fields:
    """The fields of a plan that say what its stages hold."""
    if framework == "megatron":
        return _megatron_fields(works)
    if framework == "megatron-deepspeed":
        return (("pipeline.partition", edges(works)),)
    if framework == "device-map" and works:
        return (("device_map", mapped(layers_of(works))),)
    return ()


def _megatron_fields(works: Works) -> Fields:
    counts = {work.layers for stage in works for work in stage}
    chosen = None if len(counts) == 1 else layout_text([[work.layers for work in stage] for stage in works])
    none = dict.fromkeys(("first_layers", "last_layers", "layout"), None) | {"count_embedding": False}
    fields = {**none, "count_loss": False, "layout": chosen}
    return tuple((f"pipeline.{name}", value) for name, value in fields.items())


BEFORE = 3
"""Entries of BigScience's layer list in front of the layers (``megatron_deepspeed.layer_list``)."""
BEHIND = 4


def edges(works: Works) -> tuple[int, ...]:
    """First entry of every stage, and the length of the list; ends with their neighbours unless they say otherwise."""
    edges, at = [0], BEFORE
    for (work,) in works:
        at += work.layers
        edges.append(work.until or at + BEHIND * work.head)
    return tuple(edges)


def mapped(shares: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """A device map of so many layers in a row on each device."""
    edges = [0, *accumulate(shares)]
    return {device: tuple(range(low, high)) for device, (low, high) in enumerate(pairwise(edges))}
