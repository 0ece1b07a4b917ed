"""Blocks of one stream and one size class, as PyTorch's CUDA caching allocator keeps them.

Sizes and addresses are counted in units of 512 B, the allocator's granularity. A block is one
integer, its *code*: the size above the low ``SHIFT`` bits, the address in them. Codes therefore
sort by (size, address), the order in which ``BlockComparatorSize`` searches for the best fit.
Neighbours need no links: two free neighbours are always merged, so an address is an edge of at
most one free block, and a dictionary from edges to codes finds both neighbours of a block.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of torch 2.13; each
docstring names the function that it follows. Addresses only break ties between blocks of equal
size; they rise in the order in which segments are taken, by which torch 2.13 breaks ties, or fall, as
``cudaMalloc`` gives them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import add, and_, rshift
from typing import Any, TypeVar

from ..values import NamedTuple
from .requests import Requests

UNIT_BITS = 9
"""A unit is 2^9 = 512 B, ``kMinBlockSize``."""
SHIFT = 40
ADDRESS = (1 << SHIFT) - 1
"""The low bits of a code: 2^40 units are 512 TiB of addresses."""
MIB = 1 << 20 >> UNIT_BITS
"""Units in a MiB."""

LARGEST_SMALL = 1 * MIB
"""``kSmallSize``: the largest request that a small pool serves."""
SMALL_SEGMENT = 2 * MIB
"""``kSmallBuffer``: a segment, or an expandable page, of a small pool."""
OWN_SEGMENT = 10 * MIB
"""``kMinLargeAlloc``: from here on a request gets a segment of its own size."""
SEGMENT_STEP = 2 * MIB
"""``kRoundLarge``: such a segment is rounded up to a multiple of this."""
UNBOUNDED = ADDRESS
"""More than any size. Expandable segments end there; PyTorch reserves 9/8 of the device's memory."""

AT_ONCE = 12
"""Blocks that are faster given back together than one after the other."""

Step = tuple[int, int, int, int, Any]
"""For ``run``. Slot of a block; units that it takes, negative where it is given back, 0 where nothing
happens; the least code of a block that fits; the most units held until the next step, and the place of that. With 0
units and a code: steps of small blocks that give back what they take, ``Brief`` being the place."""


class Brief(NamedTuple):
    """Few steps that free blocks serve if one has the step's code or more, or if they serve ``requests``."""

    steps: tuple[Step, ...]
    requests: Requests
    others: tuple[int, ...] = ()
    """Slots of blocks that they give back, behind their last request, and have not taken."""


class Given(NamedTuple):
    """Blocks that come back."""

    slots: Sequence[int]
    units: int
    """Of their requests."""


class Stretch(NamedTuple):
    """Steps in a row."""

    parts: tuple[tuple[Given, tuple[Step, ...]], ...]
    """What steps from each place on give back that was taken before it, if the stretch gives back all that it takes;
    and the steps until the next place."""
    together: int = 0
    """Blocks that such steps take and hold at once, at most; 0 of others;"""
    requests: Requests | None = None
    top: int = 0
    """and the most units held."""

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(chain.from_iterable(steps for _, steps in self.parts))


Pool = TypeVar("Pool", bound="SegmentPool")


class Rules(NamedTuple):
    """What tells one pool from another, in units of 512 B."""

    least_rest: int
    """The smallest remainder that is split off a block (``should_split``)."""
    segment: int
    """The segment of requests below ``OWN_SEGMENT``, or the page of an expandable segment."""
    max_split: int = UNBOUNDED
    """Blocks of this size or more are not split, and serve no smaller request."""
    max_rounding: int = 0
    """A request of ``max_split`` or more takes no block that is larger by this or more."""
    falls: bool = False
    """Each segment lies below those that were taken before."""
    reach: int = 0
    """Addresses of one expandable segment, in whole pages; 0: without end."""


