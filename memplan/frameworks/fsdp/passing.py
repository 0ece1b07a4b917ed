"""What hooks of either FSDP do while a micro-batch passes a model's modules: around each module, and in its middle."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal, Protocol

from ...layers.fused_losses import CHUNKS
from ...layers.recompute import RERUN
from ...layers.titan_moe import AGAIN, EXPERTS
from ...tape.events import Hook, Seam, Tape
from ...values import NamedTuple

OWN = "own"
"""Seams in a module that does more than what a unit wraps: where its forward ends, and where its backward begins."""


class Around(NamedTuple):
    """What hooks do around one module."""

    before_forward: Tape
    after_forward: Tape
    before_backward: Tape
    after_backward: Tape
    before_inner: Tape = ()
    """Of a unit in the middle of the module, or of one that the loss gathers for its chunks (and of one that wraps less
    than the module: where its forward ends and its backward begins),"""
    after_inner: Tape = ()
    again_inner: Tape = ()
    """of its forward when it is recomputed, behind which nothing is resharded (``is_bw``), but what was gathered ends:
    the unit is that pass's root (``iter_forward_root``),"""
    over_inner: Tape = ()
    """and behind it; of a whole module that runs again first (``RERUN``), what its own unit does then."""
    before_inner_backward: Tape = ()
    after_inner_backward: Tape = ()

    def at(self, seam: Seam) -> Tape:
        """Events of the hook at ``seam``."""
        if seam.name == RERUN:
            return self.over_inner
        if seam.name == AGAIN:
            return self.again_inner if seam.hook is Hook.BEFORE_FORWARD else self.over_inner
        if seam.name in (EXPERTS, CHUNKS, OWN):
            return self._inner(seam)
        match seam.hook:
            case Hook.BEFORE_FORWARD:
                return self.before_forward
            case Hook.AFTER_FORWARD:
                return self.after_forward
            case Hook.BEFORE_BACKWARD:
                return self.before_backward
            case Hook.AFTER_BACKWARD:
                return self.after_backward
        return ()

    def _inner(self, seam: Seam) -> Tape:
        match seam.hook:
            case Hook.BEFORE_FORWARD:
                return self.before_inner
            case Hook.AFTER_FORWARD:
                return self.after_inner
            case Hook.BEFORE_BACKWARD:
                return self.before_inner_backward
        return self.after_inner_backward


def reruns(backward: Tape) -> bool:
    """Whether a module runs again, whole, in its backward, before anything of that."""
    return any(isinstance(event, Seam) and event.name == RERUN for event in backward)


def recomputes(backward: Tape) -> bool:
    """Whether a module's experts run again in its backward."""
    return any(isinstance(event, Seam) and event.name == AGAIN for event in backward)


class Spanning(Protocol):
    """A unit, by the modules that it spans."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def with_gradient(self) -> bool: ...
    @property
    def inner(self) -> bool: ...
    @property
    def narrow(self) -> bool: ...


class Running(Protocol):
    """Hooks of units, of either FSDP."""

    @property
    def units(self) -> Sequence[Spanning]: ...
    def pre_forward(self, at: int) -> None: ...
    def post_forward(self, at: int) -> None: ...
    def flush(self) -> None: ...
    def pre_backward(self, at: int) -> None: ...
    def post_backward(self, at: int) -> None: ...
    def finalise(self) -> None: ...
    def take(self) -> Tape: ...


def pass_through(
    hooks: Running,
    modules: int,
    end: int,
    lowest: int = 0,
    again: Container[int] = (),
    rerun: Container[int] = (),
) -> list[Around]:
    """What ``hooks`` do while a micro-batch passes ``modules`` modules; the model's own end with number ``end``, and
    those below ``lowest`` have no backward. Units in the middle of modules ``again`` are run anew in backward; modules
    ``rerun`` are so, whole, before their own backward (``CheckpointFunction``): hooks of forward run first, as of a
    pass whose root the unit is (``iter_forward_root``), and nothing is resharded behind it (``is_bw``)."""
    units = hooks.units
    forward: list[tuple[Tape, Tape]] = []
    backward: list[tuple[Tape, Tape]] = []
    within: dict[int, tuple[Tape, ...]] = {}
    inner = {unit.first: at for at, unit in enumerate(units) if unit.inner}
    begins, ends = _by_place(units, "first"), _by_place(units, "last")
    for place in range(modules):
        for at in begins.get(place, ()):
            hooks.pre_forward(at)
        before = hooks.take()
        if place in inner:
            hooks.pre_forward(inner[place])
            begun = hooks.take()
            hooks.post_forward(inner[place])
            within[place] = (begun, hooks.take())
        narrow = [at for at in ends.get(place, ()) if units[at].narrow]
        for at in narrow:
            hooks.post_forward(at)
            within[place] = ((), hooks.take())
        for at in reversed(ends.get(place, ())):
            if at not in narrow:
                hooks.post_forward(at)
        if place == end:
            hooks.flush()
        forward.append((before, hooks.take()))
    for place in reversed(range(lowest, modules)):
        narrow = [at for at in ends.get(place, ()) if units[at].narrow]
        for at in ends.get(place, ()):
            if at not in narrow:
                (hooks.pre_forward if place in rerun else hooks.pre_backward)(at)
        before = hooks.take()
        for at in narrow:
            hooks.pre_backward(at)
            within[place] += ((), (), hooks.take(), ())
        if place in rerun:
            hooks.flush()
            for at in ends.get(place, ()):
                hooks.pre_backward(at)
            within[place] = ((), (), (), hooks.take())
        if place in inner:
            within[place] += _inner_backward(hooks, inner[place], again=place in again)
        for at in reversed(begins.get(place, ())):
            if units[at].with_gradient:
                hooks.post_backward(at)
        if place == lowest:
            hooks.finalise()
        backward.append((before, hooks.take()))
    backward += [((), ())] * lowest
    both = enumerate(zip(forward, reversed(backward), strict=True))
    return [Around(*one, *other, *within.get(place, ())) for place, (one, other) in both]


def _inner_backward(hooks: Running, at: int, *, again: bool) -> tuple[Tape, ...]:
    if again:
        hooks.pre_forward(at)
    begun = hooks.take()
    if again:
        hooks.flush()
    over = hooks.take()
    hooks.pre_backward(at)
    before = hooks.take()
    hooks.post_backward(at)
    return begun, over, before, hooks.take()


def _by_place(units: Sequence[Spanning], end: Literal["first", "last"]) -> dict[int, list[int]]:
    """Units by the module where they begin or end, the outer ones first."""
    result: dict[int, list[int]] = {}
    for at, unit in enumerate(units):
        if not unit.inner:
            result.setdefault(getattr(unit, end), []).append(at)
    return result
