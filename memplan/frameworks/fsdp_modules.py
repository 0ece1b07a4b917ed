"""A model's modules with ``fully_shard``'s hooks around them: one tape each, alike wherever the hooks are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..layers.module import INPUT, Module, Parameter, Tapes
from ..layers.tensor_parallel import PARTIAL, REPLICATED
from ..program import Span
from ..tape import Category, Drop, Hold, Tape
from .fsdp_hooks import LOCAL, PERSISTENT, Gradient, Role, Seams, seams
from .fsdp_units import Sharding, Unit

ALONE = (PERSISTENT, PERSISTENT + 300, PERSISTENT + 600)
"""Ids from here on are of gradients that one module's hooks end: as autograd left them, kept, in their parameter's
placement."""

SHARED = (-900, -930, -960)
"""Ids from here down to −989 are of such that wait in one module for the hooks of another."""


@lru_cache(maxsize=4096)
def left_gradients(module: Module) -> tuple[Hold, ...]:
    """The gradients that a module's backward leaves at its parameters."""
    backward = module.first.backward
    ended = {event.tensor for event in backward if isinstance(event, Drop)}
    return tuple(
        event
        for event in backward
        if isinstance(event, Hold) and event.category is Category.GRADIENTS and event.tensor not in ended
    )


@lru_cache(maxsize=4096)
def renamed_ids(tape: Tape, ids: tuple[tuple[int, int], ...]) -> Tape:
    """``tape`` with other ids for some tensors."""
    if not ids:
        return tape
    known = dict(ids)
    return tuple(
        event._replace(tensor=known.get(event.tensor, event.tensor)) if isinstance(event, Hold | Drop) else event
        for event in tape
    )


@lru_cache(maxsize=1024)
def transposed(layer: Module) -> Module:
    """A layer of GPT-2, whose ``Conv1D`` weights are (in, out): the dimension that is cut is the other one."""
    return replace(layer, parameters=tuple(Parameter(one.name, one.shape[::-1]) for one in layer.parameters))


Around = tuple[Tape, Tape, Tape, Tape]
"""Before and after forward, before and after backward."""


@lru_cache(maxsize=4096)
def hooked(
    module: Module, ids: tuple[tuple[int, int], ...], arounds: tuple[Around, Around], adds: tuple[bool, bool]
) -> Module:
    """``module`` with the events of hooks around it, in the first micro-batch and in steady ones. Gradients
    appear, as the hooks end them, or are added (``adds``) to those of another micro-batch."""

    def tapes(inner: Tapes, around: Around) -> Tapes:
        backward = renamed_ids(inner.backward, ids)
        begun = sum(isinstance(event, Hold) and event.name == "grad_loss" for event in backward[:1])
        backward = backward[:begun] + around[2] + backward[begun:] + around[3]
        return replace(inner, forward=_around_forward(inner.forward, around), backward=backward)

    compact = compact_ids(module, ids, arounds)
    arounds = _compacted(arounds[0], compact), _compacted(arounds[1], compact)
    known = dict(compact)
    ids = tuple((old, known.get(new, new)) for old, new in ids)
    first, steady = (
        tapes(module.steady if added else module.first, around) for around, added in zip(arounds, adds, strict=True)
    )
    alike = arounds[0] == arounds[1] and adds[0] == adds[1]
    evaluation = _around_forward(module.evaluation, arounds[0])
    return replace(module, first=first, steady=first if alike else steady, evaluation=evaluation)


def compact_ids(
    module: Module, ids: tuple[tuple[int, int], ...], arounds: tuple[Around, Around]
) -> tuple[tuple[int, int], ...]:
    """Ids of the hooks' own tensors, and those that ``hooked`` gives them."""
    base = largest_id(module)
    found = {id for tape in (*arounds[0], *arounds[1]) for id in _own_ids(tape)} | {id for _, id in ids if id > 0}
    own = sorted(found, key=lambda id: (id < PERSISTENT, id))  # those that micro-batches share come first
    return tuple((id, base + 1 + at) for at, id in enumerate(own))


def _own_ids(tape: Tape) -> set[int]:
    return {event.tensor for event in tape if isinstance(event, Hold | Drop) and event.tensor >= LOCAL}


def _compacted(around: Around, ids: tuple[tuple[int, int], ...]) -> Around:
    """Ids that follow the module's own without a gap."""
    before, after, before_backward, after_backward = (renamed_ids(tape, ids) for tape in around)
    return before, after, before_backward, after_backward


@lru_cache(maxsize=4096)
def largest_id(module: Module) -> int:
    tapes = (module.first.forward, module.first.backward, module.steady.backward, module.evaluation)
    return max((event.tensor for tape in tapes for event in tape if isinstance(event, Hold | Drop)), default=0)


def _around_forward(tape: Tape, around: Around) -> Tape:
    """The caller's variable holds a module's input until the module's hooks have run, too."""
    kept = tuple(event for event in tape if isinstance(event, Drop) and event.tensor == INPUT)
    return around[0] + tuple(event for event in tape if event not in kept) + around[1] + kept


def sharded(spans: tuple[Span, ...], units: tuple[Unit, ...], end: str, sharding: Sharding) -> tuple[Span, ...]:
    """``spans`` with the hooks of ``units``, every micro-batch reducing its gradients; the model's own
    modules end with the one called ``end``."""
    return _with_hooks(spans, units, end, sharding, (Role.FIRST, Role.STEADY))


