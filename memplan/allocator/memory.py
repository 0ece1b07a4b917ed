"""What PyTorch's allocator does where the device's memory ends: give back, try again, and fail.

A request that no free block serves takes a segment (or pages) of the device. Where ``cudaMalloc`` (``cuMemCreate``)
refuses, ``DeviceCachingAllocator::malloc`` of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.13) tries in turn

1. callbacks (``trigger_free_memory_callbacks``; the only one registered collects tensors that other processes share);
2. garbage collection (``garbage_collect_cached_blocks``), where both a memory fraction and a threshold are set;
3. ``alloc_block``;
4. ``release_available_cached_blocks``, where ``max_split_size_mb`` is set: large blocks of this stream that are never
   split; then ``alloc_block`` again;
5. ``release_cached_blocks``, except while a CUDA graph is captured: it waits for the events of ``record_stream``, and
   gives back every wholly free segment and every wholly free page; then ``alloc_block`` again, which alone counts in
   ``num_alloc_retries``.

What still fails is ``torch.OutOfMemoryError`` and counts in ``num_ooms``. Sizes are in units of 512 B, except where
bytes are named.
"""

from __future__ import annotations

from ..values import dataclass
from .blocks import LARGEST_SMALL, SHIFT, UNIT_BITS, SegmentPool
from .caching import AllocatorSettings


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory, in bytes."""

    limit: int
    """What PyTorch's allocator may take of it: what other processes, CUDA's context and libraries leave."""
    total: int = 0
    """All of it, of which a memory fraction is a part (``cudaMemGetInfo``); 0: ``limit``."""


class OutOfMemoryError(Exception):
    """A request for ``size`` bytes that fails, where PyTorch raises ``torch.OutOfMemoryError``."""

    def __init__(self, size: int, tried: int, allocated: int, reserved: int) -> None:
        self.size = size
        """As rounded by the allocator."""
        self.tried = tried
        """The segment that it asked the device for: what PyTorch's message says it tried to allocate."""
        self.allocated, self.reserved = allocated, reserved
        """Bytes of the process at that time, after everything possible was given back."""
        super().__init__(f"{tried} bytes of {reserved} reserved")


class Memory:
    """The device's memory as the pools of one process share it: ``small`` and ``large`` ones, by stream."""

    __slots__ = (
        "_ages",
        "_calls",
        "allowed",
        "collect_above",
        "full",
        "large",
        "limit",
        "retries",
        "small",
        "total",
    )

    def __init__(
        self,
        settings: AllocatorSettings,
        device: DeviceMemory,
        small: dict[int, SegmentPool],
        large: dict[int, SegmentPool],
    ) -> None:
        self.small, self.large = small, large
        self.limit, self.total = device.limit >> UNIT_BITS, device.total or device.limit
        fraction, threshold = settings.memory_fraction, settings.garbage_collection_threshold
        allowed = None if fraction is None else int(fraction * self.total)
        self.allowed = None if allowed is None else allowed >> UNIT_BITS
        """What the memory fraction allows (``setMemoryFraction``)."""
        self.collect_above = int(threshold * allowed) >> UNIT_BITS if threshold and allowed is not None else None
        """Reserved units above which old free blocks are given back."""
        self.full = 0
        """Units in small segments beside those of the pools, which equal tensors fill (``Rank.fill``)."""
        self.retries = 0
        """``num_alloc_retries``."""
        self._calls = 0
        """Requests for large blocks (``get_free_blocks_call_count``);"""
        self._ages: dict[tuple[int, int], int] = {}
        """and how many there had been when a free one, by stream and code, came to be (``gc_count_base``)."""

    @property
    def reserved(self) -> int:
        return self.full + sum([pool.reserved for pools in (self.small, self.large) for pool in pools.values()])

    def over(self) -> bool:
        """More is reserved than there is: what pools took without asking was too much."""
        return self.reserved > (self.limit if self.allowed is None else min(self.limit, self.allowed))

    def take(self, pool: SegmentPool, units: int) -> int:
        """Code of the block that a request to ``pool`` gets; 0 where it fails."""
        if self.collect_above is not None:
            return self._take_young(pool, units, self.collect_above)
        return pool.reuse(units) or self._new(pool, units)

    def error(self, pool: SegmentPool, units: int, allocated: int) -> OutOfMemoryError:
        """What to raise where ``take`` found nothing; ``allocated`` units are live."""
        sizes = [size << UNIT_BITS for size in (units, pool.segment_size(units), allocated, self.reserved)]
        return OutOfMemoryError(*sizes)

    def release(self) -> None:
        """Give back all that is wholly free (``release_cached_blocks``)."""
        for pools in (self.large, self.small):
            for pool in pools.values():
                pool.release()

    def _new(self, pool: SegmentPool, units: int) -> int:
        """A block that no free one is."""
        code = self._allocate(pool, units)
        if not code and pool.release_oversize(units):
            code = self._allocate(pool, units)
        if not code:
            self.release()
            self.retries += 1
            code = self._allocate(pool, units)
        return code

    def _allocate(self, pool: SegmentPool, units: int) -> int:
        """``alloc_block``."""
        reserved = self.reserved
        if self.allowed is not None and reserved + pool.segment_size(units) > self.allowed:
            return 0
        return pool.grow(units, self.limit - reserved)

    # -- garbage collection ------------------------------------------------------------------------------------

    def _take_young(self, pool: SegmentPool, units: int, above: int) -> int:
        """``take``, where old free blocks are given back as soon as more than ``above`` units are reserved."""
        self._note()
        self._calls += units > LARGEST_SMALL
        code = pool.reuse(units)
        if not code:
            if self.reserved > above:
                self._collect(self.reserved - above)
            code = self._new(pool, units)
        self._note()
        return code

    def _note(self) -> None:
        """Free blocks that are new since the last time have come to be now."""
        free = [(stream, code) for stream, pool in self.large.items() for code in pool.free]
        self._ages = {one: self._ages.get(one, self._calls) for one in free}

    def _collect(self, wanted: int) -> None:
        """Give back wholly free large segments of the average age or more, until they come to ``wanted``."""
        whole = [(stream, code) for stream, pool in self.large.items() for code in pool.whole()]
        ages = {one: self._calls - self._ages[one] for one in whole}
        given = 0
        while ages and given < wanted:
            average = sum(ages.values()) / len(ages)
            for stream, code in [one for one, age in ages.items() if age >= average]:
                self.large[stream].release_block(code)
                given += code >> SHIFT
                del ages[stream, code]


_PRINTED = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def printed(size: int) -> str:
    """``size`` bytes as PyTorch prints it (``format_size``)."""
    for unit, name in _PRINTED:
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
