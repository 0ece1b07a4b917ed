"""What Megatron-FSDP's hooks gather and reduce around the modules of one micro-batch.

``megatron_fsdp.py`` (``_register_fsdp_hooks``: which hook runs when) and ``param_and_grad_buffer.py``
(``AllGatherPipeline``, ``GradReducePipeline``: what it does).

* *pre-forward* of units: their buckets are gathered, and those behind them until so many elements are ahead (500
  million, unless a layer is larger). Modules outside of units gather nothing ahead, but in the first micro-batch of
  all, beside which there are no optimizer states yet (their ``_training_state`` is that of backward since then).
* *post-forward* of a unit: its buckets end. Those of no unit stay for good.
* *pre-backward* of a unit: its buckets are gathered, and those before them. When the first of backward is gathered,
  all ends that forward had gathered ahead (``bucket_can_be_released``).
* *post-backward*: they end.
* *columns* of weights in 8 bits that are made of their rows (``fp8_create_transpose_cache``, and Transformer Engine's
  ``quantize_weight``): a unit's are there while its passes run; those of no unit, which end with their forward and are
  made again in backward, are counted throughout. Columns that have buckets of their own are gathered in backward alone.
* *gradients*: the first one of a bucket begins a whole bucket in the dtype of communication. Reduced ones wait until
  more than twice as many elements do, or backward has ended.

Buffers of Megatron-FSDP beside its shards: gathered buckets, and those that stay for good.

``megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py``: ``StorageResizeBasedBucketAllocator``,
``FixedPoolAllocator`` (double buffers of layers that are alike), ``MaxPoolAllocator`` (of all layers), and their
``fallback_to_persistent_buffer``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache, partial
from itertools import count

from ...layers.autograd import ITEMSIZE, size_of
from ...layers.megatron_core import mtp
from ...layers.recompute import RERUN
from ...tape.events import Category, Event, Hold, Hook, Scope, Seam, Tape, cut, insert, rounded
from ...tape.program import Span
from ...values import dataclass
from .fsdp import Bucket, Sharding, doubled, sites_of

BUFFERS = 2
"""Of each kind, with double buffers."""


def gathered(bucket: Bucket, dtype: str) -> Hold:
    own = bucket.dtype(dtype)
    size = rounded(bucket.elements * ITEMSIZE[own])
    return Hold(0, size, Category.GATHERED_PARAMETERS, "parameter_bucket", (bucket.elements,), own)


def columns_of(bucket: Bucket) -> Iterator[Hold]:
    for own, part in bucket.columns():
        name = f"{own.name}_{part.name}"
        yield Hold(
            0, rounded(size_of(part.shape, part.dtype)), Category.GATHERED_PARAMETERS, name, part.shape, part.dtype
        )


def persistent(buckets: Sequence[Bucket], sharding: Sharding, dtype: str) -> list[Hold]:
    """Gathered buckets of no unit, with columns, and double buffers, which the first iteration makes. Units take these
    in turn, in the order of the pass that first needs them (those of MXFP8 in orders of their own, so that both are as
    large as any); construction uses the first one alone."""
    fixed, persists = doubled(buckets, sharding), sharding.persists and sharding.double_buffer
    units = sorted(fixed)
    holds: list[Hold] = []
    apart = [bucket for bucket in buckets if bucket.unit not in fixed]
    if sharding.shards_parameters:
        outside = [bucket for bucket in apart if bucket.unit is None or persists]
        pool = sharding.pool(1) if persists else 0
        holds += [gathered(one, dtype)._replace(stream=pool) for one in outside for _ in range(1 + one.two_buffers)]
        if sharding.ends_columns:
            holds += [one for bucket in outside if bucket.unit is None for one in columns_of(bucket)]
        second = units if any(bucket.two_buffers for bucket in buckets) else units[1::2]
        for at, turn in enumerate((units, second)):
            for one in _largest(buckets, turn, dtype):
                holds += [gathered(one, dtype)._replace(stream=sharding.pool(at))] * (1 + one.two_buffers)
    if sharding.shards_gradients:
        own = [one for turn in (units[::-2], units[-2::-2]) for one in _largest(buckets, turn, None)]
        holds += [_gradients(one, sharding) for one in (*own, *(apart if persists else ()))]
    return holds


def _largest(buckets: Sequence[Bucket], units: Sequence[int], dtype: str | None) -> Iterator[Bucket]:
    """The bucket that each buffer is as large as: of those that are alike, with ``dtype`` for 16 bits or all, the
    largest one of all ``units``, the second one, and so on."""
    found: dict[tuple[str, int], Bucket] = {}
    for unit in units:
        seen: Counter[str] = Counter()
        for bucket in sorted((one for one in buckets if one.unit == unit), key=lambda one: -one.elements):
            kind = bucket.dtype(dtype) if dtype is not None else ""
            place = kind, seen[kind]
            seen[kind] += 1
            if place not in found or bucket.elements > found[place].elements:
                found[place] = bucket
    yield from found.values()


def _gradients(bucket: Bucket, sharding: Sharding) -> Hold:
    dtype, name = sharding.communication, "gradient_buffer"
    size, shape = rounded(bucket.elements * ITEMSIZE[dtype]), (bucket.elements,)
    return Hold(0, size, Category.COMMUNICATION_BUFFERS, name, shape, dtype, sharding.pool(BUFFERS))


# -- fsdp hooks ----------------------------------------------------------------------------------------


CAPACITY = 1_000_000_000
"""Elements that Megatron-FSDP lets wait to be reduced, at least; half as many are gathered ahead."""

GATHERING, REDUCING = 1, 2
"""Streams besides the default one. Buckets are allocated on that of gathers, gradients on the default one."""


@dataclass
class Hooks:
    """One micro-batch. Buckets are told by their number, those of columns by its complement."""

    buckets: Sequence[Bucket]
    sharding: Sharding
    dtype: str
    gathered: dict[int, Hold | None] = field(default_factory=dict)
    """Buckets of units; ``None`` for those in a double buffer."""
    released: set[int] = field(default_factory=set)
    """Buckets that end with the next gather."""
    columns: dict[int, list[Hold]] = field(default_factory=dict)
    """Those of units, that are made of rows."""
    gradients: dict[int, Hold] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    """Buckets whose gradients are being reduced."""
    events: list[Event] = field(default_factory=list)
    made: count[int] = field(default_factory=lambda: count(1 << 20))
    """Numbers of columns."""
    at: dict[int, list[int]] = field(default_factory=dict)
    """Buckets with parameters of a site,"""
    of: dict[tuple[int | None, str], int] = field(default_factory=dict)
    """and that of a parameter, of a site or of no unit."""

    def __post_init__(self) -> None:
        for at, bucket in enumerate(self.buckets):
            for member in bucket.members:
                found = self.at.setdefault(member.place, [])
                found += [at] if at not in found[-1:] else []
                self.of[member.place, member.parameter.name] = at
                if bucket.unit is None:
                    self.of.setdefault((None, member.parameter.name), at)

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Units in double buffers."""
        return doubled(self.buckets, self.sharding)

    @cached_property
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
        """Buckets with parameters of the site at ``place``."""
        return self.at.get(place, [])

    def gather(self, wanted: Sequence[int], step: int) -> None:
        """``wanted`` buckets, and those ahead of them in the direction of ``step``; none ahead where it is 0."""
        if not wanted or not self.sharding.shards_parameters:
            return
        self.released -= {self._key(at, step) for at in wanted}
        for at in self._with_ahead(wanted, step):
            key = self._key(at, step)
            if key in self.gathered or self.buckets[at].unit is None:
                continue
            for other in sorted(self.released - {key}):
                self.end(other)
            self.released.clear()
            self.gathered[key] = None if self._buffered(at) else self._hold(key)

    def _key(self, at: int, step: int) -> int:
        """What is gathered of a bucket in the direction of ``step``."""
        return ~at if step < 0 and self.buckets[at].two_buffers else at

    def _with_ahead(self, wanted: Sequence[int], step: int) -> list[int]:
        found, double = set(wanted), self.sharding.double_buffer
        units: set[int | None] = {self.buckets[at].unit for at in wanted}
        if not step or (double and units == {None}):
            return sorted(found)
        units &= self.fixed
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
        persists = self.sharding.persists and self.sharding.double_buffer
        return persists or self.buckets[at].unit in self.fixed

    def _hold(self, key: int) -> Hold:
        number, bucket = key if key >= 0 else len(self.buckets) + ~key, self.buckets[max(key, ~key)]
        hold = gathered(bucket, self.dtype)._replace(tensor=Scope.HOOKS.id(2 * number), stream=GATHERING)
        self.events.append(hold)
        return hold

    def end(self, key: int) -> None:
        self._drop(self.gathered.pop(key, None))

    def turn(self, place: int) -> None:
        """Columns of a unit's weights are made of their rows,"""
        if not self.sharding.ends_columns or place in self.columns:
            return
        found = [one for bucket in self.buckets if bucket.unit == place for one in columns_of(bucket)]
        self.columns[place] = [one._replace(tensor=Scope.HOOKS.id(next(self.made))) for one in found]
        self.events += self.columns[place]

    def turn_back(self, place: int) -> None:
        """and end."""
        for hold in self.columns.pop(place, []):
            self._drop(hold)

    def _drop(self, hold: Hold | None) -> None:
        if hold is not None:
            self.events.append(hold.end)

    def _is_unit(self, place: int) -> bool:
        return any(self.buckets[at].unit is not None for at in self.ids(place))

    # -- passes -------------------------------------------------------------------------------------

    def before_forward(self, place: int) -> None:
        """Modules outside of units are told for good that backward has begun, so that they gather nothing ahead."""
        self.gather(self.ids(place), 1 if self._is_unit(place) else 0)
        self.turn(place)

    def after_forward(self, place: int) -> None:
        for at in self.ids(place):
            self.end(at)
        self.turn_back(place)

    def begin_backward(self) -> None:
        """``_root_pre_backward``."""
        self.released |= set(self.gathered)

    def before_again(self, place: int) -> None:
        """A layer's forward runs again."""
        self.gather(self.ids(place), 0)
        self.turn(place)

    def after_again(self, place: int) -> None:
        """What it has read ends with the next gather."""
        self.released |= set(self.ids(place)) & self.gathered.keys()
        self.turn_back(place)

    def before_backward(self, place: int) -> None:
        if self._is_unit(place):
            self.gather(self.ids(place), -1)
            self.turn(place)

    def gradient(self, place: int, name: str) -> None:
        """The first gradient of a bucket begins it."""
        at = self.of.get((place, name), self.of.get((None, name)) if self.sharding.fused else None)
        if at is None or not self.sharding.shards_gradients:
            return
        self._limit([at])
        if at in self.gradients or self._buffered(at):
            return
        dtype, elements = self.sharding.communication, self.buckets[at].elements
        size, id = rounded(elements * ITEMSIZE[dtype]), Scope.HOOKS.id(2 * at + 1)
        self.gradients[at] = Hold(id, size, Category.COMMUNICATION_BUFFERS, "gradient_bucket", (elements,), dtype)
        self.events.append(self.gradients[at])

    def after_backward(self, place: int) -> None:
        if self.sharding.shards_gradients:
            ready = [at for at in self.ids(place) if self.buckets[at].first == place]
            while ready:
                together = [at for at in ready if at in self._together(ready[0])]
                self._reduce(together)
                ready = [at for at in ready if at not in together]
        for at in self.ids(place):
            self.end(self._key(at, -1))
            self.end(at)
        self.turn_back(place)

    def _reduce(self, together: Sequence[int]) -> None:
        while sum(self.buckets[one].elements for one in self.queue) > self.capacity:
            self._reduced()
        self._limit(together)
        self.queue += together

    def _reduced(self) -> None:
        self._drop(self.gradients.pop(self.queue.pop(0), None))

    def _limit(self, together: Sequence[int]) -> None:
        """With double buffers, gradients of two units at most are reduced at once, those of ``together`` included; what
        is in no unit counts as one more (``_enforce_double_buffer_limit``)."""
        units: set[int | None] = {self.buckets[at].unit for at in together}
        units &= self.fixed
        kept = len(self.queue)
        for at in reversed(self.queue if self.sharding.double_buffer else ()):
            units.add(self.buckets[at].unit)
            kept -= len(units) > BUFFERS
        while len(self.queue) > kept:
            self._reduced()

    def finalise(self) -> None:
        """``_root_post_backward``, and the reset of the pipeline of gathers."""
        for hold in self.gradients.values():
            self._drop(hold)
        for at in list(self.gathered):
            self.end(at)
        self.gradients, self.queue = {}, []
        self.released.clear()


