"""One rank's pools of blocks, one for each stream and size class, and what it holds in them.

Every stream has pools of its own (``CUDACachingAllocator.cpp``, ``get_pool``, ``BlockComparator``): what was freed
on one serves no request on another. ``fully_shard`` gathers on one stream and keeps gradients on
another, so its segments add up to more than the order of events alone would need.
"""

from __future__ import annotations

from copy import copy

from ..tape.events import Bytes, Category
from ..values import NamedTuple
from .blocks import LARGEST_SMALL, SHIFT, SMALL_SEGMENT, UNIT_BITS, SegmentPool
from .caching import AllocatorSettings
from .passes import FEW, Pass, Row

NO_BLOCK = 0
"""An empty tensor's, which never reaches the allocator."""

Peak = tuple[tuple[int, ...], Pass | None, int]
"""Bytes by category when a pass began, the pass, and the event in it with which the peak was reached."""


WORTH_KNOWING = 64
"""Steps in a row that are worth remembering."""
IN_VAIN = 8
"""So often what they came to is remembered before it is known that they come to something else each time."""
UNSEEN = 1 << SHIFT
"""More units than there are: as a peak, what is never exceeded, where nobody asks for the peak."""
SLACK = 1 << 12
"""Units below the peak from which on it is known exactly how much is held: what accumulates between passes that are
equal otherwise, as losses do, is less."""


class _Ran(NamedTuple):
    """What steps in a row came to that needed no new memory: the same again, where the same blocks are free."""

    before: tuple[object, ...]
    """Of the pool, and the blocks that the steps give back;"""
    behind: tuple[list[int], dict[int, int], list[int]]
    """free blocks and their edges behind them, and the blocks that stay."""
    came: tuple[int, int, int]
    """As of ``SegmentPool.run``."""


