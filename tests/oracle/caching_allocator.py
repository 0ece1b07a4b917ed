"""PyTorch's caching allocator as an object that is asked request by request, of the product's own pools and memory.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate("logits", 101 * 2**20) // 2**20      # a rest of 1 MiB is not split off
    102
    >>> allocator.free("logits")
    >>> allocator.allocated, allocator.reserved // 2**20
    (0, 102)

Replays of whole programs must equal it event by event; itself it is held against PyTorch's library and against
histories of training. Events are in stream order and a free takes effect at once, so delays by ``record_stream`` are
seen where ``free`` is told of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import NamedTuple

from memplan.allocator.blocks import ADDRESS, LARGEST_SMALL, SHIFT, UNIT_BITS, SegmentPool
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.memory import DeviceMemory, Memory

_ROUND = (1 << UNIT_BITS) - 1


class Block(NamedTuple):
    """A piece of a segment, in bytes. Addresses count from 0 in each pool."""

    address: int
    size: int
    live: bool


class Segment(NamedTuple):
    """Adjoining memory that the device handed out at once, or page by page if expandable."""

    stream: int
    small: bool
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(block.size for block in self.blocks)


class _Memory(Memory):
    """With what streams wait for."""

    __slots__ = ("waiting",)

    def __init__(
        self,
        settings: AllocatorSettings,
        device: DeviceMemory,
        small: dict[int, SegmentPool],
        large: dict[int, SegmentPool],
    ) -> None:
        super().__init__(settings, device, small, large)
        self.waiting: list[tuple[int, int]] = []
        """Blocks that were freed while another stream may still use them (``record_stream``), each with its own
        stream. They come back when somebody waits for that."""

    def release(self) -> None:
        for stream, code in self.waiting:
            (self.small if code >> SHIFT <= LARGEST_SMALL else self.large)[stream].give(code)
        self.waiting.clear()
        super().release()

    def copy(self, small: dict[int, SegmentPool], large: dict[int, SegmentPool]) -> _Memory:
        """Of copied pools."""
        twin = copy(self)
        twin.small, twin.large = small, large
        twin.waiting, twin._ages = self.waiting[:], self._ages.copy()
        return twin


class CachingAllocator:
    """One device's allocator, as one process sees it. Every size is in bytes.

    With ``memory`` a request may fail: ``OutOfMemoryError``, after which the allocator is as PyTorch's is behind its
    ``torch.OutOfMemoryError``, and goes on.
    """

    __slots__ = (
        "_allocated",
        "_large",
        "_live",
        "_memory",
        "_ooms",
        "_peak_allocated",
        "_peak_reserved",
        "_requested",
        "_small",
        "settings",
    )

    def __init__(
        self,
        settings: AllocatorSettings = AllocatorSettings(),  # noqa: B008 (immutable)
        memory: DeviceMemory | None = None,
    ) -> None:
        self.settings = settings
        self._live: dict[Hashable, tuple[int, int, int]] = {}  # key: stream, code of the block, units requested
        self._small: dict[int, SegmentPool] = {}  # by stream
        self._large: dict[int, SegmentPool] = {}
        self._memory = None if memory is None else _Memory(settings, memory, self._small, self._large)
        self._requested = self._allocated = self._peak_allocated = self._peak_reserved = self._ooms = 0

    @property
    def requested(self) -> int:
        """Live requests, each rounded up to 512 B."""
        return self._requested << UNIT_BITS

    @property
    def allocated(self) -> int:
        """Blocks handed out: ``torch.cuda.memory_allocated``."""
        return self._allocated << UNIT_BITS

    @property
    def reserved(self) -> int:
        """Segments, or mapped pages, taken from the device: ``torch.cuda.memory_reserved``."""
        return sum(pool.reserved for pool in self._pools) << UNIT_BITS

    @property
    def peak_allocated(self) -> int:
        """``torch.cuda.max_memory_allocated``."""
        return self._peak_allocated << UNIT_BITS

    @property
    def peak_reserved(self) -> int:
        """``torch.cuda.max_memory_reserved``."""
        return max(self._peak_reserved, self.reserved)

    @property
    def retries(self) -> int:
        """``num_alloc_retries`` of ``torch.cuda.memory_stats``."""
        return 0 if self._memory is None else self._memory.retries

    @property
    def ooms(self) -> int:
        """``num_ooms`` of ``torch.cuda.memory_stats``: requests that failed."""
        return self._ooms

    def allocate(self, key: Hashable, size: int, stream: int = 0) -> int:
        """Hand out a block for ``size`` bytes under ``key``; the size of the block, 0 for 0 bytes. ``OutOfMemoryError``
        where it needs more than there is."""
        live = self._live
        if key in live:
            raise ValueError(f"{key!r} is live already; free it before allocating it again")
        settings = self.settings
        requested = units = size + _ROUND >> UNIT_BITS
        if units <= 0:
            return self._hold_nothing(key, size)
        if settings.roundup_power2_divisions:
            units = settings.units(size)
        pool = (self._small if units <= LARGEST_SMALL else self._large).get(stream)
        if pool is None:
            pool = self._open_pool(stream, units <= LARGEST_SMALL)
        code = pool.take(units) if self._memory is None else self._take(self._memory, pool, units)
        live[key] = stream, code, requested
        held = code >> SHIFT
        self._requested += requested
        self._allocated = allocated = self._allocated + held
        if allocated > self._peak_allocated:
            self._peak_allocated = allocated
        return held << UNIT_BITS

    def free(self, key: Hashable, *, in_use: bool = False) -> None:
        """Take back the block under ``key``. ``in_use``: another stream may still work on it (``record_stream``); with
        a limit it comes back only when the allocator waits for that."""
        try:
            stream, code, requested = self._live.pop(key)
        except KeyError:
            raise ValueError(f"{key!r} is not live, so it cannot be freed") from None
        if code:
            self._requested -= requested
            self._allocated -= code >> SHIFT
            if in_use and self._memory is not None:
                self._memory.waiting.append((stream, code))
            else:
                self._pool_of(stream, code).give(code)

    def empty_cache(self) -> None:
        """Give back what is wholly free, segments or pages: ``torch.cuda.empty_cache``."""
        self._peak_reserved = self.peak_reserved
        if self._memory is not None:
            self._memory.release()
        for pool in self._pools:
            pool.release()

    def copy(self) -> CachingAllocator:
        """An independent copy."""
        twin = copy(self)
        twin._live = self._live.copy()
        twin._small = {stream: pool.copy() for stream, pool in self._small.items()}
        twin._large = {stream: pool.copy() for stream, pool in self._large.items()}
        if self._memory is not None:
            twin._memory = self._memory.copy(twin._small, twin._large)
        return twin

    def snapshot(self) -> tuple[Segment, ...]:
        """Every segment with its blocks in order of address, pool by pool: ``torch.cuda.memory_snapshot``."""
        live: dict[int, list[int]] = {id(pool): [] for pool in self._pools}
        for stream, code, _ in self._live.values():
            if code:
                live[id(self._pool_of(stream, code))].append(code)
        return tuple(
            Segment(stream, pools is self._small, blocks)
            for pools in (self._small, self._large)
            for stream, pool in pools.items()
            for blocks in _segments(pool.free, live[id(pool)])
        )

    @property
    def _pools(self) -> tuple[SegmentPool, ...]:
        return (*self._small.values(), *self._large.values())

    def _pool_of(self, stream: int, code: int) -> SegmentPool:
        return (self._small if code >> SHIFT <= LARGEST_SMALL else self._large)[stream]

    def _open_pool(self, stream: int, small: bool) -> SegmentPool:
        pools, memory = self._small if small else self._large, self._memory
        pools[stream] = pool = self.settings.pool(small, 0 if memory is None else memory.total)
        return pool

    def _take(self, memory: _Memory, pool: SegmentPool, units: int) -> int:
        """The block of a request to a device whose memory ends."""
        before = self.reserved
        code = memory.take(pool, units)
        self._peak_reserved = max(self._peak_reserved, before)
        if not code:
            self._ooms += 1
            raise memory.error(pool, units, self._allocated)
        return code

    def _hold_nothing(self, key: Hashable, size: int) -> int:
        """An empty tensor never reaches the allocator (``NativeCachingAllocator::allocate``)."""
        if size < 0:
            raise ValueError(f"cannot allocate {size} bytes for {key!r}")
        self._live[key] = 0, 0, 0
        return 0


@lru_cache(maxsize=1 << 14)
def block_size(size: int, settings: AllocatorSettings = AllocatorSettings()) -> int:  # noqa: B008 (immutable)
    """Bytes of the block that a request for ``size`` bytes gets while nothing is cached."""
    return CachingAllocator(settings).allocate(None, size)


def _segments(free: Iterable[int], live: Iterable[int]) -> Iterator[tuple[Block, ...]]:
    """The blocks with these codes by address, in runs without gaps."""
    codes = [(code & ADDRESS, code >> SHIFT, False) for code in free]
    codes += [(code & ADDRESS, code >> SHIFT, True) for code in live]
    run: list[Block] = []
    for address, size, is_live in sorted(codes):
        block = Block(address << UNIT_BITS, size << UNIT_BITS, is_live)
        if run and run[-1].address + run[-1].size != block.address:
            yield tuple(run)
            run = []
        run.append(block)
    if run:
        yield tuple(run)