def ahead(buckets: Sequence[Bucket], sharding: Sharding, dtype: str) -> list[Hold]:
    """Buckets that the step gathers for the next iteration (``start_param_sync``). The norm of parameters, taken behind
    it, ends them (``stop_communication``)."""
    if sharding.stops:
        return []
    hooks = Hooks(buckets, sharding, dtype)
    hooks.gather([0], 1)
    return [hold for hold in hooks.gathered.values() if hold is not None]


# -- modules ------------------------------------------------------------------------------------------


Inserted = Mapping[tuple[str, Hook | None], Sequence[Tape]]
"""What hooks do at the seams of a pass, by name and kind, each time that one comes."""


@dataclass(slots=True)
class _Passes:
    """The hooks of one module's passes."""

    hooks: Hooks
    places: Mapping[str, int]
    """Sites of units within the module, by the names of their seams."""
    own: int
    """The module's own site."""
    is_unit: bool

    def forward(self, tape: Tape) -> Inserted:
        def run(seam: Seam, place: int) -> None:
            if seam.hook is Hook.BEFORE_FORWARD:
                self.hooks.before_forward(place)
            elif seam.hook is Hook.AFTER_FORWARD and (place != self.own or self.is_unit):
                self.hooks.after_forward(place)

        return self._walked(tape, run)

    def backward(self, tape: Tape) -> Inserted:
        again = any(isinstance(event, Seam) and event.name == RERUN for event in tape)

        def run(seam: Seam, place: int) -> None:
            match seam.hook:
                case Hook.BEFORE_BACKWARD:
                    (self.hooks.before_again if again else self.hooks.before_backward)(place)
                case Hook.AFTER_FORWARD:
                    self.hooks.after_again(place)
                    self.hooks.before_backward(place)
                case Hook.AFTER_BACKWARD:
                    self.hooks.after_backward(place)
                case Hook.GRADIENT:
                    self.hooks.gradient(self.places.get(mtp.layer_of(seam.name) or "", self.own), seam.name)

        return self._walked(tape, run)

    def _walked(self, tape: Tape, run: Callable[[Seam, int], None]) -> Inserted:
        found: dict[tuple[str, Hook | None], list[Tape]] = {}
        for _, seam in cut(tape):
            if seam is not None:
                run(seam, self.places.get(seam.name, self.own))
                found.setdefault((seam.name, seam.hook), []).append(self.hooks.take())
        return found


