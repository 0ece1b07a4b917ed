"""PyTorch's own memory snapshot (``torch.cuda.memory._dump_snapshot``): what a run's allocator did, entry by entry.

The format is that of ``torch/csrc/cuda/memory_snapshot.cpp`` and ``torch/cuda/memory.py``: ``segments`` with their
blocks at the end, and for every device a trace of ``alloc`` (with the bytes asked for), ``free_requested``,
``free_completed``, ``segment_alloc`` and ``segment_free`` (``segment_map``, ``segment_unmap`` of expandable ones),
``oom`` and ``snapshot``, each with the frames that led to it. A trace may begin late, or have lost its beginning: what
was there before is known by what is freed later, and by the blocks that are left.
"""

from __future__ import annotations

import binascii
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..allocator.blocks import LARGEST_SMALL, UNIT_BITS
from ..allocator.caching import AllocatorSettings
from ..allocator.memory import printed
from ..plan.errors import ABSENT, PlanError, one_line
from ..tape.events import rounded
from ..values import dataclass
from .log import Frame, Reported
from .message import OutOfMemory, Size
from .pickles import PickleReader, UnreadableError

LARGEST = 1 << 30
"""Bytes of the largest snapshot that is read: some fifteen million entries."""
LARGEST_JSON = 1 << 28
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom")
"""Those that are looked at; others change nothing that is."""
OTHER = len(ACTIONS)


class Entry(NamedTuple):
    """One of a trace."""

    action: int
    address: int
    """Of ``oom``: bytes that were free on the device."""
    size: int
    frames: Sequence[Any]


class Trace:
    """Entries in columns: a fifth of what they take as dictionaries."""

    __slots__ = ("actions", "addresses", "frames", "known", "sizes", "tables")

    def __init__(self) -> None:
        self.actions, self.addresses, self.sizes = array("B"), array("Q"), array("Q")
        self.frames = array("L")
        self.known: dict[int, int] = {}
        self.tables: list[Sequence[Any]] = []
        """Different lists of frames; entries refer to them."""

    def extend(self, entries: Sequence[Entry]) -> None:
        for action, address, size, frames in entries:
            self.actions.append(action)
            self.addresses.append(address)
            self.sizes.append(size)
            at = self.known.get(id(frames))
            if at is None:
                at = self.known[id(frames)] = len(self.tables)
                self.tables.append(frames)
            self.frames.append(at)

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.actions, self.addresses, self.sizes, self.frames, strict=True)


class Block(NamedTuple):
    """A tensor that is held."""

    size: int
    """As asked for, rounded up to 512 B."""
    frames: Sequence[Any]


class Asked(NamedTuple):
    """A request that failed, or one of many that did not."""

    size: int
    frames: Sequence[Any]
    free: int = 0
    """Of one that failed: bytes that the device had left,"""
    allocated: int = 0
    """and that were held."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one device's allocator did. Sizes in bytes as asked for, each rounded up to 512."""

    device: int
    entries: int
    peak: int
    """The most that was held at a time;"""
    held: tuple[Block, ...]
    """what it was;"""
    unknown: int
    """and how much of it has no frames: it was there before the trace."""
    reserved: int
    """By the segments at the end."""
    requests: tuple[Asked, ...]
    """Every request of ``LARGE`` bytes or more, in order."""
    failed: tuple[Asked, ...]


LARGE = 1 << 20
"""Bytes from which on a request is compared one by one."""


def is_snapshot(data: bytes) -> bool:
    """Whether a file that begins so may be a snapshot: a pickle, JSON, or a page of the memory viewer."""
    start = data[:4096].lstrip()
    if start[:1] in (b"{", b"["):
        return any(key in start for key in (b'"segments"', b'"device_traces"', b'"total_size"'))
    return data[:1] == b"\x80" or start[:5].lower() in (b"<!doc", b"<html")


def read_snapshot(data: bytes) -> tuple[Run, ...]:
    """Every device that did something. ``PlanError`` where ``data`` is no snapshot; nothing in it is trusted."""
    try:
        whole = _value(data)
    except UnreadableError as error:
        raise PlanError("", ABSENT, f"is no memory snapshot: it {error}") from None
    whole = {"segments": whole} if isinstance(whole, list) else whole
    if not isinstance(whole, dict) or not isinstance(whole.get("segments"), list):
        raise PlanError("", ABSENT, "is no memory snapshot: it has no segments (torch.cuda.memory._dump_snapshot)")
    try:
        found = list(_runs(whole["segments"], whole.get("device_traces") or []))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise PlanError("", ABSENT, "is no memory snapshot: its segments or traces are not as PyTorch's") from None
    if not found:
        raise PlanError("", ABSENT, "is a memory snapshot in which nothing was allocated")
    return tuple(found)


def _value(data: bytes) -> Any:
    if data[:1] == b"\x80":
        return PickleReader(data, _packed, _gathered).read()
    page = re.search(rb'"base64": ?"', data) if data.lstrip()[:1] == b"<" else None
    if page is not None:
        end = data.find(b'"', page.end())
        try:
            return PickleReader(binascii.a2b_base64(data[page.end() : end]), _packed, _gathered).read()
        except binascii.Error:
            raise UnreadableError("is a page whose data is damaged") from None
    if len(data) > LARGEST_JSON:
        raise UnreadableError(f"is JSON of more than {LARGEST_JSON >> 20} MiB; dump it as a pickle")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UnreadableError("is neither a pickle of plain values nor JSON") from None