class SegmentPool:
    """Blocks inside segments that ``cudaMalloc`` returned.

    ``free`` holds the codes of the free blocks in order; ``edges`` maps both edges of each of them
    to its code; ``segments`` maps the address of each segment to its size; ``reserved`` is their sum.
    """

    __slots__ = ("edges", "free", "least_rest", "picky", "reserved", "rules", "segments", "split_below", "top")

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.least_rest = rules.least_rest
        self.split_below = rules.max_split
        self.picky = rules.max_split < UNBOUNDED
        self.free: list[int] = []
        self.edges: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.reserved = 0
        self.top = ADDRESS if rules.falls else 0

    def take(self, units: int) -> int:
        """Hand out a block; its code: ``reuse``, failing that ``grow``."""
        return self.reuse(units) or self.grow(units, UNBOUNDED)

    def give(self, code: int) -> None:
        """Take a block back."""
        free, edges = self.free, self.edges
        address, end = code & ADDRESS, (code & ADDRESS) + (code >> SHIFT)
        before, after = edges.pop(address, 0), edges.pop(end, 0)
        if before:
            del free[bisect_left(free, before)]
            code += before - address
            address = before & ADDRESS
        if after:
            del free[bisect_left(free, after)]
            code += after - end
            end += after >> SHIFT
        edges[address] = edges[end] = code
        insort(free, code)

    def run_all(self, stretches: Iterable[Stretch], blocks: list[int], limit: int) -> tuple[int, int, int]:
        """``run`` with all steps of ``stretches``.

        Where what lives does not need a new segment, it decides where free blocks lie. So of a stretch that gives back
        what it takes, and whose requests free blocks serve for certain, only that is run which gives back what was
        taken before, if its most, with what blocks may exceed requests, is no new peak. Where they do not serve it, its
        first part is run, behind which they may serve the others.
        """
        rest = 0 if self.picky else self.least_rest
        beyond, highest = 0, -1
        for parts, together, requests, top in stretches:
            for given, steps in parts:
                if requests is not None and rest and top + together * rest + beyond <= limit:
                    back = self.give_all((requests,), given, blocks)
                    if back is not None:
                        beyond += back
                        break
                more, limit, place = self.run(steps, blocks, limit - beyond)
                limit += beyond
                beyond += more
                if place >= 0:
                    highest = place
        return beyond, limit, highest

    def give_all(self, requests: Collection[Requests], given: Given, blocks: list[int]) -> int | None:
        """Take back what is ``given``, if free blocks serve all of each of ``requests``, one after the other,
        wherever that makes larger ones of some; the units by which blocks exceed their requests more than before, or
        ``None`` where they may not serve.
        """
        free, edges = self.free, self.edges
        many = len(given.slots) >= AT_ONCE
        for one in requests if many else ():
            if not one.served(free):
                return None
        codes = [*map(blocks.__getitem__, given.slots)]
        starts: list[int] = [*map(and_, codes, repeat(ADDRESS))]
        ends: list[int] = [*map(add, starts, map(rshift, codes, repeat(SHIFT)))]
        firsts, lasts = {*starts}, {*ends}
        changing = {edges[edge] for own in (firsts, lasts) for edge in edges.keys() & own}
        for one in requests:
            if not one.served(free, changing):
                return None
        if many:
            self._give_many(firsts, lasts, changing)
        else:
            for code in codes:
                self.give(code)
        return sum(starts) - sum(ends) + given.units

    def _give_many(self, starts: set[int], ends: set[int], neighbours: set[int]) -> None:
        """Take back the blocks with these ``starts`` and ``ends``, whose free neighbours have the codes ``neighbours``.
        What is free behind it begins and ends where no two free blocks meet."""
        free, edges = self.free, self.edges
        for code in neighbours:
            start = code & ADDRESS
            end = start + (code >> SHIFT)
            del edges[start], edges[end]
            starts.add(start)
            ends.add(end)
        made: list[int] = []
        for start, end in zip(sorted(starts - ends), sorted(ends - starts), strict=True):
            code = edges[start] = edges[end] = end - start << SHIFT | start
            made.append(code)
        if len(neighbours) + len(made) << 5 < len(free):
            for code in neighbours:
                del free[bisect_left(free, code)]
            for code in made:
                insort(free, code)
        else:
            free[:] = sorted([code for code in free if code not in neighbours] + made)

    def run(self, steps: Iterable[Step], blocks: list[int], limit: int) -> tuple[int, int, int]:
        """Hand blocks out and take them back; codes go to and come from ``blocks``.

        A request gets the best-fitting block, cut where its rest is worth keeping (``get_free_block``, failing that
        ``alloc_block``; then ``should_split`` and ``alloc_found_block``); a block that comes back is merged with its
        free neighbours (``free_block``, ``try_merge_blocks``).

        Returns the units by which blocks exceed their requests in the end more than at the beginning; the most
        units that were held at a time, beginning with 0, if above ``limit``; and the place of that, else -1.
        """
        free, edges = self.free, self.edges
        worth, split_below, picky = self.least_rest << SHIFT, self.split_below, self.picky
        beyond, highest, bound = 0, -1, limit
        """``bound``: the ``limit`` of what is requested."""
        for slot, units, least, top, place in steps:
            if units > 0:
                index = bisect_left(free, least)
                if picky:
                    index = self._pick(index, units)
                try:
                    code = free[index]
                    address = code & ADDRESS
                    del edges[address]
                except IndexError:
                    code = self._grow(units)
                    address, index = code & ADDRESS, len(free)
                    free.append(code)
                rest = code - least + units  # the code of what is left
                if rest >= worth and units < split_below:
                    blocks[slot] = least | address
                    address += units
                    edges[address] = edges[address + (rest >> SHIFT)] = rest
                    if index and free[index - 1] > rest:
                        del free[index]
                        insort(free, rest, 0, index)
                    else:
                        free[index] = rest
                else:
                    del free[index]
                    held = code >> SHIFT
                    edges.pop(address + held, None)  # new memory has no edges yet
                    blocks[slot] = code
                    if held != units:
                        beyond += held - units
                        bound -= held - units
            elif units:
                code, least = blocks[slot], 0
                address, held = code & ADDRESS, code >> SHIFT
                end = address + held
                if held + units:
                    beyond -= held + units
                    bound += held + units
                if address in edges:
                    before = edges.pop(address)
                    least = bisect_left(free, before)
                    del free[least]
                    code += before - address
                    address = before & ADDRESS
                if end in edges:
                    after = edges.pop(end)
                    least = bisect_left(free, after)
                    del free[least]
                    code += after - end
                    end += after >> SHIFT
                edges[address] = edges[end] = code
                insort(free, code, least)
            elif least:
                if picky or not free or (free[-1] < least and not place.requests.served(free)):
                    more = self.run(place.steps, blocks, UNBOUNDED)[0]
                    beyond += more
                    bound -= more
                else:
                    for slot in place.others:
                        self.give(blocks[slot])
            if top > bound:
                bound, limit, highest = top, top + beyond, place
        return beyond, limit, highest

    def reuse(self, units: int) -> int:
        """``take`` from the free blocks alone (``get_free_block``); 0 where none will do."""
        free, edges = self.free, self.edges
        least = units << SHIFT
        index = bisect_left(free, least)
        if self.picky:
            index = self._pick(index, units)
        if index == len(free):
            return 0
        code = free[index]
        address, rest = code & ADDRESS, code - least + units
        behind = address + units
        del edges[address]
        if rest >> SHIFT < self.least_rest or units >= self.split_below:
            del free[index], edges[behind + (rest >> SHIFT)]
            return code
        edges[behind] = edges[behind + (rest >> SHIFT)] = rest
        if index and free[index - 1] > rest:
            del free[index]
            insort(free, rest, 0, index)
        else:
            free[index] = rest
        return least | address

    def grow(self, units: int, room: int) -> int:
        """``take`` from new memory alone, of which there are ``room`` units (``alloc_block``); 0 where that is too
        little."""
        code = self._grow(units, room)
        return self._cut(code, units) if code else 0

    def release(self) -> None:
        """Give the wholly free segments back to the device: ``release_blocks``."""
        for code in self.whole():
            self.release_block(code)

    def whole(self) -> list[int]:
        """Codes of the wholly free segments, by size."""
        segments = self.segments
        return [code for code in self.free if segments.get(code & ADDRESS) == code >> SHIFT]

    def release_block(self, code: int) -> None:
        """Give a wholly free segment back to the device: ``release_block``."""
        self._forget(code)
        self.reserved -= self.segments.pop(code & ADDRESS)

    def release_oversize(self, units: int) -> bool:
        """Give back the smallest free block of ``max_split`` or more that serves ``units``, failing that such blocks
        from the largest on, until they come to as much; whether they did (``release_available_cached_blocks``)."""
        max_split = self.rules.max_split
        if max_split == UNBOUNDED:
            return False
        wanted, free = max(units, max_split), self.free
        index = bisect_left(free, wanted << SHIFT)
        if index < len(free):
            self.release_block(free[index])
            return True
        released = 0
        while released < wanted and free and free[-1] >> SHIFT >= max_split:
            released += free[-1] >> SHIFT
            self.release_block(free[-1])
        return released >= wanted

    @property
    def holes(self) -> dict[int, int]:
        """Where free blocks may grow without new addresses, and by how much."""
        return {}

    def layout(self) -> object:
        """Sizes of the segments in order of address, each with its free blocks."""
        starts = sorted(self.segments)
        free: dict[int, list[tuple[int, int]]] = {start: [] for start in starts}
        for code in self.free:
            start = starts[bisect_right(starts, code & ADDRESS) - 1]
            free[start].append(((code & ADDRESS) - start, code >> SHIFT))
        return tuple((self.segments[start], *sorted(free[start])) for start in starts)

    def copy(self: Pool) -> Pool:
        """An independent copy."""
        twin = type(self)(self.rules)
        twin.free = self.free.copy()
        twin.edges = self.edges.copy()
        twin.segments = self.segments.copy()
        twin.reserved = self.reserved
        twin.top = self.top
        return twin

    def _pick(self, index: int, units: int) -> int:
        """Position of the free block to use, at or after ``index``, which fits; behind all where none will do."""
        if index == len(self.free):
            return index
        held = self.free[index] >> SHIFT
        max_split = self.rules.max_split
        limit = max_split if units < max_split else units + self.rules.max_rounding
        return index if held < limit else len(self.free)

    def segment_size(self, units: int) -> int:
        """What a request for ``units`` takes of the device, if no free block will do: ``get_allocation_size``."""
        return self.rules.segment if units < OWN_SEGMENT else -(-units // SEGMENT_STEP) * SEGMENT_STEP

    def _grow(self, units: int, room: int = UNBOUNDED) -> int:
        """Code of a new segment with room for ``units``: ``alloc_block``. 0 where the device has less ``room``."""
        size = self.segment_size(units)
        if size > room:
            return 0
        gap = size + 1  # keeps blocks of different segments from being neighbours
        self.top += -gap if self.rules.falls else gap
        address = self.top - (0 if self.rules.falls else gap)
        self.segments[address] = size
        self.reserved += size
        return size << SHIFT | address

    def _cut(self, code: int, units: int) -> int:
        """The block for a request, from one that is off the books; a rest worth keeping is free again
        (``should_split``, ``alloc_found_block``)."""
        rest, address = (code >> SHIFT) - units, code & ADDRESS
        if rest < self.least_rest or units >= self.split_below:
            return code
        self._enter(rest << SHIFT | address + units)
        return units << SHIFT | address

    def _enter(self, code: int) -> None:
        """Put a free block on the books."""
        address = code & ADDRESS
        self.edges[address] = self.edges[address + (code >> SHIFT)] = code
        insort(self.free, code)

    def _forget(self, code: int) -> None:
        """Strike a free block off the books."""
        address = code & ADDRESS
        del self.free[bisect_left(self.free, code)]
        del self.edges[address], self.edges[address + (code >> SHIFT)]


class ExpandablePool(SegmentPool):
    """Blocks inside one expandable segment, mapped page by page (``expandable_segments:True``).

    Addresses below ``top`` are mapped, except for the holes that ``release`` left: ``segments`` maps
    the address of each to its size. Where ``rules.reach`` bounds a segment, the rest of it is a hole from the
    beginning, and further segments begin at ``top``.
    """

    __slots__ = ("unlimited",)

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.split_below = UNBOUNDED  # should_split disregards max_split_size here
        self.unlimited = not self.picky
        self.picky = True

    def release(self) -> None:
        """Unmap the pages that lie wholly inside free blocks: ``release_blocks``, ``unmap_block``. A segment of which
        nothing is mapped any more is given up (``release_expandable_segment``)."""
        page, reach = self.rules.segment, self.rules.reach
        unused = {address for address, size in self.segments.items() if size == reach}
        for code in self.free.copy():
            address = code & ADDRESS
            end = address + (code >> SHIFT)
            first, last = -(-address // page) * page, end // page * page
            if first < last:
                self._forget(code)
                if address < first:
                    self.give(first - address << SHIFT | address)
                if last < end:
                    self.give(end - last << SHIFT | last)
                self.segments[first] = last - first
                self.reserved -= last - first
        self._join_holes()
        given_up = [one for one, size in self.segments.items() if size == reach and one not in unused]
        for address in given_up:
            del self.segments[address]

    @property
    def holes(self) -> dict[int, int]:
        return self.segments.copy()

    def layout(self) -> object:
        """Free blocks and holes."""
        return tuple(self.free), tuple(sorted(self.segments.items()))

    def release_oversize(self, units: int) -> bool:
        """PyTorch fails an assertion here (``release_block``): its blocks are pages, which ``release`` unmaps."""
        return False

    def _pick(self, index: int, units: int) -> int:
        """The best fit, a block in front of unmapped memory counting as what it can grow to."""
        free = self.free
        if index == len(free):
            return index
        code = free[index]
        if self.segments or (code & ADDRESS) + (code >> SHIFT) == self.top:
            while index + 1 < len(free) and self._reach(free[index + 1]) < self._reach(free[index]):
                index += 1
        return index if self.unlimited else super()._pick(index, units)

    def _reach(self, code: int) -> int:
        """Size of a free block and of the unmapped memory behind it (``expandable_size``)."""
        size = code >> SHIFT
        end = (code & ADDRESS) + size
        return size + (UNBOUNDED if end == self.top else self.segments.get(end, 0))

    def _grow(self, units: int, room: int = UNBOUNDED) -> int:
        """Code of the free block that mapping more pages makes, at the lowest address with space for it.

        ``find_expandable_block``, ``try_allocate_expandable_block``, ``map_block``. Where the device has less ``room``
        than one of the holes on the way takes, 0; what was mapped before that stays free.
        """
        found = (start for start in self._starts() if self._has_room(start, units))
        start = next(found, None) if self.rules.reach else next(found)
        if start is None:
            start = self._open()
        size = 0
        before = self.reserved
        while size < units:
            more = self._swallow(start + size) or self._map(start + size, units - size, room + before - self.reserved)
            if not more:
                if size:
                    self._enter(size << SHIFT | start)
                return 0
            size += more
        size += self._swallow(start + size)
        return size << SHIFT | start

    def _open(self) -> int:
        """Address of a further segment."""
        address = self.top
        self.segments[address] = self.rules.reach
        self.top += self.rules.reach + self.rules.segment  # the gap keeps segments from being neighbours
        return address

    def _starts(self) -> Iterator[int]:
        """Where growing may begin: unmapped memory, or the free block in front of it."""
        for unmapped in (*sorted(self.segments), *(() if self.rules.reach else (self.top,))):
            before = self.edges.get(unmapped)
            yield unmapped if before is None else before & ADDRESS

    def _has_room(self, start: int, units: int) -> bool:
        """Whether ``units`` from ``start`` on hold nothing live (``has_available_address_space``)."""
        room = 0
        while room < units and start + room != self.top:
            step = self.segments.get(start + room) or self._free_at(start + room)
            if not step:
                return False
            room += step
        return True

    def _free_at(self, address: int) -> int:
        """Size of the free block that begins at ``address``; 0 where none does."""
        code = self.edges.get(address)
        return code >> SHIFT if code is not None and code & ADDRESS == address else 0

    def _swallow(self, address: int) -> int:
        """Take the free block at ``address`` off the books; its size, 0 where there is none."""
        size = self._free_at(address)
        if size:
            self._forget(size << SHIFT | address)
        return size

    def _map(self, address: int, units: int, room: int) -> int:
        """Map pages for ``units`` at ``address``, at most to the end of the hole; the size mapped, 0 where there is
        less ``room`` (``ExpandableSegment::map``)."""
        page = self.rules.segment
        size = min(-(-units // page) * page, self.segments.get(address, UNBOUNDED))
        if size > room:
            return 0
        if address == self.top:
            self.top += size
        else:
            hole = self.segments.pop(address)
            if size < hole:
                self.segments[address + size] = hole - size
        self.reserved += size
        return size

    def _join_holes(self) -> None:
        """Merge holes that touch; one that touches ``top`` lowers it."""
        holes: dict[int, int] = {}
        first = end = -1
        for address, size in sorted(self.segments.items()):
            first = first if address == end else address
            end = address + size
            holes[first] = end - first
        if holes and end == self.top:
            self.top = first
            del holes[first]
        self.segments = holes
