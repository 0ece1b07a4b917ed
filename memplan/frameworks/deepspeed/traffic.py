"""What ZeRO-3 gathers in one micro-batch: how much is whole at once, what is copied, and what is moved.

Bytes are those of the parameters' dtype, per rank, unrounded. A ring moves (dp − 1) / dp of a gathered tensor into
every rank, and as much for a reduce-scatter.
"""

from __future__ import annotations

from ...layers.autograd import ITEMSIZE
from ...plan.resolved import ResolvedPlan
from ...tape.events import Category, Drop, Hold, Tape
from ...tape.program import Program
from ...values import dataclass
from ..plain.hooked import Model
from .config import Zero, zero_of
from .coordinator import Sharded
from .engine import parameters_of
from .hooks import Inserted, sharded
from .learned import learnt_model
from .states import shard


@dataclass(frozen=True, slots=True)
class LayerShards:
    """One module of the model under ZeRO-3."""

    elements: int
    shard: int
    """Elements on each rank."""
    whole: int
    """Bytes of all of its parameters."""
    persistent: int
    """Bytes of those that stay whole."""

    @property
    def gathered(self) -> int:
        """Bytes that every pass gathers again."""
        return self.whole - self.persistent


@dataclass(frozen=True, slots=True)
class Gathering:
    """One micro-batch, forward and backward."""

    most: int
    """Bytes of gathered parameters and flat buffers at their peak, persistent ones not counted."""
    forward: int
    """Bytes gathered in forward."""
    backward: int
    """Bytes gathered again in backward."""
    copied: int
    """Bytes copied out of flat buffers, which a gather of one parameter alone does not need."""
    reduced: int
    """Bytes of gradients that are reduced and scattered."""

    def moved(self, dp: int) -> int:
        """Bytes that enter a rank over the network: (dp − 1) / dp of everything gathered and reduced."""
        return (self.forward + self.backward + self.reduced) * (dp - 1) // dp


def layer_shards(model: Model, zero: Zero, dp: int, name: str) -> LayerShards:
    """The module called ``name``. Its shards are those of its parameters, one by one."""
    instance = next(instance for instance in model.instances if instance.name == name)
    ids = [model.id_of(instance, parameter.name) for parameter in instance.hooked.parameters]
    kept: list[Sharded] = [parameter for parameter in sharded(model, zero) if parameter.id in ids]
    size = ITEMSIZE[model.dtype]
    elements = sum(parameter.elements for parameter in kept)
    persistent = sum(parameter.elements for parameter in kept if parameter.persists)
    shards = sum(shard(parameter.elements, dp) for parameter in kept)
    return LayerShards(elements, shards, elements * size, persistent * size)


def gathering(model: Model, inserted: Inserted) -> Gathering:
    """Reads a micro-batch with what hooks insert."""
    size = ITEMSIZE[model.dtype]
    tapes = (*inserted.forward, *reversed(inserted.backward))
    forward, backward = (sum(map(_gathered, part)) * size for part in (inserted.forward, inserted.backward))
    copied = sum(
        event.shape[0] for tape in tapes for event in tape if isinstance(event, Hold) and event.name == "gathered"
    )
    reduced = sum(model.parameters[id].elements for id in model.trained) * size
    return Gathering(_most(tapes), forward, backward, copied * size, reduced)


def _gathered(tape: Tape) -> int:
    """Elements of gathers in ``tape``, with padding."""
    gathers = ("gather", "gather_flat")
    return sum(event.shape[0] for event in tape if isinstance(event, Hold) and event.name in gathers)


def _most(tapes: tuple[Tape, ...]) -> int:
    live = most = 0
    for tape in tapes:
        for event in tape:
            if isinstance(event, (Hold, Drop)) and event.category is Category.GATHERED_PARAMETERS:
                live += event.bytes if isinstance(event, Hold) else -event.bytes
                most = max(most, live)
    return most


@dataclass(frozen=True, slots=True)
class Traffic:
    """ZeRO-3 of one micro-batch on one rank."""

    layer: LayerShards
    """The first layer of the model; all are alike."""
    gathered: Gathering


def traffic(plan: ResolvedPlan, program: Program) -> Traffic:
    """What ``program``, of ZeRO-3, gathers and reduces in each micro-batch."""
    model = parameters_of(plan) if plan.model.has_sizes else learnt_model(plan)
    first, dp = next(one.name for one in model.instances if "." in one.name), plan.layout.dp
    assert dp is not None
    tapes = [span.module.first for span in program.spans]
    inserted = Inserted(tuple(one.forward for one in tapes), tuple(one.backward for one in tapes))
    return Traffic(layer_shards(model, zero_of(plan), dp, first), gathering(model, inserted))
