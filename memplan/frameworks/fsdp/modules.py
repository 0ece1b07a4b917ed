"""A model's modules with ``fully_shard``'s hooks around them: one tape each, alike wherever the hooks are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod

from ...families.base import place as registered_place
from ...layers.module import Module, Options, Parameter, Tapes
from ...layers.tensor_parallel import PARTIAL, REPLICATED, kept_of
from ...tape.events import Category, Drop, Event, Hold, Hook, Scope, Seam, Tape, insert, renamed
from ...tape.program import Span
from ...values import dataclass, replace
from ..plain.tuned import packed
from .chunked import hooks_of
from .hooks import WITHIN, Explicit, Gradient, Role
from .passing import Around, pass_through, recomputes, reruns
from .units import Sharding, Unit

MODEL = "model"
"""The root unit's name."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as one device runs it, and what of it is sharded together."""

    spans: tuple[Span, ...]
    units: tuple[Unit, ...]
    """The root first."""
    end: str
    """The last module of the model itself: a loss may follow."""
    buffers: tuple[Hold, ...]
    reference: tuple[Span, ...] = ()
    """The modules of a reference that runs behind forward, with hooks."""


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
def names_of_gradients(module: Module) -> dict[int, str]:
    """By their tensors, the parameters that they are of."""
    arrived = (event for event in module.first.backward if isinstance(event, Seam) and event.hook is Hook.GRADIENT)
    return {event.tensor: event.name for event in arrived}


def of_experts(module: Module) -> frozenset[int]:
    """Which of them are of experts' parameters."""
    experts = {one.name for one in module.parameters if one.expert}
    return frozenset(tensor for tensor, name in names_of_gradients(module).items() if name in experts)


def taken_by(unit: Unit, units: Sequence[Unit], name: str) -> bool:
    """Whether the parameter ``name`` of a module that ``unit`` manages is its own."""
    module = name.partition(".")[0]
    return module in unit.only if unit.only else not any(module in one.only for one in units)


Passes = tuple[Sequence[Around], Sequence[Around]]
"""What hooks do around each module in the first micro-batch, and in steady ones."""

Ids = tuple[tuple[int, int], ...]
"""Ids, and those that take their place."""


@lru_cache(maxsize=4096)
def hooked(module: Module, ids: Ids, arounds: tuple[Around, Around], adds: tuple[bool, bool]) -> Module:
    """``module`` with the events of hooks around it, in the first micro-batch and in steady ones. Gradients
    appear, as the hooks end them, or are added (``adds``) to those of another micro-batch."""
    compact = dict(compact_ids(module, ids, arounds))
    known = {old: compact.get(new, new) for old, new in ids}

    def tapes(around: Around, added: bool) -> Tapes:
        inner = module.steady if added else module.first
        backward = inner.backward if added else renamed(inner.backward, known)
        return replace(inner, forward=insert(inner.forward, around.at), backward=insert(backward, around.at))

    one, two = (Around(*(renamed(tape, compact) for tape in around)) for around in arounds)
    first = tapes(one, adds[0])
    steady = first if one == two and adds[0] == adds[1] else tapes(two, adds[1])
    return replace(module, first=first, steady=steady, evaluation=insert(module.evaluation, one.at))


def compact_ids(module: Module, ids: Ids, arounds: tuple[Around, Around], besides: Tape = ()) -> Ids:
    """Ids of the hooks' own tensors, and those that ``hooked`` gives them; behind them what ``besides`` holds, which
    hooks do at other times."""
    own, kept = Scope.MODULE.id(), Scope.KEPT.id()

    def found(tape: Iterable[Event]) -> set[int]:
        return {event.tensor for event in tape if not isinstance(event, Seam) and event.tensor <= own}

    first = found(event for tape in (*arounds[0], *arounds[1]) for event in tape)
    first |= {id for _, id in ids if id <= own}
    in_order = sorted(first, key=lambda id: (id > kept, -id))  # those that micro-batches share come first
    in_order += sorted(found(besides) - first, reverse=True)
    return tuple((id, module.largest_id + 1 + at) for at, id in enumerate(in_order))


def sharded(
    spans: tuple[Span, ...], units: tuple[Unit, ...], end: str, sharding: Sharding, *, adds: bool = False
) -> tuple[Span, ...]:
    """``spans`` with the hooks of ``units``, every micro-batch reducing its gradients; the model's own
    modules end with the one called ``end``. The first one ``adds`` to gradients, too, where they stay behind a step."""
    return _with_hooks(spans, units, end, sharding, (Role.STEADY if adds else Role.FIRST, Role.STEADY))


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
    renamed: tuple[Ids, ...]
    """Of each module, ids of its gradients within it and in the hooks."""
    gradients: tuple[list[Gradient], ...]
    """Of each unit, in the order of its parameters."""

    def place(self, name: str) -> int:
        return next(place for place, (_, other) in enumerate(self.modules) if other == name)


