"""Settings of PyTorch's CUDA caching allocator, and the pools that follow from them.

The model of the allocator is ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13, whose rules for sizes have not
changed since 2.1 (``large_segment_size_mb`` is newer). Between free blocks of one size 2.13 prefers
the older segment; releases before it go by the address (2.12.0 by neither), and ``cudaMalloc`` gives
most segments addresses below those that it gave before: eleven histories of training on an H200 (torch 2.11,
driver 580) replay to the byte with the addresses that were there; with falling ones nine of them do, and two
within 0.6 % (``tests/allocator/test_histories.py``). With a limit of the device's memory the allocator does what
PyTorch does when ``cudaMalloc`` fails (``memory.py``); without one memory never runs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..values import dataclass
from .blocks import (
    LARGEST_SMALL,
    SMALL_SEGMENT,
    UNBOUNDED,
    UNIT_BITS,
    ExpandablePool,
    Rules,
    SegmentPool,
)

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

    @property
    def gives_back_early(self) -> bool:
        """Free blocks may be given back for a request without a retry that counts (``memory.py``, 2 and 4)."""
        return self.max_split_size is not None or self.garbage_collection_threshold is not None

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
            roundup_power2_divisions=_divisions(found),
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


def _divisions(found: dict[str, str]) -> tuple[int, ...]:
    """``roundup_power2_divisions``, either ``4`` or ``[256:1,512:2,>:4]`` with intervals in MiB.

    The first interval also stands for those below it, ``>`` for those above the one before it (torch
    2.1 to 2.6: from that one on); those not named have 0 (``parseRoundUpPower2Divisions``).
    """
    key = "roundup_power2_divisions"
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
