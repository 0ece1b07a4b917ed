"""Tapes of modules with what DeepSpeed inserts at their seams: gathers, releases, buckets of gradients.

A micro-batch of the whole model is walked once, forward and backward; every instance of a module gets
tapes of its own, since what is gathered while it runs belongs to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from ..layers.autograd import ITEMSIZE
from ..layers.module import Module, Parameter
from ..tape import Category, Drop, Event, Hold, Seam, Tape, rounded
from .zero_config import Zero
from .zero_coordinator import Change, Coordinator, Sharded, Step
from .zero_hooks import FAMILIES, NONE, Hooks
from .zero_modules import TIED, Instance
from .zero_pieces import Role, pieces
from .zero_recorder import Mark

ACROSS = -(1 << 25)
"""Ids at and below are of tensors that outlive the module that they begin in: gathered parameters here,"""
GRADIENTS = ACROSS - (1 << 23)
"""gradients by parameter,"""
BUCKETS = ACROSS - (1 << 24)
"""and buckets with their temporaries."""


class Reducer(Protocol):
    """What a gradient's arrival sets off."""

    def arrived(self, id: int, elements: int, size: int) -> tuple[Tape, bool]:
        """Events while the gradient of parameter ``id`` is still there, and whether it stays behind them."""

    def finished(self) -> Tape:
        """Events at the end of a micro-batch's backward."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """No reduction before the step: gradients stay (``first``), or are added to those that do."""

    first: bool
    before_first: Tape = ()
    """Events when the first gradient of all arrives."""
    seen: list[int] = field(default_factory=list)

    def arrived(self, id: int, elements: int, size: int) -> tuple[Tape, bool]:
        begun = self.before_first if not self.seen else ()
        self.seen.append(id)
        return begun, self.first

    def finished(self) -> Tape:
        return ()


@dataclass(frozen=True)
class Model:
    """The modules of a model and its parameters by id, which is their place in ``model.parameters()``."""

    instances: tuple[Instance, ...]
    parameters: tuple[Parameter, ...]
    ids: dict[str, int]
    family: str
    tied: bool
    dtype: str

    def hooks(self, at: int) -> Hooks:
        return FAMILIES[self.family].get(self.instances[at].hooked.module.name, NONE)

    def id_of(self, instance: Instance, name: str) -> int:
        return self.ids[instance.qualified(name, self.tied)]

    def bytes(self, id: int) -> int:
        return self.parameters[id].bytes(self.dtype)

    @cached_property
    def _known(self) -> dict[tuple[int, str], Step]:
        return {}

    def step(self, at: int, module: str) -> Step:
        """A submodule of instance ``at`` runs, known by its weight's name."""
        found = self._known.get((at, module))
        if found is None:
            instance = self.instances[at]
            names = instance.hooked.reads
            ids = tuple(self.id_of(instance, name) for name in names[module])
            found = self._known[at, module] = Step(at * 64 + list(names).index(module), ids)
        return found


@dataclass(frozen=True)
class Woven:
    """One micro-batch, module by module, and what it moved."""

    forward: tuple[Tape, ...]
    backward: tuple[Tape, ...]
    """By instance, in the order of ``Model.instances``."""
    coordinator: Coordinator | None


def weave(model: Model, zero: Zero, dp: int, reducer: Reducer, *, first: bool) -> Woven:
    """``first``: gradients appear, rather than being added to."""
    role: Role = "first" if first else "steady"
    count = len(model.instances)
    coordinator = coordinator_of(model, zero, dp, role) if zero.stage == 3 else None
    walk = _Walk(model, coordinator, reducer, role)
    forward = tuple(walk.tape(at) for at in range(count))
    walk.backward = True
    backward = [walk.tape(at) for at in reversed(range(count))]
    backward[-1] = (*backward[-1], *reducer.finished(), *walk.leftovers())
    return Woven(forward, tuple(walk.renamed(at, tape) for at, tape in enumerate(reversed(backward))), coordinator)


def weave_evaluation(model: Model, zero: Zero, dp: int) -> tuple[Tape, ...]:
    """Forward alone, without a graph."""
    coordinator = coordinator_of(model, zero, dp, "evaluation") if zero.stage == 3 else None
    walk = _Walk(model, coordinator, Keeping(True), "evaluation")
    return tuple(walk.tape(at) for at in range(len(model.instances)))


def modules(model: Model, first: Woven, steady: Woven, evaluation: Sequence[Tape]) -> tuple[Module, ...]:
    """One module for each instance, with its woven tapes."""
    result = []
    for at, instance in enumerate(model.instances):
        module = instance.hooked.module
        result.append(
            replace(
                module,
                first=replace(module.first, forward=first.forward[at], backward=first.backward[at]),
                steady=replace(module.steady, forward=steady.forward[at], backward=steady.backward[at]),
                evaluation=evaluation[at],
            )
        )
    return tuple(result)


def coordinator_of(model: Model, zero: Zero, dp: int, role: Role) -> Coordinator:
    """The coordinator with a complete trace of one pass."""
    count = len(model.instances)
    steps = [step for at in range(count) for step in _steps(model, at, role, False)]
    if role != "evaluation":
        steps += [step for at in reversed(range(count)) for step in _steps(model, at, role, True)]
    return Coordinator(zero, dp, sharded(model, zero), tuple(steps))