def _inserted(inserted: Inserted, tape: Tape) -> Tape:
    left = {key: iter(tapes) for key, tapes in inserted.items()}

    def at(seam: Seam) -> Tape:
        return (seam,) if seam.hook is Hook.PIECE else next(left.get((seam.name, seam.hook), iter(())), ())

    return insert(tape, at)


@lru_cache(maxsize=64)
def with_hooks(
    spans: tuple[Span, ...], buckets: tuple[Bucket, ...], sharding: Sharding, dtype: str
) -> tuple[Span, ...]:
    """``spans`` with the hooks of every micro-batch around them, one module each."""
    hooks = Hooks(buckets, sharding, dtype)
    modules = [(span.module, name) for span in spans for name in span.names]
    lowest = min(bucket.first for bucket in buckets)
    passes = []
    for at in range(len(modules)):
        own, *inner = ((place, site) for place, site in enumerate(sites_of(spans)) if site.module == at)
        passes.append(_Passes(hooks, {site.name: place for place, site in inner}, own[0], own[1].unit))
    forward = [one.forward(module.steady.forward) for one, (module, _) in zip(passes, modules, strict=True)]
    hooks.begin_backward()
    backward: list[Inserted] = []
    for one, (module, _) in reversed(list(zip(passes, modules, strict=True))):
        found = dict(one.backward(module.steady.backward))
        if one.own == lowest:
            hooks.finalise()
            *_, last = found
            found[last] = [*found[last][:-1], (*found[last][-1], *hooks.take())]
        backward.append(found)
    return tuple(
        Span(module.changed(partial(_inserted, before), partial(_inserted, behind)), (name,))
        for (module, name), before, behind in zip(modules, forward, reversed(backward), strict=True)
    )
