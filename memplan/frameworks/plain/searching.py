"""``device-map`` in a search: layers are placed by memory, as devices run one after the other whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from ...estimate import programs_of
from ...layers.module import Options
from ...plan.plan import ResolvedPlan
from ...plan.resolve import resolve
from ...search.cuts import (
    ChunkLayers,
    Criteria,
    Fields,
    Holds,
    Option,
    Ratios,
    StageLayers,
    choose,
    layers_of,
    most_that,
    smallest,
    stage_layers,
)
from ...search.framework import FrameworkSearch, Proposal
from ...search.lower_bounds import LowerBounds
from ...search.point import Point
from ...search.space import Space
from ...tape.program import Program, fold_program


class DeviceMapSearch(FrameworkSearch):
    def replicas(self, space: Space, ranks: int) -> tuple[int, int]:
        """One process, which may see its batch multiplied by the devices."""
        return (space.gpus if space.base.batch.multiply_by_visible_gpus else 1), 0

    def fields(self, space: Space, point: Point) -> Mapping[str, Any]:
        return {"layout.dp": 1}

    def cut_fields(self, cut: StageLayers) -> Fields:
        return (("device_map", mapped(layers_of(cut))),) if cut else ()

    def placed(self, space: Space, point: Point) -> StageLayers | None:
        return smallest(resolve(space.plan(point, {"device_map": None})), Ratios())

    def cut(
        self, plan: ResolvedPlan, ratios: Ratios, limit: int | None, criteria: Criteria, holds: Holds | None
    ) -> StageLayers | None:
        """What a device needs depends on its own layers alone."""
        layers, devices = plan.model.layers, plan.hardware.gpus or 1

        def programs(shares: Sequence[int]) -> tuple[Program, ...]:
            return programs_of(plan.model_copy(update={"device_map": mapped(shares)}), Options())

        @cache
        def peak(device: int, count: int) -> int:
            """With ``count`` layers on ``device``, as many as there are for the others."""
            others = devices - 1
            rest = [(layers - count + others - 1 - at) // others for at in range(others)]
            return fold_program(programs((*rest[:device], count, *rest[device:]))[device]).peak

        if devices == 1:
            return ((ChunkLayers(layers, True, True),),)
        even = tuple((layers + devices - 1 - at) // devices for at in range(devices))
        threshold = max(fold_program(one).peak for one in programs(even)) if limit is None else limit

        def most_of(device: int) -> int:
            return most_that(lambda count: peak(device, count) <= threshold, 1, layers - devices + 1, even[device])

        most = [most_of(device) for device in range(devices)]
        if sum(most) < layers or min(most) < 1:
            return None
        spare = sum(most) - layers
        options = [
            [Option((count,), *criteria(peak(at, count), 0.0)) for count in range(max(1, top - spare), top + 1)]
            for at, top in enumerate(most)
        ]
        chosen = choose(options, layers)
        return None if chosen is None else tuple(stage_layers(at, devices, one.chunks) for at, one in enumerate(chosen))

    def other_cuts(self) -> Iterator[Proposal]:
        yield Proposal("equal shares", {"device_map": None})

    def lower_bounds(self, space: Space) -> LowerBounds:
        return _Bounds(space)


class _Bounds(LowerBounds):
    """Of one device that holds all layers, shared out evenly: the fullest device holds no less."""

    def least(self, point: Point, enough: int) -> int:
        return -(-super().least(point, enough * self.space.gpus) // self.space.gpus)

    def plan(
        self, point: Point, sequences: int, accumulates: bool, fields: Mapping[str, Any] | None = None
    ) -> ResolvedPlan:
        one = {"device_map": {0: tuple(range(self.space.base.model.layers))}}
        return super().plan(point, sequences, accumulates, one)


def mapped(shares: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """A device map of so many layers in a row on each device."""
    edges = [0, *accumulate(shares)]
    return {device: tuple(range(low, high)) for device, (low, high) in enumerate(pairwise(edges))}
