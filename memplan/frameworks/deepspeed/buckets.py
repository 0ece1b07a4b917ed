"""Buckets of gradients ("independent, partitioned gradients", ipg) during backward.

Stage 3: ``stage3.py``, ``__add_grad_to_ipg_bucket``, ``__reduce_and_partition_ipg_grads``,
``__avg_scatter_grads``, ``partition_grads``; ``coalesced_collectives.py``, ``reduce_scatter_coalesced``.
Stages 1 and 2: ``stage_1_and_2.py``, ``setup_buckets``, ``reduce_independent_p_g_buckets_and_remove_grads``,
``reduce_ipg_grads``, ``average_tensor``, ``allreduce_bucket``, ``copy_grads_in_partition``,
``independent_gradient_partition_epilogue``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ...layers.autograd import ITEMSIZE
from ...tape.events import Category, Drop, Event, Hold, Scope, Tape, rounded
from ...values import dataclass
from .config import Zero
from .states import Group, shard

TEMPORARIES, COMMUNICATION = Category.TEMPORARIES, Category.COMMUNICATION_BUFFERS


@dataclass
class Tapes:
    """Makes holds with ids of their own."""

    last: int = 0

    def hold(self, name: str, elements: int, dtype: str, category: Category) -> Hold:
        self.last += 1
        size = rounded(elements * ITEMSIZE[dtype]) if dtype in ITEMSIZE else rounded(8 * elements)
        return Hold(Scope.BUCKETS.id(self.last), size, category, name, (elements,), dtype)


@dataclass
class ScatteringBucket:
    """Stage 3: one bucket, which is static; every reduction scatters into this rank's gradient shards."""

    zero: Zero
    dp: int
    dtype: str
    accumulates: str
    """dtype of the gradient shards."""
    last_microbatch: bool = True
    tapes: Tapes = field(default_factory=Tapes)
    elements: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(id, elements) of the parameters whose gradients lie in the bucket, or beside it."""
    beside: list[Drop] = field(default_factory=list)
    """Gradients that do not fit into it."""

    def arrived(self, id: int, elements: int, size: int) -> tuple[Tape, bool]:
        limit = self.zero.reduce_bucket_size
        before: Tape = ()
        if self.elements + elements > limit and self.elements > 0:
            before = self._reduced()
        fits = self.zero.contiguous_gradients and self.elements + elements <= limit
        self.waiting.append((id, elements))
        self.elements += elements
        if not fits:
            self.beside.append(Drop(Scope.GRADIENTS.id(id), size, Category.GRADIENTS))
        return before, not fits

    def finished(self) -> Tape:
        return self._reduced() if self.waiting else ()

    def _reduced(self) -> Tape:
        """One ``reduce_scatter``: through a copy with the shards interleaved, but for one tensor without padding."""
        events: list[Event] = []
        sizes = [elements for _, elements in self.waiting]
        shards = [shard(n, self.dp) for n in sizes]
        held: list[Hold] = []
        if len(sizes) > 1 or sizes[0] % self.dp:
            held.append(self.tapes.hold("reduce_scatter_flat", sum(shards) * self.dp, self.dtype, COMMUNICATION))
        if self.accumulates != self.dtype:
            held += [self.tapes.hold("gradient_shard", n, self.accumulates, TEMPORARIES) for n in shards]
        events += held
        if self.zero.offload_optimizer != "none":
            events += self._offloaded(shards)
        events += self.beside
        events += [hold.end for hold in held]
        self.elements, self.waiting, self.beside = 0, [], []
        return tuple(events)

    def _offloaded(self, shards: Sequence[int]) -> Tape:
        """Each shard of the sum comes back to the device, where its norm is taken in fp64; then goes as fp32."""
        events: list[Event] = []
        for n in shards:
            back = self.tapes.hold("accumulated_shard", n, self.accumulates, TEMPORARIES)
            events.append(back)
            if self.last_microbatch:
                norm = self.tapes.hold("norm_fp64", min(n, 250_000_000), "fp64", TEMPORARIES)
                events += [norm, norm.end]
                if self.accumulates != "fp32":
                    wide = self.tapes.hold("shard_fp32", n, "fp32", TEMPORARIES)
                    events += [wide, wide.end]
            events.append(back.end)
        return tuple(events)


@dataclass
class ReducingBucket:
    """Stage 2 (and 1, in its step): one bucket, two with ``overlap_comm``, for as long as gradients are reduced."""

    zero: Zero
    groups: Sequence[Group]
    rank: int
    dtype: str
    first: bool = True
    """The first micro-batch: reduced gradients stay, rather than being added to those that do."""
    clears: bool = True
    """Stage 2: gradients of other ranks' parameters end with their reduction; stage 1: with the last of them."""
    last_microbatch: bool = True
    """With the optimizer on the host: reduced gradients are measured and leave for it."""
    accumulates: str = ""
    """fp32 beside 16-bit parameters: reduced gradients go into an fp32 tensor as large as the share of a group."""
    tapes: Tapes = field(default_factory=Tapes)
    elements: int = 0
    waiting: list[int] = field(default_factory=list)
    beside: list[Drop] = field(default_factory=list)
    buffers: list[Hold] = field(default_factory=list)
    late: list[Drop] = field(default_factory=list)
    partition: dict[str, Hold] = field(default_factory=dict)
    """Reduced gradients that this rank keeps, by group; or all of them (``grads_in_partition``): whole gradients
    of the parameters that it updates a part of."""

    def __post_init__(self) -> None:
        self.mine = {piece.id for group in self.groups for piece in group.share_of(self.rank)}
        self.sizes = {id: size for group in self.groups for id, size in zip(group.ids, group.sizes, strict=True)}

    def arrived(self, id: int, elements: int, size: int) -> tuple[Tape, bool]:
        before = self._begun()
        limit = self.zero.reduce_bucket_size
        if self.elements + elements > limit:
            before = (*before, *self._reduced())
        fits = self.zero.contiguous_gradients and elements <= limit
        self.waiting.append(id)
        self.elements += elements
        if fits:
            return before, False
        if self.zero.offload_optimizer == "none":
            self.beside.append(Drop(Scope.GRADIENTS.id(id), size, Category.GRADIENTS))
            return before, True
        clone = Hold(Scope.COPIES.id(id), size, Category.GRADIENTS, "oversized_gradient", (elements,), self.dtype)
        self.beside.append(clone.end)
        return (*before, clone), False  # another stream may still write to the original

    def finished(self) -> Tape:
        events = [*self._reduced(), *(hold.end for hold in self.buffers), *self.late]
        if not self.first and not self.compact:
            events += [hold.end for hold in self.partition.values()]
        return tuple(events)

    @property
    def compact(self) -> bool:
        """``_use_compact_grad_partition_buffer``."""
        return self.accumulates == "fp32" and self.dtype != "fp32"

    def _begun(self) -> Tape:
        """``setup_buckets``, at the first gradient."""
        if self.buffers or not self.zero.contiguous_gradients:
            return ()
        count = 2 if self.zero.overlaps else 1
        self.buffers = [
            self.tapes.hold("ipg_bucket", self.zero.reduce_bucket_size, self.dtype, COMMUNICATION) for _ in range(count)
        ]
        return tuple(self.buffers)

    def _reduced(self) -> Tape:
        if not self.waiting:
            return ()
        events: list[Event] = self._compact_partitions() if self.compact else []
        copied = self.flattened()
        flat = self.tapes.hold("allreduce_flat", copied, self.dtype, COMMUNICATION) if copied else None
        events += [flat] if flat is not None else []
        if self.compact:
            events += self._widened()
        events += [flat.end] if flat is not None else []
        away = self.zero.offload_optimizer != "none"
        if away:
            events += self._offloaded()
        elif not self.compact and not self.partition and self.mine.intersection(self.waiting):
            whole = sum(self.sizes[id] for id in self.mine)
            hold = self.tapes.hold("gradients_in_partition", whole, self.dtype, Category.GRADIENTS)
            self.partition[""] = hold
            events.append(hold)
        for gone in self.beside:
            mine = Scope.at(gone.tensor) in self.mine
            stays = self.compact or (away and not self.last_microbatch)
            ends = not stays if mine else self.clears
            (events if ends else self.late).append(gone)
        self.elements, self.waiting, self.beside = 0, [], []
        return tuple(events)

    def _offloaded(self) -> list[Event]:
        """This rank's slices: the norm in fp64, then fp32 on the way to the host (``copy_grads_in_partition``)."""
        events: list[Event] = []
        for n in self._own() if self.last_microbatch else ():
            for name, dtype in (("norm_fp64", "fp64"), ("slice_fp32", "fp32")):
                if dtype != self.dtype:
                    hold = self.tapes.hold(name, n, dtype, TEMPORARIES)
                    events += [hold, hold.end]
        return events

    def _own(self) -> list[int]:
        """Elements of each slice of the bucket that this rank keeps."""
        return [n for id in self.waiting for rank, n in self._group(id).pieces(id) if rank == self.rank]

    def _compact_partitions(self) -> list[Event]:
        made: list[Event] = []
        for id in self.waiting:
            group = self._group(id)
            if self.first and id in self.mine and group.name not in self.partition:
                hold = self.tapes.hold(f"{group.name}/gradients_fp32", group.share, "fp32", Category.GRADIENTS)
                self.partition[group.name] = hold
                made.append(hold)
        return made

    def _widened(self) -> list[Event]:
        """``output.add_(source.to(float32))``, one slice after the other."""
        events: list[Event] = []
        for n in self._own():
            hold = self.tapes.hold("slice_fp32", n, "fp32", TEMPORARIES)
            events += [hold, hold.end]
        return events

    def _group(self, id: int) -> Group:
        return next(group for group in self.groups if id in group.places)

    def flattened(self) -> int:
        """Elements of the bucket that go through a copy: where it holds more than one rank's slices.

        ``average_tensor`` merges neighbouring slices of one rank; ``allreduce_and_scatter`` hands on what it has
        when that is more than a bucket, and ``flatten`` of one tensor is a view.
        """
        if not self.zero.reduce_scatter:
            return 0
        slices: list[tuple[int, int]] = []
        for id in self.waiting:
            for rank, n in self._group(id).pieces(id):
                merges = not (self.compact and rank == self.rank)
                if merges and slices and slices[-1][0] == rank:
                    slices[-1] = (rank, slices[-1][1] + n)
                else:
                    slices.append((rank, n))
        largest = 0
        current: list[int] = []
        for _, n in slices:
            current.append(n)
            if sum(current) > self.zero.reduce_bucket_size:
                largest = max(largest, sum(current) if len(current) > 1 else 0)
                current = []
        return max(largest, sum(current) if len(current) > 1 else 0)