def owned(spans: Sequence[Span], units: Sequence[Unit], sharding: Sharding) -> Owned:
    """Who ends which gradient."""
    modules = [(span.module, name) for span in spans for name in span.names]
    known: list[Ids] = [() for _ in modules]
    gradients = []
    shared = 0
    apart, split = {unit.first for unit in units if unit.of_experts}, any(unit.only for unit in units)
    for unit, places in zip(units, managed(units, len(modules)), strict=True):
        own: list[Gradient] = []
        for place in places:
            holds = left_gradients(modules[place][0])
            if place in apart:
                experts = of_experts(modules[place][0])
                holds = tuple(one for one in holds if (one.tensor in experts) == unit.of_experts)
            if split:
                names = names_of_gradients(modules[place][0])
                holds = tuple(one for one in holds if taken_by(unit, units, names.get(one.tensor, "")))
            found = list(zip(holds, _ids(unit, len(holds), shared), strict=True))
            if not unit.alone:
                shared += len(holds)
            known[place] = (*known[place], *((hold.tensor, ids[0]) for hold, ids in found))
            own += [_gradient(hold, ids, sharding) for hold, ids in found]
        gradients.append(_in_order(own, unit.parameters))
    return Owned(tuple(modules), tuple(known), tuple(gradients))


def lowest_of(modules: Sequence[tuple[Module, str]]) -> int:
    """The first of ``modules`` in a row that has a backward: those before it lead to nothing that is trained."""
    return next(place for place, (module, _) in enumerate(modules) if module.first.backward)


COPIES, PLACED = 1 << 16, 2 << 16
"""Numbers from which on are copies of gradients that one module's hooks end, and those in their parameters' places."""

GradientIds = tuple[int, int, int]
"""Of a gradient as autograd leaves it, of its copy that is kept, and of what is reduced."""


def _ids(unit: Unit, count: int, shared: int) -> list[GradientIds]:
    """Of ``count`` gradients, before which ``shared`` of other modules wait."""
    if unit.alone:
        first = WITHIN if unit.of_experts else 0
        numbers = range(first, first + count)
        return [(Scope.KEPT.id(at), Scope.KEPT.id(COPIES + at), Scope.KEPT.id(PLACED + at)) for at in numbers]
    return [(Scope.GRADIENTS.id(at), Scope.COPIES.id(at), Scope.PLACED.id(at)) for at in range(shared, shared + count)]


@lru_cache(maxsize=256)
def _with_hooks(
    spans: tuple[Span, ...], units: tuple[Unit, ...], end: str, sharding: Sharding, roles: tuple[Role, Role]
) -> tuple[Span, ...]:
    own = owned(spans, units, sharding)
    passes = passes_of(own, units, own.place(end), sharding, roles)
    cast = sharding.reduce != sharding.compute
    adds = roles[0].adds and not cast, roles[1].adds and not cast
    return tuple(
        Span(hooked(module, ids, (one, two), adds), (name,))
        for (module, name), ids, one, two in zip(own.modules, own.renamed, *passes, strict=True)
    )


def passes_of(own: Owned, units: tuple[Unit, ...], last: int, sharding: Sharding, roles: tuple[Role, Role]) -> Passes:
    """What hooks do around modules in a row, of which the model's own end with number ``last``."""
    modules = [module for module, _ in own.modules]
    again = frozenset(place for place, module in enumerate(modules) if recomputes(module.first.backward))
    rerun = frozenset(place for place, module in enumerate(modules) if reruns(module.first.backward))
    around = len(modules), last, lowest_of(own.modules), again, rerun
    return _passes_of(units, sharding, tuple(map(tuple, own.gradients)), roles, around)


@lru_cache(maxsize=64)
def _passes_of(
    units: tuple[Unit, ...],
    sharding: Sharding,
    gradients: tuple[tuple[Gradient, ...], ...],
    roles: tuple[Role, Role],
    around: tuple[int, int, int, frozenset[int], frozenset[int]],
) -> Passes:
    """The same whatever the modules compute with their parameters; ``around`` as of ``pass_through``."""

    def run(role: Role, *, beside: bool = False) -> tuple[Explicit, list[Around]]:
        hooks = hooks_of(units, sharding, gradients, role, beside=beside)
        return hooks, pass_through(hooks, *around)

    first, steady = roles
    hooks, found = run(first, beside=roles == (Role.FIRST, Role.STEADY))
    if first is steady:
        return found, found
    if not hooks.beside:
        return found, run(steady)[1]
    return found, [Around(*(hooks.steady.get(id(tape), tape) for tape in around)) for around in found]


