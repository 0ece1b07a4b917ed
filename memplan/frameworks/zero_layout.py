"""How ZeRO lays parameters out: flat groups and their shares (stages 1, 2), shards and sub-groups (stage 3).

Sizes in elements. dp ranks.

Stages 1 and 2 (``stage_1_and_2.py``, ``__init__``): a group's parameters one behind the other, padded to a
multiple of 2 · dp (``nccl_start_alignment_factor``), cut into dp equal shares. Stage 3
(``partition_parameters.py``, ``_partition_param``): every parameter alone, ceil(n / dp) on each rank;
``stage3.py``, ``_create_fp16_sub_groups``: a sub-group is closed by the shard that takes it to ``sub_group_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..layers.module import Parameter

ALIGNMENT = 2
"""``nccl_start_alignment_factor``."""


class Slice(NamedTuple):
    """The part of a parameter that lies in a rank's share."""

    id: int
    start: int
    elements: int


@dataclass(frozen=True)
class Group:
    """A flat parameter group."""

    name: str
    ids: tuple[int, ...]
    """Parameters in the order of the flat tensor."""
    sizes: tuple[int, ...]
    dp: int

    @cached_property
    def padded(self) -> int:
        multiple = ALIGNMENT * self.dp
        return -(-sum(self.sizes) // multiple) * multiple

    @cached_property
    def share(self) -> int:
        """Elements that each rank updates."""
        return self.padded // self.dp

    @cached_property
    def places(self) -> dict[int, int]:
        """Where each parameter is in the group."""
        return {id: at for at, id in enumerate(self.ids)}

    @cached_property
    def offsets(self) -> list[int]:
        """First element of each parameter in the flat tensor."""
        offsets, at = [], 0
        for size in self.sizes:
            offsets.append(at)
            at += size
        return offsets

    def share_of(self, rank: int) -> list[Slice]:
        """What lies in the share of ``rank``, padding left out (``get_partition_info``)."""
        low, high = rank * self.share, (rank + 1) * self.share
        result = []
        for id, size, offset in zip(self.ids, self.sizes, self.offsets, strict=True):
            start, end = max(low, offset), min(high, offset + size)
            if start < end:
                result.append(Slice(id, start - offset, end - start))
        return result

    def pieces(self, id: int) -> list[tuple[int, int]]:
        """(rank, elements) of each share that parameter ``id`` lies in, in order."""
        at = self.places[id]
        offset, size = self.offsets[at], self.sizes[at]
        return [
            (rank, min(offset + size, (rank + 1) * self.share) - max(offset, rank * self.share))
            for rank in range(offset // self.share, (offset + size - 1) // self.share + 1)
        ]


def touched(parts: Sequence[Group], dp: int) -> list[int]:
    """By rank: elements of all parameters that its shares have a part of."""
    totals = [0] * dp
    for part in parts:
        for id, size in zip(part.ids, part.sizes, strict=True):
            for rank, _ in part.pieces(id):
                totals[rank] += size
    return totals


def groups(parameters: Sequence[Parameter], kind: str, dp: int, *, round_robin: bool = False) -> tuple[Group, ...]:
    """One group, or matrices (weight decay) and the rest; ids are places in ``parameters``."""
    ids = range(len(parameters))
    if kind == "one":
        split = {"all": list(ids)}
    else:
        split = {
            "decay": [id for id in ids if len(parameters[id].shape) > 1],
            "no_decay": [id for id in ids if len(parameters[id].shape) <= 1],
        }
    return tuple(
        Group(name, tuple(order), tuple(parameters[id].elements for id in order), dp)
        for name, members in split.items()
        if members
        for order in [_round_robin(members, dp) if round_robin else members]
    )


def _round_robin(ids: list[int], dp: int) -> list[int]:
    """``_round_robin_reorder``: every dp-th parameter of the group beside the last."""
    return [id for start in range(dp) for id in ids[start::dp]]


def shard(elements: int, dp: int) -> int:
    """Elements of a stage-3 parameter on each rank: ceil(n / dp)."""
    return -(-elements // dp)


def sub_groups(members: Sequence[int], sizes: Sequence[int], dp: int, limit: int) -> tuple[tuple[int, ...], ...]:
    """Ids of each sub-group of a parameter group; ``sizes`` by id."""
    shards = {id: shard(sizes[id], dp) for id in members}
    if limit >= sum(shards.values()):
        return (tuple(members),)
    result: list[tuple[int, ...]] = []
    current: list[int] = []
    size = 0
    for id in members:
        current.append(id)
        size += shards[id]
        if size >= limit:
            result.append(tuple(current))
            current, size = [], 0
    return (*result, tuple(current)) if current else tuple(result)