class Rank:
    """One rank's memory while its events run. A tensor is known by its pool's code of its block."""

    __slots__ = ("allocated", "by", "filled", "in_vain", "large", "most", "peak", "peak_at", "ran", "settings", "small")

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.small: dict[int, SegmentPool] = {}
        """Pools of each stream."""
        self.large: dict[int, SegmentPool] = {}
        self.most = 0
        """Bytes that were reserved at most before the cache was emptied."""
        self.filled = 0
        """Segments of small blocks beside those of the pools: full, or wholly free."""
        self.allocated = 0
        """Units, as ``peak``."""
        self.by = [0] * len(Category)
        """Requested bytes, by category."""
        self.peak = 0
        self.peak_at: Peak = (tuple(self.by), None, 0)
        self.ran: dict[Row, _Ran] = {}
        """What steps in a row came to the last time,"""
        self.in_vain: dict[Row, int] = {}
        """and how often in a row that was of no use."""

    def copy(self) -> Rank:
        twin = copy(self)
        twin.small = {stream: pool.copy() for stream, pool in self.small.items()}
        twin.large = {stream: pool.copy() for stream, pool in self.large.items()}
        twin.by = self.by[:]
        return twin

    def empty_cache(self) -> None:
        """What is wholly free is given back (``torch.cuda.empty_cache``)."""
        self.most = self.most_reserved
        for pool in (*self.large.values(), *self.small.values()):
            pool.release()

    @property
    def most_reserved(self) -> int:
        """Bytes, at most until now."""
        return max(self.most, self.reserved)

    @property
    def reserved(self) -> int:
        """Bytes; the most there ever were, where nothing is given back."""
        pools = (*self.small.values(), *self.large.values())
        return sum(pool.reserved for pool in pools) + self.filled * SMALL_SEGMENT << UNIT_BITS

    def pool(self, stream: int, *, small: bool) -> SegmentPool:
        """The pool of a stream, made when it is first asked for."""
        pools = self.small if small else self.large
        if stream not in pools:
            pools[stream] = self.new_pool(small)
        return pools[stream]

    def new_pool(self, small: bool) -> SegmentPool:
        return self.settings.pool(small)

    def take(self, pool: SegmentPool, units: int) -> int:
        """The block of a request."""
        return pool.take(units)

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        """The block of a tensor."""
        self.by[category] += size
        units = self.settings.units(size)
        if not units:
            return NO_BLOCK
        pools = self.small if units <= LARGEST_SMALL else self.large
        block = self.take(pools.get(stream) or self.pool(stream, small=pools is self.small), units)
        self.allocated += block >> SHIFT
        if self.allocated > self.peak:
            self.peak, self.peak_at = self.allocated, (tuple(self.by), None, 0)
        return block

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        self.by[category] -= size
        if block == NO_BLOCK:
            return
        held = block >> SHIFT
        (self.small if held <= LARGEST_SMALL else self.large)[stream].give(block)
        self.allocated -= held

    def room(self, units: int) -> int:
        """How many blocks of ``units`` free small ones have room for, at most."""
        return sum(code >> SHIFT for code in self.pool(0, small=True).free) // units

    def fill(self, segments: int, size: int, category: int) -> None:
        """So many segments are full of tensors of ``size`` bytes, or no longer if negative."""
        blocks = SMALL_SEGMENT // self.settings.units(size)
        self.filled = max(self.filled, segments)
        self.by[category] += segments * blocks * size
        self.allocated += segments * SMALL_SEGMENT
        if self.allocated > self.peak:
            self.peak, self.peak_at = self.allocated, (tuple(self.by), None, 0)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        """The events of one pass of one micro-batch, or its part from ``start`` on, whose blocks ``frame`` holds by
        slot."""
        limit = self.peak - self.allocated
        for stream, row in events.small:
            self._serve(self.small.get(stream) or self.pool(stream, small=True), row, frame, limit)
        beyond, place = 0, -1
        for stream, row in events.large:
            pool = self.large.get(stream) or self.pool(stream, small=False)
            more, limit, highest = self._serve(pool, row, frame, limit - beyond)
            limit += beyond
            beyond += more
            place = highest if highest >= 0 else place
        if place >= 0:
            self.peak, self.peak_at = self.allocated + limit, (tuple(self.by), events, place)
        self.allocated += events.net + beyond
        for category, size in events.net_by:
            self.by[category] += size

    def _serve(self, pool: SegmentPool, row: Row, frame: list[int], limit: int) -> tuple[int, int, int]:
        """``run_all`` of ``pool``, or what it came to the last time."""
        if row.length < WORTH_KNOWING or row.runs < FEW or self.in_vain.get(row, 0) == IN_VAIN:
            return row.run(pool, frame, limit)
        given, staying = row.slots
        before = pool.free, pool.holes, pool.top, [*map(frame.__getitem__, given)]
        known = self.ran.get(row)
        if known is not None and known.before == before and (known.came[2] >= 0 or known.came[1] <= limit):
            free, edges, blocks = known.behind
            pool.free, pool.edges = free.copy(), edges.copy()
            for slot, block in zip(staying, blocks, strict=True):
                frame[slot] = block
            self.in_vain[row] = 0
            more, most, place = known.came
        else:
            self.in_vain[row] = self.in_vain.get(row, 0) + 1
            before, reserved = (pool.free.copy(), *before[1:]), pool.reserved
            more, most, place = came = row.run(pool, frame, limit - SLACK)
            if pool.reserved == reserved:
                behind = pool.free.copy(), pool.edges.copy(), [*map(frame.__getitem__, staying)]
                self.ran[row] = _Ran(before, behind, came)
        return (more, most, place) if most > limit else (more, limit, -1)

    def breakdown(self) -> Bytes:
        """Live at the peak, by category, summing to it."""
        by, events, place = self.peak_at
        found = list(map(int.__add__, by, events.until(place))) if events is not None else list(by)
        found[Category.BLOCK_ROUNDING] = (self.peak << UNIT_BITS) - sum(found)
        return tuple(found)