def _gradient(hold: Hold, ids: GradientIds, sharding: Sharding) -> Gradient:
    placement, whole = hold.name.rpartition("/")[2], prod(kept_of(hold.name, hold.shape))
    id, kept, placed = ids
    elements = whole // sharding.tensor if placement == REPLICATED else whole
    moves = placement in (PARTIAL, REPLICATED)
    return Gradient(Drop(id, hold.bytes, hold.category), elements, whole, kept, placed if moves else None)


def _in_order(gradients: Sequence[Gradient], parameters: Sequence[Parameter]) -> list[Gradient]:
    """A unit's gradients in the order of its parameters; among equal sizes any, but the embedding's, which comes
    first, before the head's: tensor parallelism leaves it in another placement. A unit's may all be made elsewhere.
    One may be a view of a larger tensor, as that of a token put before an image's patches, of one image."""
    left = list(gradients)
    result = []
    for parameter in (one for one in parameters if one.trained and left):
        equal = [gradient for gradient in left if gradient.elements == parameter.elements]
        larger = [gradient for gradient in left if gradient.elements > parameter.elements]
        one = min(equal or larger, key=lambda gradient: (gradient.placed is None, gradient.elements))
        left.remove(one)
        result.append(one if equal else replace(one, elements=parameter.elements))
    return result


def managed(units: Sequence[Unit], modules: int) -> list[list[int]]:
    """The modules whose parameters each unit manages: those that no unit inside it does, last first. A unit that takes
    some of these alone has them with the one around it."""
    result: list[list[int]] = [[] for _ in units]
    inmost: dict[int, int] = {}
    for at, unit in enumerate(units):
        if not unit.of_experts and not unit.only:
            inmost |= dict.fromkeys(range(unit.first, unit.last + 1), at)
    for place in reversed(range(modules)):
        if place in inmost:
            result[inmost[place]].append(place)
    for at, unit in enumerate(units):
        if unit.of_experts:
            result[at].append(unit.first)
        if unit.only:
            alone = {place for place, inside in inmost.items() if units[inside].alone}
            result[at] += [place for place in reversed(range(unit.first, unit.last + 1)) if place not in alone]
    return result


def managed_parameters(
    spans: Sequence[Span],
    units: Sequence[Unit],
    ordered: Callable[[tuple[Parameter, ...], tuple[str, ...]], tuple[Parameter, ...]],
) -> list[tuple[Parameter, ...]]:
    """Parameters of each unit, in the order of the model's modules until they are ``ordered``: one object for units of
    the same modules."""
    modules = [span.module for span in spans for _ in span.names]
    apart, split = {unit.first for unit in units if unit.of_experts}, any(unit.only for unit in units)
    known: dict[object, tuple[Parameter, ...]] = {}
    result = []
    for unit, places in zip(units, managed(units, len(modules)), strict=True):
        key = unit.of_experts, unit.only, tuple([(id(modules[place]), place in apart) for place in places])
        if key not in known:
            known[key] = ordered(
                tuple(
                    one
                    for place in reversed(places)
                    for one in modules[place].parameters
                    if (place not in apart or one.expert == unit.of_experts)
                    and (not split or taken_by(unit, units, one.name))
                ),
                unit.only,
            )
        result.append(known[key])
    return result


def with_parameters(
    spans: Sequence[Span], units: Sequence[Unit], registered: tuple[str, ...], storage: str = ""
) -> tuple[Unit, ...]:
    """``units`` with the parameters that they manage, in the order in which the model registers them; 4-bit weights are
    packed into numbers of the dtype ``storage``, or are no unit's without one. A unit of ``only`` some modules has them
    in that order."""

    def ordered(own: tuple[Parameter, ...], named: tuple[str, ...]) -> tuple[Parameter, ...]:
        own = tuple(packed(one, storage) for one in own if storage or one.four_bit is None)
        if named:
            return tuple(sorted(own, key=lambda one: named.index(one.name.partition(".")[0])))
        return tuple(sorted(own, key=lambda one: registered_place(one.name, registered)))

    managed = managed_parameters(spans, units, ordered)
    return tuple(replace(unit, parameters=own) for unit, own in zip(units, managed, strict=True))


def with_seams(options: Options) -> Options:
    """Hooks run around every module, while its caller still holds what it has given."""
    return replace(options, seams=True, holds_input=True)


@lru_cache(maxsize=1024)
def with_stored(module: Module, frozen: str, trained: str) -> Module:
    """``module``, whose parameters are in the dtype of compute when they are gathered, with the dtypes of shards."""
    parameters = tuple(replace(one, dtype=trained if one.trained else frozen) for one in module.parameters)
    return replace(module, parameters=parameters)