def _packed(found: dict[Any, Any]) -> Any:
    action = found.get("action")
    if action is None:
        return found
    size, address = found.get("size", 0), found.get("addr", found.get("device_free", 0))
    frames = found.get("frames") or ()
    if not isinstance(size, int) or not isinstance(address, int) or not isinstance(frames, (list, tuple)):
        raise TypeError
    number = ACTIONS.index(action) if action in ACTIONS else OTHER
    return Entry(number, address & _WORD, size & _WORD, frames)


_WORD = (1 << 64) - 1


def _gathered(into: list[Any], items: list[Any]) -> None:
    if items and type(items[0]) is Entry:
        if not into:
            into.append(Trace())
        into[0].extend(items)
    else:
        into.extend(items)


# -- what a device did ---------------------------------------------------------------------------------------------


def _runs(segments: list[Any], traces: list[Any]) -> Iterator[Run]:
    devices = {int(segment.get("device", 0)) for segment in segments} | set(range(len(traces)))
    if len(devices) > MOST_DEVICES:
        raise ValueError
    for device in sorted(devices):
        trace = _trace(traces[device] if device < len(traces) else [])
        own = [segment for segment in segments if int(segment.get("device", 0)) == device]
        run = _run(device, own, trace)
        if run.peak or run.failed:
            yield run


MOST_DEVICES = 64


def _trace(found: Any) -> Trace:
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], Trace):
        return found[0]
    trace = Trace()
    trace.extend([_packed(entry) for entry in found])
    return trace


def _run(device: int, segments: list[Any], trace: Trace) -> Run:
    left = dict(_left(segments))
    begun: dict[int, int] = {}
    freed: dict[int, int] = {}
    """What was there before the trace and is freed in it: when, by address."""
    total = most = 0
    place = -1
    requests: list[Asked] = []
    failed: list[Asked] = []
    for at, (action, address, size, frames) in enumerate(trace):
        match action:
            case 0:
                begun[address] = rounded(size)
                total += begun[address]
                if size >= LARGE:
                    requests.append(Asked(rounded(size), trace.tables[frames]))
                if total > most:
                    most, place = total, at
            case 2:
                if address in begun:
                    total -= begun.pop(address)
                else:
                    freed.setdefault(at, rounded(size))
                    total -= rounded(size)
            case 5:
                failed.append(Asked(size, trace.tables[frames], address, total))
    before = [block for address, block in left.items() if address not in begun]
    later = [Block(size, ()) for at, size in freed.items() if at > place]
    held = [*_held_at(trace, place), *before, *later]
    offset = sum(block.size for block in before) + sum(freed.values())
    failed = [one._replace(allocated=one.allocated + offset) for one in failed]
    reserved = sum(int(segment["total_size"]) for segment in segments)
    nameless = sum(block.size for block in held if not block.frames)
    peak = sum(block.size for block in held)
    return Run(device, len(trace), peak, tuple(held), nameless, reserved, tuple(requests), tuple(failed))


def _left(segments: list[Any]) -> Iterator[tuple[int, Block]]:
    """What is held at the end, by address."""
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                own = int(block.get("address", address))
                yield own, Block(rounded(int(block.get("requested_size", block["size"]))), _frames(block))
            address += int(block["size"])


def _frames(block: Mapping[str, Any]) -> Sequence[Any]:
    history = block.get("history") or [{}]
    frames = block.get("frames") or history[0].get("frames") or ()
    return frames if isinstance(frames, (list, tuple)) else ()


def _held_at(trace: Trace, place: int) -> list[Block]:
    """What the trace's own requests hold when the one at ``place`` has been served."""
    live: dict[int, Block] = {}
    for at, (action, address, size, frames) in enumerate(trace):
        if at > place:
            break
        if action == 0:
            live[address] = Block(rounded(size), trace.tables[frames])
        elif action == 2:
            live.pop(address, None)
    return list(live.values())


def reported(run: Run) -> Reported | None:
    """The first request that failed, as its message would have been; ``None`` where none has."""
    if not run.failed:
        return None
    asked = run.failed[0]
    units = AllocatorSettings().units(asked.size)
    tried = AllocatorSettings().pool(units <= LARGEST_SMALL).segment_size(units) << UNIT_BITS
    size = Size(printed(tried), tried, tried, tried)
    message = OutOfMemory(
        f"Tried to allocate {size.text}", "pytorch", size, run.device, free=asked.free, allocated=asked.allocated
    )
    return Reported(message, frames=frames_of(asked.frames))


MOST_FRAMES = 60


def frames_of(found: Sequence[Any]) -> tuple[Frame, ...]:
    """The Python frames of a block, from the outermost to the innermost, as of a traceback."""
    frames = []
    for one in found[:MOST_FRAMES]:
        if isinstance(one, Mapping):
            line = one.get("line", 0)
            file, name = one_line(str(one.get("filename", ""))[:300]), one_line(str(one.get("name", ""))[:200])
            frames.append(Frame(file, line if isinstance(line, int) else 0, name))
    return tuple(reversed(frames))
