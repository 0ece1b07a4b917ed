"""Tapes of modules with what DeepSpeed's hooks insert: gathers, releases, buckets of gradients.

A micro-batch of the whole model is walked once, forward and backward; every instance of a module gets
tapes of its own, since what is gathered while it runs belongs to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal, Protocol

from ...layers.autograd import ITEMSIZE
from ...layers.module import Module
from ...tape.events import Category, Drop, Event, Hold, Hook, Scope, Seam, Tape, cut, insert, rounded
from ...values import dataclass, replace
from ..plain.hooked import TIED, Model
from ..plain.hooked_recorder import BASE, NO_PARAMETERS, SAVED
from .config import Zero
from .coordinator import NO_MODULE, Change, Coordinator, Pass, Sharded, Step

Role = Literal["first", "steady", "evaluation"]
"""Gradients appear, or are added to those that do; or there is no graph."""


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
class Inserted:
    """One micro-batch with what hooks insert, by instance in the order of ``Model.instances``."""

    forward: tuple[Tape, ...]
    backward: tuple[Tape, ...]
    coordinator: Coordinator | None = None


def insert_hooks(model: Model, zero: Zero, dp: int, reducer: Reducer, *, first: bool) -> Inserted:
    """``first``: gradients appear, rather than being added to."""
    role: Role = "first" if first else "steady"
    count = len(model.instances)
    coordinator = coordinator_of(model, zero, dp, role) if zero.stage == 3 else None
    hooks = _Hooks(model, coordinator, reducer, role)
    forward = tuple(hooks.tape(at, backward=False) for at in range(count))
    backward = [hooks.tape(at, backward=True) for at in reversed(range(count))]
    backward[-1] = (*backward[-1], *reducer.finished(), *hooks.leftovers())
    renamed = tuple(hooks.renamed(at, tape) for at, tape in enumerate(reversed(backward)))
    return Inserted(forward, renamed, coordinator)


def insert_into_evaluation(model: Model, zero: Zero, dp: int) -> tuple[Tape, ...]:
    """Forward alone, without a graph."""
    coordinator = coordinator_of(model, zero, dp, "evaluation") if zero.stage == 3 else None
    hooks = _Hooks(model, coordinator, Keeping(True), "evaluation")
    return tuple(hooks.tape(at, backward=False) for at in range(len(model.instances)))


def modules(model: Model, first: Inserted, steady: Inserted, evaluation: Sequence[Tape]) -> tuple[Module, ...]:
    """One module for each instance, with what hooks insert."""
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
    steps = [*_root(model), *(step for at in range(count) for step in _steps(model, at, role, backward=False))]
    if role != "evaluation":
        steps += [step for at in reversed(range(count)) for step in _steps(model, at, role, backward=True)]
    return Coordinator(zero, dp, sharded(model, zero), tuple(steps))


def sharded(model: Model, zero: Zero) -> tuple[Sharded, ...]:
    """``mark_persistent_parameters``: small ones stay whole, up to a limit for all of them."""
    result, total = [], 0
    for id, parameter in enumerate(model.parameters):
        n = parameter.elements
        persists = n <= zero.stage3_param_persistence_threshold and total + n <= zero.stage3_model_persistence_threshold
        total += n if persists else 0
        result.append(Sharded(id, n, persists, parameter.trained))
    return tuple(result)


BEFORE = (Hook.BEFORE_FORWARD, Hook.BEFORE_BACKWARD)

BACKWARD = (Hook.BEFORE_BACKWARD, Hook.AFTER_BACKWARD)

EMPTY = Step(NO_MODULE, ())
"""A submodule without parameters."""

ROOT, BASE_MODEL = -2, -3
"""Numbers of the model itself, and of the base model in it."""


def _steps(model: Model, at: int, role: Role, *, backward: bool) -> list[Step]:
    seams = (seam for _, seam in cut(_tape(model, at, role, backward=backward)) if seam is not None)
    seams = (seam for seam in seams if seam.hook in BEFORE and not _passes(model, at, seam))
    return [EMPTY if seam.name == NO_PARAMETERS else _step(model, at, seam) for seam in seams]


def _is_outside(model: Model, at: int, seam: Seam) -> bool:
    """The product with the weight that the model's own forward reads."""
    return bool(at) and seam.name == model.outside != NO_PARAMETERS


def _passes(model: Model, at: int, seam: Seam) -> bool:
    """No hook runs there: the weight has been gathered with the model's own forward, which it is registered with
    (``ZeROOrderedDict.__getitem__``, ``register_external_parameter``), and ends with that."""
    return _is_outside(model, at, seam) and seam.hook in (Hook.BEFORE_FORWARD, Hook.AFTER_BACKWARD)


def _root(model: Model) -> list[Step]:
    """The model's own step, where it has a parameter."""
    if not model.outside:
        return []
    return [Step(ROOT, (model.id_of(model.instances[-1], model.outside),))]


def _step(model: Model, at: int, seam: Seam) -> Step:
    if seam.name == BASE:
        return Step(BASE_MODEL, (model.id_of(model.instances[0], TIED),))
    if _is_outside(model, at, seam):
        return _root(model)[0]
    return Step(*model.reads(at, seam.name), seam.name == model.instances[at].hooked.leaf)


def _tape(model: Model, at: int, role: Role, *, backward: bool) -> Tape:
    module = model.instances[at].hooked.module
    if role == "evaluation":
        return module.evaluation
    tapes = module.first if role == "first" else module.steady
    return tapes.backward if backward else tapes.forward


