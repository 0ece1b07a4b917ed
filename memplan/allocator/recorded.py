"""A program's replay, written down: every request with what it is for, where its block lies, and when it ends.

``replay`` runs passes in stretches and knows only what they come to; here each request is served by itself, and whoever
records is told. The blocks are the same, since the same pools serve the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..tape.events import Hold
from ..tape.program import Program
from .blocks import ADDRESS, LARGEST_SMALL, SHIFT, UNIT_BITS, SegmentPool
from .caching import AllocatorSettings
from .construction import workspaces_of
from .named import NamedRun, NamingRank, Tensor
from .passes import Pass
from .rank import NO_BLOCK, Rank

POOL_BITS = 47
"""Bytes of addresses of one pool: each has its own numbering."""


class Request(NamedTuple):
    """A tensor that begins. Sizes in bytes."""

    tensor: Tensor
    category: int
    microbatch: int | None
    iteration: int
    """Counted from 1; 0 before the first one."""
    size: int
    """As the tape has it: rounded to 512."""
    address: int
    block: int
    """What the allocator hands out for it."""
    tried: int
    """The segment that it would ask the device for if no free block served: what PyTorch's message names."""
    allocated: int
    """Of the process, before it."""
    stream: int


class Witness(Protocol):
    """Who is told."""

    def begins(self, request: Request) -> None:
        """A tensor has its block."""

    def ends(self, address: int, size: int, stream: int) -> None:
        """The tensor at ``address`` is given back."""

    def reserves(self, address: int, size: int, stream: int) -> None:
        """The allocator takes a segment, or pages of an expandable one."""


class _RecordingRank(NamingRank):
    """A rank that tells each of its requests."""

    __slots__ = ("bases", "iteration", "stepping", "witness")

    def __init__(self, settings: AllocatorSettings, witness: Witness) -> None:
        super().__init__(settings)
        self.witness = witness
        self.iteration = 0
        self.stepping = False
        self.bases: dict[tuple[int, bool], int] = {}
        """Of each pool, by its stream and whether it is of small blocks."""

    @property
    def steps(self) -> bool:
        return self.stepping

    def hold(self, size: int, category: int, stream: int = 0) -> int:
        self.by[category] += size
        return self._begin(self.label, size, self.settings.units(size), category, stream)

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        super().drop(block, size, category, stream)
        if block != NO_BLOCK:
            self.witness.ends(self._address(block, stream), size, stream)

    def run(self, events: Pass, frame: list[int], start: int = 0) -> None:
        names = self.names_of(events, start)
        for (slot, units, size, category, stream), name in zip(events.operations, names, strict=True):
            if units > 0:
                self.by[category] += size
                frame[slot] = self._begin(name, size, units, category, stream)
            else:
                self.drop(frame[slot], size, category, stream)

    def _begin(self, name: Tensor, size: int, units: int, category: int, stream: int) -> int:
        if not units:
            return NO_BLOCK
        pool = self.pool(stream, small=units <= LARGEST_SMALL)
        before, reserved, top = self.allocated << UNIT_BITS, pool.reserved, pool.top
        block = self.take(pool, units)
        if pool.reserved > reserved:
            start = self._address(top if pool.top > top else block & ADDRESS, stream, pool)
            self.witness.reserves(start, pool.reserved - reserved << UNIT_BITS, stream)
        self.allocated += block >> SHIFT
        tried = pool.segment_size(units) << UNIT_BITS
        at, length = self._address(block, stream, pool), block >> SHIFT << UNIT_BITS
        self.witness.begins(
            Request(name, category, self.microbatch, self.iteration, size, at, length, tried, before, stream)
        )
        return block

    def _address(self, code: int, stream: int, pool: SegmentPool | None = None) -> int:
        small = (code >> SHIFT) <= LARGEST_SMALL if pool is None else pool is self.small.get(stream)
        base = self.bases.setdefault((stream, small), 1 + len(self.bases))
        return (base << POOL_BITS) + ((code & ADDRESS) << UNIT_BITS)


class _RecordingRun(NamedRun):
    """A run whose requests a witness is told of."""

    rank: _RecordingRank
    named = True

    def iteration(self) -> None:
        self.rank.iteration += 1
        self.rank.stepping = False
        self.begin()
        self.iterate(list(self.program.order.shortened))
        self.rank.stepping = True


def record(program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold], witness: Witness) -> Rank:
    """Tells ``witness`` of ``program``'s construction, of its first iteration with the first step, and of the one after
    it where that differs; as ``replay`` runs them, on a device without end. The rank as it is then."""
    rank = _RecordingRank(settings, witness)
    run = _RecordingRun(program, rank, workspaces_of(program, workspaces))
    run.iteration()
    if run.second_differs:
        run.first_step()
        run.iteration()
    run.step()
    return rank
