"""ZeRO-3's coordinator, run over the order of modules: which parameters are whole at which moment.

``runtime/zero/partitioned_param_coordinator.py`` (``fetch_sub_module``, ``release_sub_module``,
``__params_to_release``, ``__all_gather_params_``) once it has a complete trace, that is from the third
forward pass on; ``partition_parameters.py`` (``all_gather_coalesced``, ``AllGatherCoalescedHandle.wait``)
for what a gather allocates. dp ranks; a parameter of n elements has shards of ceil(n / dp).

* One parameter alone is gathered into a buffer of dp · ceil(n / dp) elements, which the parameter then is.
* Several together are gathered into one flat buffer. When the first of them is needed, each is copied out
  of it (n elements); the buffer ends when the last of them has been waited for.
* Before a module runs, what it lacks is gathered; then parameters of later modules are prefetched until the bucket is
  full, or as many are live as may be. After it, its parameters are released, unless they persist, were skipped
  by the prefetcher (they were whole when it came by) or are used again within the reuse distance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import field
from enum import Enum
from typing import Literal

from ...values import NamedTuple, dataclass
from .config import Zero


class Sharded(NamedTuple):
    """A parameter: its place among ``module.parameters()`` (``ds_id``) and its size."""

    id: int
    elements: int
    persists: bool
    trained: bool = True


class Step(NamedTuple):
    """A module runs, forward or backward. Recompute's forward is one more."""

    module: int
    """Which module: the same one in forward and backward."""
    parameters: tuple[int, ...]
    """Ids; none for the model itself, at which backward begins."""
    leaf: bool = False
    """The module is a leaf, whose parameters are those of modules inside it."""


class Change(NamedTuple):
    """A buffer comes (``elements`` > 0) or ends (< 0)."""

    buffer: int
    elements: int
    what: str
    """``gather``: of one parameter; ``gather_flat``: of several; ``gathered``: a copy out of a flat one."""


NO_MODULE = -1
"""Of a step of a module without parameters."""

Pass = Literal["forward", "recompute", "backward"]


class Status(Enum):
    PARTITIONED = 0
    IN_FLIGHT = 1
    WHOLE = 2


@dataclass
class Handle:
    """A gather under way."""

    parameters: tuple[int, ...]
    flat: int
    """Its buffer, where several parameters share one; else 0."""
    elements: int
    waiting: set[int]
    done: bool = False


