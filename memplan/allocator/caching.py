"""PyTorch's CUDA caching allocator, replayed: from requested to allocated and reserved bytes.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate("logits", 101 * 2**20) // 2**20      # a rest of 1 MiB is not split off
    102
    >>> allocator.free("logits")
    >>> allocator.allocated, allocator.reserved // 2**20
    (0, 102)

The model is ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13, whose rules for sizes have not
changed since 2.1 (``large_segment_size_mb`` is newer). Between free blocks of one size 2.13 prefers
the older segment; releases before it go by the address (2.12.0 by neither), and ``cudaMalloc`` gives
most segments addresses below those that it gave before: eleven histories of training on an H200 (torch 2.11,
driver 580) replay to the byte with the addresses that were there; with falling ones nine of them do, and two
within 0.6 % (``tests/allocator/test_histories.py``). Events are in stream order and a free takes effect at once, so
delays by ``record_stream`` are seen where ``free`` is told of them. With a limit of the device's memory the allocator
does what PyTorch does when ``cudaMalloc`` fails (``memory.py``); without one memory never runs out.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import NamedTuple

from ..values import dataclass
from .blocks import (
    ADDRESS,
    LARGEST_SMALL,
    SHIFT,
    SMALL_SEGMENT,
    UNBOUNDED,
    UNIT_BITS,
    ExpandablePool,
    Rules,
    SegmentPool,
)
from .memory import DeviceMemory, Memory

_MIB = 1 << 20
_ROUND = (1 << UNIT_BITS) - 1

_INTERVALS = 16
"""Of ``roundup_power2_divisions``: sizes in [2^i, 2^(i+1)) MiB; the outer ones are open-ended."""

_MODELLED = frozenset(
    {
        "expandable_segments",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "roundup_power2_divisions",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "backend",
        "expandable_segments_reserve",
        "expandable_segments_reserve_by_class",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
"""Keys that concern host memory, locks, CUDA graphs, addresses, or an error before ``cudaMalloc``'s own."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What ``PYTORCH_ALLOC_CONF`` says about the blocks that requests get. Sizes in bytes."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of this size or more are never split; ``None``: all may be."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Steps from one power of two to the next, to which requests are rounded up: none, or one number
    for each of 16 intervals [2^i, 2^(i+1)) MiB. 0 and 1 leave the rounding to 512 B."""
    large_segment_size: int = 20 * _MIB
    """What a request above 1 and below 10 MiB reserves, and the page of large expandable segments."""
    max_non_split_rounding: int = 20 * _MIB
    """A request of ``max_split_size`` or more takes no free block that is larger by this or more."""
    memory_fraction: float | None = None
    """Of the device's memory, what the process may take; ``None``: all of it, which the variable's 1 means, too."""
    garbage_collection_threshold: float | None = None
    """Of what ``memory_fraction`` allows, where the allocator begins to give old free blocks back; without a
    fraction it has no effect."""
    oldest_first: bool = True
    """Between free blocks of one size the one in the older segment is taken, else that in the newer one. Not of the
    variable: torch's release says it."""

    @classmethod
    def parse(cls, conf: str) -> AllocatorSettings:
        """The value of ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF``, such as
        ``expandable_segments:True,max_split_size_mb:512``.

        As in ``AcceleratorAllocatorConfig::parseArgs`` blanks do not count, the last mention of a key
        wins, and whatever follows the digits of a number is ignored. Keys that cannot change the
        figures while memory suffices are accepted. Anything else is a ``ValueError``.
        """
        found = dict(_entries(conf))
        if found.get("backend", "native") != "native":
            raise ValueError(f"backend:{found['backend']} is not modelled; the one that is, is backend:native")
        threshold = found.get("garbage_collection_threshold")
        fraction = found.get("per_process_memory_fraction")
        if threshold is not None and not 0 < _real(threshold) < 1:
            raise ValueError(_expected(found, "garbage_collection_threshold", "a number between 0 and 1"))
        if fraction is not None and not 0 <= _real(fraction) <= 1:
            raise ValueError(_expected(found, "per_process_memory_fraction", "a number from 0 to 1"))
        segment = _mebibytes(found, "large_segment_size_mb", least=11) or 20
        split = _mebibytes(found, "max_split_size_mb", least=segment)
        rounding = _mebibytes(found, "max_non_split_rounding_mb", least=segment) or segment
        return cls(
            expandable_segments=_flag(found, "expandable_segments"),
            max_split_size=split and split * _MIB,
            roundup_power2_divisions=_divisions(found, "roundup_power2_divisions"),
            large_segment_size=segment * _MIB,
            max_non_split_rounding=rounding * _MIB,
            memory_fraction=None if fraction is None or _real(fraction) == 1 else _real(fraction),
            garbage_collection_threshold=None if threshold is None else _real(threshold),
        )

    def units(self, size: int) -> int:
        """``size`` ≥ 0 bytes rounded up as a request is, in units of 512 B (``round_size``)."""
        if self.roundup_power2_divisions:
            interval = min(max(size.bit_length() - 21, 0), _INTERVALS - 1)
            divisions = self.roundup_power2_divisions[interval]
            if divisions > 1 and size > divisions << UNIT_BITS:
                step = 1 << size.bit_length() - divisions.bit_length()
                return -(-size // step) * step >> UNIT_BITS
        return size + _ROUND >> UNIT_BITS

    def pool(self, small: bool, total: int = 0) -> SegmentPool:
        """An empty pool for the small or the large requests of one stream, on a device with ``total`` bytes of memory
        (0: without end)."""
        least_rest = 1 if small or self.expandable_segments else LARGEST_SMALL + 1
        segment = SMALL_SEGMENT if small else self.large_segment_size >> UNIT_BITS
        rules = Rules(least_rest, segment, falls=not self.oldest_first)
        if self.max_split_size is not None and not small:
            rounding = self.max_non_split_rounding >> UNIT_BITS
            largest = min(self.max_split_size >> UNIT_BITS, UNBOUNDED)
            rules = rules._replace(max_split=largest, max_rounding=rounding)
        if not self.expandable_segments:
            return SegmentPool(rules)
        pages = -(-(total + total // 8) // (segment << UNIT_BITS))  # find_expandable_block's address_space_size
        return ExpandablePool(rules._replace(reach=pages * segment, falls=False))


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
        self._memory = None if memory is None else Memory(settings, memory, self._small, self._large)
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

    def _take(self, memory: Memory, pool: SegmentPool, units: int) -> int:
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


def _entries(conf: str) -> Iterator[tuple[str, str]]:
    """The ``key:value`` pairs of ``conf``, a list in brackets being one value (``ConfigTokenizer``)."""
    known = _MODELLED | _WITHOUT_EFFECT
    for entry in _split(re.sub(r"\s", "", conf)):
        key, _, value = entry.partition(":")
        if not entry:
            continue
        if key not in known:
            raise ValueError(f"unknown allocator setting {key!r} in {entry!r}; known are {', '.join(sorted(known))}")
        if not value:
            raise ValueError(f"allocator setting {key!r} has no value; write {key}:VALUE")
        yield key, value


def _split(conf: str) -> Iterator[str]:
    """``conf`` at its commas, but for those with a closing bracket behind them before any opening one."""
    entry = ""
    parts = re.split(r"([\[\]])", conf)
    for text, bracket in zip(parts[::2], [*parts[1::2], ""], strict=True):
        *before, last = (text,) if bracket == "]" else text.split(",")
        for one in before:
            yield entry + one
            entry = ""
        entry += last + bracket
    yield entry


def _expected(found: dict[str, str], key: str, allowed: str) -> str:
    return f"allocator setting {key}:{found[key]} is not allowed; expected {allowed}"


def _flag(found: dict[str, str], key: str) -> bool:
    """``True`` or ``False``, spelt so (``ConfigTokenizer::toBool``)."""
    if found.get(key, "False") not in ("True", "False"):
        raise ValueError(_expected(found, key, "True or False"))
    return found.get(key) == "True"


def _real(text: str) -> float:
    """A number, NaN where ``text`` is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _whole(text: str) -> int:
    """The whole number that ``text`` begins with, -1 where it begins with none (``std::stoull``)."""
    digits = re.match(r"\+?(\d+)", text)
    return int(digits[1]) if digits else -1


def _mebibytes(found: dict[str, str], key: str, least: int) -> int | None:
    """A size in MiB; ``None`` where not given."""
    if key not in found:
        return None
    size = _whole(found[key])
    if size < least:
        raise ValueError(_expected(found, key, f"a whole number of MiB, at least {least}"))
    return size


def _divisions(found: dict[str, str], key: str) -> tuple[int, ...]:
    """``roundup_power2_divisions``, either ``4`` or ``[256:1,512:2,>:4]`` with intervals in MiB.

    The first interval also stands for those below it, ``>`` for those above the one before it (torch
    2.1 to 2.6: from that one on); those not named have 0 (``parseRoundUpPower2Divisions``).
    """
    text = found.get(key)
    if text is None:
        return ()
    if not text.startswith("["):
        return (_power_of_2(found, key, text),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last: int | None = None
    for entry in filter(None, text.strip("[]").split(",")):
        start, _, value = entry.partition(":")
        division = 0 if _whole(value) == 0 else _power_of_2(found, key, value)
        if start == ">":
            above = (last or 0) + 1
            divisions[above:] = [division] * (_INTERVALS - above)
            continue
        interval = min(_power_of_2(found, key, start).bit_length() - 1, _INTERVALS - 1)
        first = interval if last is not None else 0
        divisions[first : interval + 1] = [division] * (interval + 1 - first)
        last = interval
    return tuple(divisions)


def _power_of_2(found: dict[str, str], key: str, text: str) -> int:
    number = _whole(text)
    if number < 1 or number & number - 1:
        raise ValueError(_expected(found, key, "a power of 2, or a list such as [256:1,512:2,>:4] of them"))
    return number