class _Hooks:
    """What hooks insert in one pass over the model."""

    def __init__(self, model: Model, coordinator: Coordinator | None, reducer: Reducer, role: Role) -> None:
        self.model = model
        self.role = role
        self.coordinator = coordinator
        self.reducer = reducer
        self.names: list[dict[int, int]] = [{} for _ in model.instances]
        """Gradients that outlive their module: shared ids by their own."""
        self.gradients: list[set[int]] = [set() for _ in model.instances]
        self.unhooked: list[Step] = []
        self.whole: dict[tuple[int, bool], set[str]] = {}
        """Weights of parts that are not released behind their forward, by instance and whether that runs again: what
        nodes have saved of them is no copy."""
        self.waits: Drop | None = None
        """A tied parameter's gradient from the head, until the embedding's arrives."""

    def tape(self, at: int, *, backward: bool) -> Tape:
        """That of instance ``at``."""
        taken: set[int] = set()

        def events(seam: Seam) -> Sequence[Event]:
            if seam.hook is Hook.GRADIENT:
                return self._gradient(at, seam, taken)
            return self._hook(at, seam, self.coordinator, backward) if self.coordinator is not None else ()

        begun: Sequence[Event] = ()
        if self.coordinator is not None and self.model.outside and not (at or backward):
            begun = self._events(self.coordinator.fetch())
        made = insert(_tape(self.model, at, self.role, backward=backward), events, taken)
        return self._without_whole(at, (*begun, *made) if begun else made)

    def _without_whole(self, at: int, tape: Tape) -> Tape:
        gone: set[int] = set()
        for again in (False, True):
            names = {f"{name}{SAVED}" for name in self.whole.get((at, again), ())}
            events = _tape(self.model, at, self.role, backward=again) if names else ()
            gone |= {event.tensor for event in events if isinstance(event, Hold) and event.name in names}
        if not gone:
            return tape
        return tuple(event for event in tape if isinstance(event, Seam) or event.tensor not in gone)

    def leftovers(self) -> Sequence[Event]:
        return self._events(self.coordinator.leftovers(self.unhooked)) if self.coordinator is not None else ()

    def renamed(self, at: int, tape: Tape) -> Tape:
        """``tape`` with gradients in their category, and shared ids where they outlive the module."""
        names, gradients = self.names[at], self.gradients[at]
        if not gradients:
            return tape
        return tuple(
            [
                event._replace(tensor=names.get(event.tensor, event.tensor), category=Category.GRADIENTS)
                if event.tensor in gradients and not isinstance(event, Seam)
                else event
                for event in tape
            ]
        )

    def _hook(self, at: int, seam: Seam, coordinator: Coordinator, backward: bool) -> Sequence[Event]:
        during: Pass = "backward" if seam.hook in BACKWARD else "recompute" if backward else "forward"
        if _passes(self.model, at, seam):
            return ()
        if seam.name == NO_PARAMETERS:
            return self._events(coordinator.fetch(during))
        step = _step(self.model, at, seam)
        if seam.hook not in BEFORE:
            changes = coordinator.release(step, during)
            hooked = self.model.instances[at].hooked
            if during != "backward" and seam.name in (hooked.leaf, *hooked.parts):
                named = zip(hooked.reads[seam.name], step.parameters, strict=True)
                kept = {name for name, id in named if not coordinator.is_released(id)}
                self.whole.setdefault((at, backward), set()).update(kept)
            return self._events(changes)
        unhooked = seam.name in self.model.instances[at].hooked.unhooked or step.module in (ROOT, BASE_MODEL)
        if seam.hook is Hook.BEFORE_BACKWARD and unhooked:
            self.unhooked.append(step)
        return self._events(coordinator.fetch(during))

    def _events(self, changes: Sequence[Change]) -> list[Event]:
        return [self._event(change) for change in changes]

    def _event(self, change: Change) -> Event:
        size = rounded(abs(change.elements) * ITEMSIZE[self.model.dtype])
        id, kept = Scope.GATHERED.id(change.buffer), Category.GATHERED_PARAMETERS
        if change.elements < 0:
            return Drop(id, size, kept)
        return Hold(id, size, kept, change.what, (change.elements,), self.model.dtype)

    def _gradient(self, at: int, seam: Seam, taken: set[int]) -> Tape:
        id = self.model.id_of(self.model.instances[at], seam.name)
        size = self.model.bytes(id)
        for place in {at, self.model.makers.get(seam.tensor, at)}:
            self.gradients[place].add(seam.tensor)
        if self.model.tied and seam.name == TIED:
            return self._tied(at, seam, id, size, taken)
        before, stays = self.reducer.arrived(id, self.model.parameters[id].elements, size)
        if stays:
            self._outlives(at, seam.tensor, id, taken)
        return before

    def _outlives(self, at: int, tensor: int, id: int, taken: set[int]) -> None:
        self.names[self.model.makers.get(tensor, at)][tensor] = Scope.GRADIENTS.id(id)
        taken.add(tensor)

    def _tied(self, at: int, seam: Seam, id: int, size: int, taken: set[int]) -> Tape:
        """The engine adds the embedding's gradient to the head's, which has waited for it, and then the hook runs."""
        drop = Drop(Scope.GRADIENTS.id(id), size, Category.GRADIENTS)
        if self.waits is None:
            self.waits = drop
            self._outlives(at, seam.tensor, id, taken)
            return ()
        self.waits = None
        own = Drop(seam.tensor, size, Category.GRADIENTS)
        taken.add(seam.tensor)
        before, stays = self.reducer.arrived(id, self.model.parameters[id].elements, size)
        return (own, *before) if stays else (own, *before, drop)