@dataclass
class Coordinator:
    """Runs ``steps``; ``fetch`` before and ``release`` behind each of them."""

    zero: Zero
    dp: int
    parameters: Sequence[Sharded]
    steps: Sequence[Step]
    at: int = 0
    live: int = 0
    """Elements that count against the limit of live parameters."""
    buffers: int = 0
    status: list[Status] = field(default_factory=list)
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """Parameters in the order of use, with the step of that use."""
    fetched_for: dict[int, int] = field(default_factory=dict)
    """The latest step for which a parameter has been fetched."""
    in_flight: dict[int, Handle] = field(default_factory=dict)
    whole: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The buffer that each gathered parameter lies in, and its elements."""
    active: dict[int, set[int]] = field(default_factory=dict)

    uses: dict[int, list[int]] = field(default_factory=dict)
    """Steps that each parameter is wanted for."""
    passed: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Elements of all steps before each, as ``__params_to_release`` counts them for a module that is no leaf, which
    takes leaves for modules without parameters, and for one that is."""
    backwards: dict[int, None] = field(default_factory=dict)
    """Modules that are in backward, the latest one last."""
    recomputed: dict[int, set[int]] = field(default_factory=dict)
    """Frozen parameters that were fetched to recompute, by the module whose backward asked for that: they are released
    with it (``ds_recompute_parameters``)."""

    def __post_init__(self) -> None:
        self.status = [Status.WHOLE if p.persists else Status.PARTITIONED for p in self.parameters]
        self.passed = [0], [0]
        for at, step in enumerate(self.steps):
            wanted = sorted(set(step.parameters))
            self.queue.extend((id, at) for id in wanted)
            elements = sum(self.parameters[id].elements for id in wanted)
            for counted, passed in zip((0 if step.leaf else elements, elements), self.passed, strict=True):
                passed.append(passed[-1] + counted)
            for id in wanted:
                self.uses.setdefault(id, []).append(at)

    # -- before and behind a module ---------------------------------------------------------------

    def fetch(self, during: Pass = "forward") -> list[Change]:
        """Before the next step's module."""
        step = self.steps[self.at]
        wanted = sorted(set(step.parameters))
        changes: list[Change] = []
        if during == "backward":
            changes += self._released(self.recomputed.pop(NO_MODULE, set()), NO_MODULE)
            self.backwards[step.module] = self.backwards.pop(step.module, None)
        elif during == "recompute" and self.backwards:
            frozen = {id for id in wanted if not self.parameters[id].trained and not self.parameters[id].persists}
            owner = next(reversed(self.backwards))
            self.recomputed.setdefault(owner, set()).update(frozen)
            for id in frozen:
                self.active.setdefault(id, set()).add(owner)
        changes += self._gather([id for id in wanted if self.status[id] is Status.PARTITIONED])
        for id in wanted:
            self.active.setdefault(id, set()).add(step.module)
            changes += self._wait(id)
        fresh = {id for id in wanted if self.fetched_for.get(id, -1) < self.at}
        popped: set[int] = set()
        while self.queue and len(popped) < len(fresh):
            id, used = self.queue.popleft()
            self.fetched_for[id] = used
            popped.add(id)
        assert popped == fresh, f"step {self.at}: the trace does not match itself"
        changes += self._prefetch()
        self.at += 1
        return changes

    def release(self, step: Step, during: Pass = "forward") -> list[Change]:
        """Behind the module of ``step``."""
        going = self._to_release(step)
        if during == "backward":
            self.backwards.pop(step.module, None)
            going |= self.recomputed.pop(step.module, set())
        for id in step.parameters:
            self.active.get(id, set()).discard(step.module)
        return self._released(going, step.module)

    def _released(self, going: set[int], module: int) -> list[Change]:
        changes: list[Change] = []
        for id in sorted(going):
            self.active.get(id, set()).discard(module)
            changes += self._end(id)
        return changes

    def is_released(self, id: int) -> bool:
        """The parameter is no longer whole, though it was gathered: of one rank its shard is all of it."""
        gathers = self.dp > 1 or self.zero.offload_param != "none"
        return gathers and self.status[id] is Status.PARTITIONED

    def leftovers(self, steps: Iterable[Step]) -> list[Change]:
        """Behind backward: modules whose input needs no gradient have no hook (``release_backward_leftovers``)."""
        changes: list[Change] = []
        for step in reversed(tuple(steps)):
            for id in sorted({*step.parameters, *self.recomputed.pop(step.module, set())}):
                self.active.get(id, set()).discard(step.module)
                if not self.parameters[id].persists:
                    changes += self._end(id)
        return changes

    # -- parts ------------------------------------------------------------------------------------

    def _prefetch(self) -> list[Change]:
        limit = min(self.zero.stage3_max_live_parameters - self.live, self.zero.stage3_prefetch_bucket_size)
        chosen: list[int] = []
        size = 0
        while self.queue and size < limit and self.zero.stage3_prefetch_bucket_size > 0:
            id, used = self.queue.popleft()
            self.fetched_for[id] = max(self.fetched_for.get(id, -1), used)
            if self.status[id] is Status.PARTITIONED and id not in chosen:
                chosen.append(id)
                size += self.parameters[id].elements
        return self._gather(chosen)

    def _gather(self, ids: list[int]) -> list[Change]:
        ids = sorted(ids)
        if not ids:
            return []
        for id in ids:
            self.status[id] = Status.IN_FLIGHT
            self.live += self.parameters[id].elements
        if self.dp == 1 and self.zero.offload_param == "none":
            self._in_flight(Handle(tuple(ids), 0, 0, set(ids)))
            return []
        if self.dp == 1:
            return [change for id in ids for change in self._copied(id)]
        padded = sum(-(-self.parameters[id].elements // self.dp) * self.dp for id in ids)
        self.buffers += 1
        buffer = self.buffers
        if len(ids) == 1:
            self.whole[ids[0]] = (buffer, padded)
            ended = self._in_flight(Handle(tuple(ids), 0, 0, set(ids)))
            return [Change(buffer, padded, "gather"), *self._staged(ids), *ended]
        ended = self._in_flight(Handle(tuple(ids), buffer, padded, set(ids)))
        return [Change(buffer, padded, "gather_flat"), *self._staged(ids), *ended]

    def _copied(self, id: int) -> list[Change]:
        """From the host, where there is nobody to gather from (``NoGatherHandle``)."""
        self.buffers += 1
        self.whole[id] = (self.buffers, self.parameters[id].elements)
        self._in_flight(Handle((id,), 0, 0, {id}))
        return [Change(self.buffers, self.parameters[id].elements, "gather")]

    def _staged(self, ids: list[int]) -> list[Change]:
        """This rank's shards on their way from the host."""
        if self.zero.offload_param == "none":
            return []
        sizes = [-(-self.parameters[id].elements // self.dp) for id in ids]
        first = self.buffers + 1
        self.buffers += len(ids)
        coming = [Change(first + i, size, "shard_from_host") for i, size in enumerate(sizes)]
        return [*coming, *(change._replace(elements=-change.elements) for change in coming)]

    def _in_flight(self, handle: Handle) -> list[Change]:
        """A parameter that was released before its own turn, and is gathered again, leaves its first gather: that ends
        with the last one (``__inflight_param_registry``)."""
        ended = []
        for id in handle.parameters:
            before = self.in_flight.get(id)
            if before is not None:
                before.waiting.discard(id)
                ended += [before] if before.flat and not before.waiting else []
            self.in_flight[id] = handle
        return [Change(one.flat, -one.elements, "gather_flat") for one in ended]

    def _wait(self, id: int) -> list[Change]:
        handle = self.in_flight.pop(id, None)
        if handle is None:
            return []
        changes: list[Change] = []
        for one in handle.parameters if not handle.done else ():
            self.status[one] = Status.WHOLE
            if handle.flat:
                self.buffers += 1
                self.whole[one] = (self.buffers, self.parameters[one].elements)
                changes.append(Change(self.buffers, self.parameters[one].elements, "gathered"))
        handle.done = True
        handle.waiting.discard(id)
        if handle.flat and not handle.waiting:
            changes.append(Change(handle.flat, -handle.elements, "gather_flat"))
        return changes

    def _to_release(self, step: Step) -> set[int]:
        going = {id for id in step.parameters if not self.parameters[id].persists}
        going = {id for id in going if self.fetched_for.get(id, -1) <= self.at}
        passed = self.passed[step.leaf]
        until = bisect_left(passed, passed[self.at] + self.zero.stage3_max_reuse_distance, self.at)
        return {id for id in going if not self._is_used(id, until)}

    def _is_used(self, id: int, until: int) -> bool:
        """From the next step on, before step ``until``."""
        uses = self.uses.get(id, [])
        following = bisect_left(uses, self.at)
        return following < len(uses) and uses[following] < until

    def _end(self, id: int) -> list[Change]:
        if self.status[id] is not Status.WHOLE or self.active.get(id):
            return []
        self.status[id] = Status.PARTITIONED
        self.live -= self.parameters[id].elements
        held = self.whole.pop(id, None)
        return [] if held is None else [Change(held[0], -held[1], "gather")]