def unsynced(
    spans: tuple[Span, ...], units: tuple[Unit, ...], end: str, sharding: Sharding
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """As ``sharded``, with gradients that are reduced once: all micro-batches but the last, and the last."""
    return (
        _with_hooks(spans, units, end, sharding, (Role.KEPT_FIRST, Role.KEPT)),
        _with_hooks(spans, units, end, sharding, (Role.LAST, Role.LAST)),
    )


@dataclass(frozen=True, slots=True)
class Owned:
    """Modules in a row, and the gradients that each unit finds at its parameters."""

    modules: tuple[tuple[Module, str], ...]
    renamed: tuple[tuple[tuple[int, int], ...], ...]
    """Of each module, ids of its gradients within it and in the hooks."""
    gradients: tuple[list[Gradient], ...]
    """Of each unit, in the order of its parameters."""

    def place(self, name: str) -> int:
        return next(place for place, (_, other) in enumerate(self.modules) if other == name)


def owned(spans: Sequence[Span], units: Sequence[Unit], sharding: Sharding) -> Owned:
    """Who ends which gradient."""
    modules = [(span.module, name) for span in spans for name in span.names]
    renamed: list[tuple[tuple[int, int], ...]] = [() for _ in modules]
    gradients = []
    shared = 0
    for unit, places in zip(units, managed(units, len(modules)), strict=True):
        own: list[Gradient] = []
        for place in places:
            holds = left_gradients(modules[place][0])
            known = _ids(unit, len(holds), shared)
            if not unit.alone:
                shared += len(holds)
            renamed[place] = tuple((hold.tensor, ids[0]) for hold, ids in zip(holds, known, strict=True))
            own += [_gradient(hold, ids, sharding) for hold, ids in zip(holds, known, strict=True)]
        gradients.append(_in_order(own, unit.parameters))
    assert shared <= SHARED[0] - SHARED[1], "too many gradients that wait for hooks"
    return Owned(tuple(modules), tuple(renamed), tuple(gradients))


Ids = tuple[int, int, int]
"""Of a gradient as autograd leaves it, of its copy that is kept, and of what is reduced."""


def _ids(unit: Unit, count: int, shared: int) -> list[Ids]:
    """Of ``count`` gradients, before which ``shared`` of other modules wait."""
    if unit.alone:
        return [(ALONE[0] + at, ALONE[1] + at, ALONE[2] + at) for at in range(count)]
    return [(SHARED[0] - at, SHARED[1] - at, SHARED[2] - at) for at in range(shared, shared + count)]


@lru_cache(maxsize=256)
def _with_hooks(
    spans: tuple[Span, ...], units: tuple[Unit, ...], end: str, sharding: Sharding, roles: tuple[Role, Role]
) -> tuple[Span, ...]:
    own = owned(spans, units, sharding)
    modules, gradients, last = own.modules, own.gradients, own.place(end)
    one, two = (seams(units, len(modules), last, sharding, gradients, role) for role in roles)
    cast = sharding.reduce != sharding.compute
    adds = roles[0].adds and not cast, roles[1].adds and not cast
    return tuple(
        Span(hooked(module, own.renamed[place], (events_around(one, place), events_around(two, place)), adds), (name,))
        for place, (module, name) in enumerate(modules)
    )


def _gradient(hold: Hold, ids: Ids, sharding: Sharding) -> Gradient:
    placement, whole = hold.name.rpartition("/")[2], prod(hold.shape)
    id, kept, placed = ids
    elements = whole // sharding.tensor if placement == REPLICATED else whole
    moves = placement in (PARTIAL, REPLICATED)
    return Gradient(Drop(id, hold.bytes, hold.category), elements, whole, kept, placed if moves else None)


def _in_order(gradients: Sequence[Gradient], parameters: Sequence[Parameter]) -> list[Gradient]:
    """A unit's gradients in the order of its parameters; among equal sizes any, but the embedding's, which comes
    first, before the head's: tensor parallelism leaves it in another placement."""
    left = list(gradients)
    result = []
    for parameter in parameters:
        equal = [gradient for gradient in left if gradient.elements == parameter.elements]
        one = min(equal, key=lambda gradient: gradient.placed is None)
        left.remove(one)
        result.append(one)
    return result


def events_around(all: Seams, place: int) -> Around:
    return (
        all.before_forward[place],
        all.after_forward[place],
        all.before_backward[place],
        all.after_backward[place],
    )


def managed(units: Sequence[Unit], modules: int) -> list[list[int]]:
    """The modules whose parameters each unit manages: those that no unit inside it does, last first."""
    result: list[list[int]] = [[] for _ in units]
    for place in reversed(range(modules)):
        around = [at for at, unit in enumerate(units) if unit.first <= place <= unit.last]
        if around:
            result[around[-1]].append(place)
    return result


def managed_parameters(spans: Sequence[Span], units: Sequence[Unit]) -> list[tuple[Parameter, ...]]:
    """Parameters of each unit, in the order of the model's modules."""
    modules = [span.module for span in spans for _ in span.names]
    return [
        tuple(one for place in reversed(places) for one in modules[place].parameters)
        for places in managed(units, len(modules))
    ]
