"""What Megatron-FSDP's hooks gather and reduce around the modules of one micro-batch.

``megatron_fsdp.py`` (``_register_fsdp_hooks``: which hook runs when) and ``param_and_grad_buffer.py``
(``AllGatherPipeline``, ``GradReducePipeline``: what it does).

* *pre-forward*, of units and of modules outside of units: their buckets are gathered, and those behind them until so
  many elements are ahead (500 million, unless a layer is larger). Buckets of no unit come first, so the final norm's
  gathers the first layers again, which then wait for backward.
* *post-forward* of a unit: its buckets end. Those of no unit stay for good.
* *pre-backward* of a unit: its buckets are gathered, and those before them. When the first of backward is gathered,
  all ends that forward had gathered ahead (``bucket_can_be_released``).
* *post-backward*: they end.
* *gradients*: the first one of a bucket begins a whole bucket in the dtype of communication. Reduced ones wait until
  more than twice as many elements do, or backward has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Tapes
from ...layers.recompute import RERUN
from ...tape.events import Category, Drop, Event, Hold, Hook, Scope, Seam, Tape, insert, rounded
from ...tape.program import Span
from ...values import dataclass
from .fsdp import UNIT, Bucket, Sharding

CAPACITY = 1_000_000_000
"""Elements that Megatron-FSDP lets wait to be reduced, at least; half as many are gathered ahead."""

BUFFERS = 2
"""Of each kind, with double buffers."""

GATHERING, REDUCING = 1, 2
"""Streams besides the default one. Buckets are allocated on that of gathers, gradients on the default one."""


@dataclass(slots=True)
class Hooks:
    """One micro-batch. Buckets are told by their number."""

    buckets: Sequence[Bucket]
    sharding: Sharding
    dtype: str
    gathered: dict[int, Hold | None] = field(default_factory=dict)
    """Buckets of units; ``None`` for those in a double buffer."""
    released: set[int] = field(default_factory=set)
    """Buckets that end with the next gather."""
    gradients: dict[int, Hold] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    """Buckets whose gradients are being reduced."""
    events: list[Event] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """``suggested_communication_unit_size``."""
        given, sharded = self.sharding.capacity, self.sharding.shards_parameters
        if given is not None:
            return given
        units = {bucket.unit for bucket in self.buckets if bucket.unit is not None}
        own = sum(m.parameter.elements for one in self.buckets if one.unit is not None for m in one.members)
        return max(CAPACITY, own // len(units) * 2 if sharded and units else self.sharding.bucket or CAPACITY)

    def take(self) -> Tape:
        events = tuple(self.events)
        self.events.clear()
        return events

    # -- gathering ----------------------------------------------------------------------------------

    def ids(self, place: int) -> list[int]:
        """Buckets with parameters of the module at ``place``."""
        return [at for at, one in enumerate(self.buckets) if any(m.place == place for m in one.members)]

    def gather(self, wanted: Sequence[int], step: int) -> None:
        """``wanted`` buckets, and those ahead of them in the direction of ``step``; none ahead where it is 0."""
        if not wanted or not self.sharding.shards_parameters:
            return
        self.released -= set(wanted)
        missing = [at for at in self._with_ahead(wanted, step) if not self._ready(at)]
        for at in missing:
            if self._ready(at):
                continue
            for other in sorted(self.released - {at}):
                self.end(other)
            self.released.clear()
            self.gathered[at] = None if self._buffered(at) else self._hold(at)

    def _ready(self, at: int) -> bool:
        return at in self.gathered or self.buckets[at].unit is None

    def _with_ahead(self, wanted: Sequence[int], step: int) -> list[int]:
        found, double = set(wanted), self.sharding.double_buffer
        units = {self.buckets[at].unit for at in wanted} - {None}
        if not step or (double and not units):
            return sorted(found)
        limit, ahead = self.capacity // 2, 0
        while ahead < limit and (at := self._next(found, step)) is not None:
            units.add(self.buckets[at].unit)
            if double and len(units) > BUFFERS:
                break
            together = self._together(at)
            ahead += sum(self.buckets[one].elements for one in together - found)
            found |= together
        return sorted(found)

    def _next(self, found: set[int], step: int) -> int | None:
        at = min(found) if step > 0 else max(found)
        while at in found:
            at += step
        return at if 0 <= at < len(self.buckets) else None

    def _together(self, at: int) -> set[int]:
        """Buckets that one collective takes."""
        bucket = self.buckets[at]
        if bucket.unit is None:
            return {at}
        same = (bucket.unit, bucket.experts)
        return {one for one, other in enumerate(self.buckets) if (other.unit, other.experts) == same}

    def _buffered(self, at: int) -> bool:
        return self.sharding.double_buffer and self.buckets[at].unit in doubled(self.buckets)

    def _hold(self, at: int) -> Hold:
        bucket = self.buckets[at]
        hold = gathered(bucket, self.dtype)._replace(tensor=Scope.HOOKS.id(2 * at), stream=GATHERING)
        self.events.append(hold)
        return hold

    def end(self, at: int) -> None:
        self._drop(self.gathered.pop(at, None))

    def _drop(self, hold: Hold | None) -> None:
        if hold is not None:
            self.events.append(Drop(hold.tensor, hold.bytes, hold.category))

    # -- passes -------------------------------------------------------------------------------------

    def before_forward(self, place: int) -> None:
        self.gather(self.ids(place), 1)

    def after_forward(self, place: int) -> None:
        for at in self.ids(place):
            self.end(at)

    def begin_backward(self) -> None:
        """``_root_pre_backward``."""
        self.released |= set(self.gathered)

    def before_backward(self, place: int, *, recomputed: bool) -> None:
        if any(self.buckets[at].unit is not None for at in self.ids(place)):
            if recomputed:
                self.gather(self.ids(place), 0)
            self.gather(self.ids(place), -1)

    def gradient(self, place: int, name: str) -> Tape:
        """The first gradient of a bucket begins it."""
        for at, bucket in enumerate(self.buckets if self.sharding.shards_gradients else ()):
            own = any(
                m.parameter.name == name and (m.place == place or (bucket.unit is None and self.sharding.fused))
                for m in bucket.members
            )
            if own and at not in self.gradients and not self._buffered(at):
                dtype = self.sharding.communication
                size, shape = rounded(bucket.elements * ITEMSIZE[dtype]), (bucket.elements,)
                id = Scope.HOOKS.id(2 * at + 1)
                self.gradients[at] = Hold(id, size, Category.COMMUNICATION_BUFFERS, "gradient_bucket", shape, dtype)
                return (self.gradients[at],)
        return ()

    def after_backward(self, place: int) -> None:
        if self.sharding.shards_gradients:
            for at in self.ids(place):
                if self.buckets[at].first == place:
                    self._reduce(at)
        for at in self.ids(place):
            self.end(at)

    def _reduce(self, at: int) -> None:
        while sum(self.buckets[one].elements for one in self.queue) > self.capacity:
            self._drop(self.gradients.pop(self.queue.pop(0), None))
        self.queue.append(at)

    def finalise(self) -> None:
        """``_root_post_backward``, and the reset of the pipeline of gathers."""
        for hold in self.gradients.values():
            self._drop(hold)
        for at in list(self.gathered):
            self.end(at)
        self.gradients, self.queue = {}, []
        self.released.clear()


def gathered(bucket: Bucket, dtype: str) -> Hold:
    own = bucket.dtype(dtype)
    size = rounded(bucket.elements * ITEMSIZE[own])
    return Hold(0, size, Category.GATHERED_PARAMETERS, "parameter_bucket", (bucket.elements,), own)


def doubled(buckets: Sequence[Bucket]) -> frozenset[int]:
    """Units that share double buffers: those of the kind that most are of (``FixedPoolAllocator``)."""
    units: dict[int, tuple[tuple[bool, int], ...]] = {}
    for bucket in buckets:
        if bucket.unit is not None:
            units[bucket.unit] = (*units.get(bucket.unit, ()), bucket.kind)
    if not units:
        return frozenset()
    kind, _ = Counter(units.values()).most_common(1)[0]
    return frozenset(unit for unit, own in units.items() if own == kind)


def persistent(buckets: Sequence[Bucket], sharding: Sharding, dtype: str) -> list[Hold]:
    """Gathered buckets of no unit, and double buffers, which the first iteration makes."""
    holds: list[Hold] = []
    if sharding.shards_parameters:
        holds += [gathered(bucket, dtype) for bucket in buckets if bucket.unit is None]
    if not sharding.double_buffer or not sharding.shards_gradients:
        return holds
    unit = min(doubled(buckets))
    for bucket in (one for one in buckets if one.unit == unit):
        if sharding.shards_parameters:
            holds += [gathered(bucket, dtype)] * BUFFERS
        size = rounded(bucket.elements * ITEMSIZE[sharding.communication])
        holds += [Hold(0, size, Category.COMMUNICATION_BUFFERS, "gradient_buffer", (bucket.elements,))] * BUFFERS
    return holds


def ahead(buckets: Sequence[Bucket], sharding: Sharding, dtype: str) -> list[Hold]:
    """Buckets that the step gathers for the next iteration (``start_param_sync``). The norm of parameters, taken behind
    it, ends them (``stop_communication``)."""
    if sharding.stops:
        return []
    hooks = Hooks(buckets, sharding, dtype)
    hooks.gather([0], 1)
    return [hold for hold in hooks.gathered.values() if hold is not None]


# -- modules ------------------------------------------------------------------------------------------


NOTHING_BEGUN: Mapping[str, Tape] = MappingProxyType({})


class _Around(NamedTuple):
    """What hooks do around a pass of a module."""

    before: Tape
    after: Tape

    def inserted(self, tape: Tape, begun: Mapping[str, Tape] = NOTHING_BEGUN) -> Tape:
        """``tape`` of the pass with it; ``begun`` at the arrival of gradients, by their names."""

        def at(seam: Seam) -> Tape:
            if seam.name == RERUN:
                return ()
            match seam.hook:
                case Hook.BEFORE_FORWARD | Hook.BEFORE_BACKWARD:
                    return self.before
                case Hook.GRADIENT:
                    return begun.get(seam.name, ())
                case Hook.PIECE:
                    return (seam,)
            return self.after

        return insert(tape, at)


@lru_cache(maxsize=64)
def with_hooks(
    spans: tuple[Span, ...], buckets: tuple[Bucket, ...], sharding: Sharding, dtype: str, recomputed: bool
) -> tuple[Span, ...]:
    """``spans`` with the hooks of every micro-batch around them, one module each. ``recomputed``: layers are, whole."""
    hooks = Hooks(buckets, sharding, dtype)
    modules = [(span.module, name) for span in spans for name in span.names]
    lowest = min(bucket.first for bucket in buckets)
    forward, backward = [], []
    for place, (_, name) in enumerate(modules):
        hooks.before_forward(place)
        before = hooks.take()
        if name.startswith(UNIT):
            hooks.after_forward(place)
        forward.append(_Around(before, hooks.take()))
    hooks.begin_backward()
    for place, (module, _) in reversed(list(enumerate(modules))):
        hooks.before_backward(place, recomputed=recomputed)
        before = hooks.take()
        arrived = (event.name for event in module.steady.backward if _arrives(event))
        begun = {name: hold for name in arrived if (hold := hooks.gradient(place, name))}
        hooks.after_backward(place)
        if place == lowest:
            hooks.finalise()
        backward.append((_Around(before, hooks.take()), begun))
    return tuple(
        Span(_hooked(module, before, behind), (name,))
        for (module, name), before, behind in zip(modules, forward, reversed(backward), strict=True)
    )


def _arrives(event: Event) -> TypeGuard[Seam]:
    return isinstance(event, Seam) and event.hook is Hook.GRADIENT


def _hooked(module: Module, forward: _Around, backward: tuple[_Around, Mapping[str, Tape]]) -> Module:
    around, begun = backward

    def tapes(inner: Tapes) -> Tapes:
        return replace(inner, forward=forward.inserted(inner.forward), backward=around.inserted(inner.backward, begun))

    steady = tapes(module.steady)
    first = steady if module.first is module.steady else tapes(module.first)
    return replace(module, first=first, steady=steady, evaluation=forward.inserted(module.evaluation))
