"""``fully_shard`` without a pipeline: shards are counted as ``frameworks.fsdp`` does, and of what its hooks gather that
which is there whatever the order of streams: a unit's own parameters while it runs, the copy of what was gathered
beside them, what is gathered ahead in backward, and the last reduction's input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...frameworks import fsdp_programs
from ...frameworks.fsdp import Model, sharded_states, sharded_step
from ...frameworks.fsdp_modules import managed
from ...frameworks.fsdp_units import Sharding, Unit, size
from ...layers.module import Options
from ...plan.plan import Plan
from ...program import module_states
from ...tape import Category
from .parts import Kept


def kept(plan: Plan) -> Kept:
    """Of rank 0, which has the largest shards, of a resolved plan."""
    given = plan.fsdp
    fsdp_programs.check(plan, given)
    model, sharding = fsdp_programs.model_of(plan, Options(), given), fsdp_programs.sharding_of(plan, given)
    static = sum(hold.bytes for hold in model.buffers)
    if sharding.offload:
        return Kept(static, 0 if given.gradient_sync else unreduced(model.units, sharding), 0)
    states = sharded_states(plan.optimizer, sharding)
    static += sum(sum(module_states(span.module, states)) * len(span.names) for span in model.spans)
    left = reduced(model.units, sharding)
    tensors = tuple(one for span in model.spans for _ in span.names for one in span.module.parameters)
    step = left + sharded_step(tensors, plan.optimizer, sharding).excursion.peak
    return Kept(static, left if given.gradient_sync else unreduced(model.units, sharding), step)


def reduced(units: Sequence[Unit], sharding: Sharding) -> int:
    """Gradients as shards."""
    return sum(size(unit.flat(sharding.shards), sharding.parameters) for unit in units if unit.parameters)


def unreduced(units: Sequence[Unit], sharding: Sharding) -> int:
    """Whole gradients that wait for the micro-batch that reduces them."""
    tensors = [one for unit in units for one in unit.parameters]
    return sum(size(one.elements, sharding.reduce) for one in tensors)


def passing(plan: Plan, accumulates: bool) -> tuple[int, ...]:
    """What one micro-batch takes beside what is static and what ``accumulates``, where others went before it: until the
    first unit has gone backward, and to the end."""
    model = fsdp_programs.model_of(plan, Options(), plan.fsdp)
    sharding = fsdp_programs.sharding_of(plan, plan.fsdp)
    reduces = plan.fsdp.gradient_sync or not accumulates
    cast = sharding.reduce != sharding.parameters
    outlives = sharding.replicas > 1 and reduces and (accumulates or sharding.offload or cast)
    return _Walk(model, sharding, reduces, outlives).peaks()


@dataclass(frozen=True)
class _Walk:
    """One micro-batch through a model."""

    model: Model
    sharding: Sharding
    reduces: bool
    """Gradients end with their unit's backward, rather than being added to others."""
    outlives: bool
    """What is reduced is held until the end of backward, as sums across replicas run beside it."""

    def peaks(self) -> tuple[int, int]:
        modules = [span.module for span in self.model.spans for _ in span.names]
        level = most = early = 0
        for place, module in enumerate(modules):
            level += self.over(place, "first")
            excursion, own = module.first.forward_fold, self.forward(place)
            most = max(most, level + own + excursion.peak)
            level += excursion.net + self.stays(place) - self.over(place, "last", resharded=True)
        owner = {
            at: unit for unit, own in zip(self.units, managed(self.units, len(modules)), strict=True) for at in own
        }
        waiting: Counter[str] = Counter()
        for place, module in reversed(list(enumerate(modules))):
            level += self.over(place, "last", resharded=True)
            tapes = module.first if self.reduces else module.steady
            excursion = tapes.backward_fold
            most = max(most, level + self.backward(place) + excursion.peak)
            early = early or (most if place in self.alone else 0)
            if early and not self.reduces:
                break  # from here on, those that waited end
            left = excursion.net_by[Category.GRADIENTS]
            level += excursion.net - (left if place in self.alone else 0) - self.stays(place)
            if place not in self.alone and place in owner:
                waiting[owner[place].name] += left
            if self.outlives and place in self.alone:
                level += size(self.alone[place].flat(self.sharding.shards), self.sharding.reduce)
                most = max(most, level)
            level -= self.over(place, "first")
            level -= sum(waiting.pop(one.name, 0) for one in self.around if one.first == place)
        return early, most

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.model.units

    @cached_property
    def alone(self) -> dict[int, Unit]:
        """Units of one module, by its place."""
        return {unit.first: unit for unit in self.units if unit.alone and unit.parameters}

    @cached_property
    def around(self) -> list[Unit]:
        """Units of several modules."""
        return [unit for unit in self.units if not unit.alone and unit.parameters]

    def over(self, place: int, end: str, *, resharded: bool = False) -> int:
        """Gathered parameters of the units of several modules that have an end here."""
        chosen = (one for one in self.around if getattr(one, end) == place)
        return sum(self.whole(one) for one in chosen if one.reshard is True or not resharded)

    def stays(self, place: int) -> int:
        """What a unit of one module keeps gathered between forward and backward."""
        unit = self.alone.get(place)
        return self.whole(unit) if unit is not None and not unit.reshard else 0

    def whole(self, unit: Unit) -> int:
        """A unit's gathered parameters."""
        return self._wholes[unit.name]

    @cached_property
    def _wholes(self) -> dict[str, int]:
        shards, compute = self.sharding.shards, self.sharding.compute
        return {
            unit.name: sum(size(one * shards, compute) for one in unit.shard_elements(shards)) for unit in self.units
        }

    def gathered(self, unit: Unit) -> int:
        """The flat output of its gathering."""
        shards = self.sharding.shards
        return size(unit.flat(shards) * shards, self.sharding.compute) if shards > 1 else 0

    def forward(self, place: int) -> int:
        """A unit's own parameters, and the flat copy."""
        unit = self.alone.get(place)
        return self.whole(unit) + self.gathered(unit) if unit is not None else 0

    def backward(self, place: int) -> int:
        """A unit's own parameters, those of the unit before it, gathered ahead, and the input of the reduction of the
        unit behind it."""
        unit, before, behind = (self.alone.get(at) for at in (place, place - 1, place + 1))
        if unit is None:
            return 0
        taken = self.whole(unit) if unit.reshard else 0
        if before is not None and before.reshard is True:
            taken += self.gathered(before)
        if behind is not None and self.reduces:
            shards = self.sharding.shards
            taken += size(behind.flat(shards) * shards, self.sharding.reduce)
        return taken