def sharded(model: Model, zero: Zero) -> tuple[Sharded, ...]:
    """``mark_persistent_parameters``: small ones stay whole, up to a limit for all of them."""
    result, total = [], 0
    for id, parameter in enumerate(model.parameters):
        n = parameter.elements
        persists = n <= zero.stage3_param_persistence_threshold and total + n <= zero.stage3_model_persistence_threshold
        total += n if persists else 0
        result.append(Sharded(id, n, persists))
    return tuple(result)


def _steps(model: Model, at: int, role: Role, backward: bool) -> list[Step]:
    steps: list[Step] = []
    for _, mark, passed in pieces(model.instances[at].hooked, model.family, role, backward=backward):
        if mark is None or mark.kind == "gradient":
            steps += [EMPTY] * passed
            continue
        steps += [EMPTY] * _without_parameters(model, at, mark, backward)
        if mark.kind == "fetch":
            steps.append(model.step(at, mark.name))
    return steps


EMPTY = Step(-1, ())
"""A module without parameters."""


def _without_parameters(model: Model, at: int, mark: Mark, backward: bool) -> int:
    """How many modules without parameters run at this seam."""
    recomputing = backward and not mark.backward
    return model.hooks(at).around(
        mark.name, behind=mark.kind == "release", backward=mark.backward, recomputing=recomputing
    )


class _Walk:
    """One pass over the model, with what hooks insert."""

    def __init__(self, model: Model, coordinator: Coordinator | None, reducer: Reducer, role: Role) -> None:
        self.model = model
        self.role = role
        self.coordinator = coordinator
        self.reducer = reducer
        self.names: list[dict[int, int]] = [{} for _ in model.instances]
        """Gradients that outlive their module: shared ids by their own."""
        self.gradients: list[set[int]] = [set() for _ in model.instances]
        self.backward = False
        self.unhooked: list[Step] = []
        self.waits: Drop | None = None
        """A tied parameter's gradient from the head, until the embedding's arrives."""

    def tape(self, at: int) -> Tape:
        result: list[Event] = []
        gone: set[int] = set()
        hooked = self.model.instances[at].hooked
        for events, mark, passed in pieces(hooked, self.model.family, self.role, backward=self.backward):
            result += [event for event in events if not _ends(event, gone)] if gone else events
            if mark is not None and mark.kind == "gradient":
                result += self._gradient(at, mark, gone)
            elif self.coordinator is not None:
                result += self._events(self._passed(passed)) if mark is None else self._hook(at, mark)
        return tuple(result)

    def leftovers(self) -> Tape:
        return self._events(self.coordinator.leftovers(self.unhooked)) if self.coordinator is not None else ()

    def renamed(self, at: int, tape: Tape) -> Tape:
        """``tape`` with gradients in their category, and shared ids where they outlive the module."""
        names, gradients = self.names[at], self.gradients[at]
        if not gradients:
            return tape
        return tuple(
            event._replace(tensor=names.get(event.tensor, event.tensor), category=Category.GRADIENTS)
            if not isinstance(event, Seam) and event.tensor in gradients
            else event
            for event in tape
        )

    def _hook(self, at: int, mark: Mark) -> Tape:
        assert self.coordinator is not None
        step = self.model.step(at, mark.name)
        others = _without_parameters(self.model, at, mark, self.backward)
        if mark.kind == "release":
            changes = self.coordinator.release(step)
            return self._events([*changes, *self._passed(others)])
        if mark.backward and mark.name in self.model.instances[at].hooked.unhooked:
            self.unhooked.append(step)
        return self._events([*self._passed(others), *self.coordinator.fetch()])

    def _passed(self, modules: int) -> list[Change]:
        assert self.coordinator is not None
        return [change for _ in range(modules) for change in self.coordinator.fetch()]

    def _events(self, changes: Sequence[Change]) -> Tape:
        return tuple(self._event(change) for change in changes)

    def _event(self, change: Change) -> Event:
        size = rounded(abs(change.elements) * ITEMSIZE[self.model.dtype])
        id, kept = ACROSS - change.buffer, Category.GATHERED_PARAMETERS
        if change.elements < 0:
            return Drop(id, size, kept)
        return Hold(id, size, kept, change.what, (change.elements,), self.model.dtype)

    def _gradient(self, at: int, mark: Mark, gone: set[int]) -> Tape:
        instance = self.model.instances[at]
        id = self.model.id_of(instance, mark.name)
        size = self.model.bytes(id)
        self.gradients[at].add(mark.tensor)
        if self.model.tied and mark.name == TIED:
            return self._tied(at, mark, id, size, gone)
        before, stays = self.reducer.arrived(id, self.model.parameters[id].elements, size)
        if stays:
            self._outlives(at, mark.tensor, id, gone)
        return before

    def _outlives(self, at: int, tensor: int, id: int, gone: set[int]) -> None:
        self.names[at][tensor] = GRADIENTS - id
        gone.add(tensor)

    def _tied(self, at: int, mark: Mark, id: int, size: int, gone: set[int]) -> Tape:
        """The engine adds the embedding's gradient to the head's, which has waited for it, and then the hook runs."""
        drop = Drop(GRADIENTS - id, size, Category.GRADIENTS)
        if self.waits is None:
            self.waits = drop
            self._outlives(at, mark.tensor, id, gone)
            return ()
        self.waits = None
        own = Drop(mark.tensor, size, Category.GRADIENTS)
        gone.add(mark.tensor)
        before, stays = self.reducer.arrived(id, self.model.parameters[id].elements, size)
        return (own, *before) if stays else (own, *before, drop)


def _ends(event: Event, gone: set[int]) -> bool:
    return isinstance(event, Drop) and event.tensor in gone
