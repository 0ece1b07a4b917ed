"""One rank's iteration as PyTorch's pipeline schedules run it: passes of its stages, one after the other.

A *part* is a stage: its modules, and what the schedule does with its parameters besides. What outlives a
pass (outputs, gradients of inputs, losses) ends where the schedule says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .layers.module import GRAD_OUTPUT, INPUT, Module, Tapes
from .pipeline.torch_schedules import Action, Tensor, What
from .tape import NOTHING, Bytes, Category, Drop, Excursion, Hold, Tape, change, compose, fold

if TYPE_CHECKING:
    from .program import Span


class Segment(NamedTuple):
    """What hooks do for one module outside of its passes."""

    place: int
    """The module's in its stage."""
    name: str
    events: Tape


@dataclass(frozen=True, slots=True)
class Lasting:
    """A tensor that a pass hands to the schedule."""

    place: int
    """Of the module that makes it."""
    hold: Hold


@dataclass(frozen=True, eq=False)
class Part:
    """One stage. ``first`` tapes are those of the first micro-batch, ``steady`` ones those of all others."""

    spans: tuple[Span, ...]
    """One for each module."""
    losses: tuple[Span, ...]
    """The loss outside of the model, in the last stage."""
    segments: Mapping[What, tuple[Segment, ...]]
    _passes: dict[tuple[What, bool], Excursion] = field(default_factory=dict, repr=False)

    @property
    def modules(self) -> list[tuple[Module, str]]:
        return [(span.module, span.names[0]) for span in (*self.spans, *self.losses)]

    def handed(self, place: int, first: bool, *, backward: bool) -> tuple[int, int]:
        """Where what the module at ``place`` hands on was made, and its id there: the output, or the gradient of
        the input. A module may hand on what it was given."""
        tapes = tapes_of(self.modules[place][0], first)
        id = tapes.grad_input if backward else tapes.output
        if id == (GRAD_OUTPUT if backward else INPUT):
            return self.handed(place + 1 if backward else place - 1, first, backward=backward)
        return place, id

    def lasting(self, tensor: Tensor, first: bool) -> Lasting | None:
        """``tensor`` as the first or another micro-batch makes it; ``None`` where this stage has none."""
        if tensor in ("loss", "loss_gradient"):
            if not self.losses:
                return None
            tapes = tapes_of(self.losses[0].module, first)
            tape, name = (tapes.forward, "loss") if tensor == "loss" else (tapes.backward, "grad_loss")
            return Lasting(len(self.spans), named_hold(tape, name))
        backward = tensor == "input_gradient"
        place, id = self.handed(0 if backward else len(self.spans) - 1, first, backward=backward)
        tapes = tapes_of(self.modules[place][0], first)
        tape = tapes.backward if backward else tapes.forward
        found = (event for event in tape if isinstance(event, Hold) and event.tensor == id)
        return next((Lasting(place, hold) for hold in found), None)

    @cached_property
    def ends(self) -> dict[Tensor, Excursion]:
        """Of each tensor that outlives its pass."""
        tensors: tuple[Tensor, ...] = ("output", "input_gradient", "loss", "loss_gradient")
        found = {tensor: self.lasting(tensor, True) for tensor in tensors}
        return {tensor: change(-one.hold.bytes, one.hold.category) for tensor, one in found.items() if one is not None}

    def excursion(self, what: What, first: bool) -> Excursion:
        """Of a pass, or of what hooks do besides; ``first``: for the first micro-batch."""
        found = self._passes.get((what, first))
        if found is None:
            found = self._passes[what, first] = compose(self._excursions(what, first))
        return found

    def _excursions(self, what: What, first: bool) -> list[Excursion]:
        if what in ("forward", "loss"):
            spans = self.spans if what == "forward" else self.losses
            return [_within(tapes_of(span.module, first).forward_fold, "forward", span) for span in spans]
        if what == "backward":
            spans = (*self.spans, *self.losses)[::-1]
            return [_within(tapes_of(span.module, first).backward_fold, "backward", span) for span in spans]
        phase = "backward" if what == "reduce" else "forward"
        return [fold(one.events).within(f"{phase}/{one.name}") for one in self.segments.get(what, ())]


def tapes_of(module: Module, first: bool) -> Tapes:
    return module.first if first else module.steady


def named_hold(tape: Tape, name: str) -> Hold:
    """The first tensor called ``name``."""
    return next(event for event in tape if isinstance(event, Hold) and event.name == name)


def _within(excursion: Excursion, phase: str, span: Span) -> Excursion:
    return excursion.within(f"{phase}/{span.names[0]}")


@dataclass(frozen=True, eq=False)
class Timeline:
    """What a rank's schedule does with its stages."""

    parts: tuple[Part, ...]
    actions: Sequence[Action]
    shortened: Sequence[Action]
    """As many of the actions as show everything that repeats, for the allocator's replay."""
    merged: Hold | None = None
    """The outputs of all micro-batches in one tensor, where they are kept (``return_outputs``)."""
    kept: int = 0
    """Outputs that the iteration before has left."""

    def excursion(self, action: Action) -> Excursion:
        part = self.parts[action.chunk]
        if action.what == "end":
            assert action.tensor is not None
            return part.ends[action.tensor]
        if action.what == "merge":
            assert self.merged is not None
            merged = (self.merged, Drop(self.merged.tensor, self.merged.bytes, self.merged.category))
            return fold(merged).within(f"{action.microbatch}/forward/outputs")
        if action.what == "begin":
            assert action.tensor is not None
            ended = part.ends[action.tensor].net_by
            return compose(change(-size, Category(at)) for at, size in enumerate(ended) if size)
        return part.excursion(action.what, action.microbatch == 0).within(str(action.microbatch))

    @cached_property
    def carried(self) -> Bytes:
        """Bytes by category that one iteration leaves to the next."""
        if not self.kept:
            return NOTHING
        return tuple(-self.kept * size for size in self.parts[-1].ends["output"].net_by)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Bytes beyond the static ones in front of each action."""
        result, level = [], 0
        for action in self.actions:
            result.append(level)
            level += self.excursion(action).net
        return tuple(result)

    @cached_property
    def whole(self) -> Excursion:
        """All passes; what is left are the gradients."""
        total = compose(map(self.excursion, self.actions))
        left = [Category(at).key for at, size in enumerate(total.net_by) if size and at != Category.GRADIENTS]
        assert not left, f"an iteration leaves {', '.join(left)} behind"
        return total

    @cached_property
    def after_forward(self) -> int:
        """Bytes beyond the static ones behind the first forward pass."""
        at = next(at for at, action in enumerate(self.actions) if action.what == "forward")
        return self.levels[at + 1]

    @property
    def flight(self) -> int:
        """Micro-batches of one stage whose activations are alive at once, at most; the largest sum over stages."""
        alive = most = 0
        for action in self.actions:
            alive += (action.what == "forward") - (action.what == "backward")
            most = max(most, alive)
        return most
