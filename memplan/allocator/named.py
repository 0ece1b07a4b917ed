"""A replay whose requests have names: the tensor of each, its module, phase and micro-batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from itertools import accumulate, islice, starmap
from typing import overload

from ..tape.events import Category, Drop, Event, Hold
from ..tape.program import WHOLE, Chunk, Role, What
from ..values import NamedTuple
from .caching import AllocatorSettings
from .passes import Pass, Passes
from .rank import Rank
from .replay import Run


class Tensor(NamedTuple):
    """What a tensor is called."""

    name: str
    module: str = ""
    """Empty of what no module makes: what is kept, or handed from stage to stage."""
    phase: str = ""
    """``forward``, ``backward`` or ``step``; empty of what was there before."""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Names(Sequence[Tensor]):
    """What each operation of a pass, or of its piece from ``start`` to ``end``, begins or ends."""

    def __init__(
        self, events: Sequence[tuple[str, Sequence[Hold | Drop]]], phase: str, start: int = 0, end: int | None = None
    ) -> None:
        """``events`` with the names of their modules."""
        self.events, self.phase = events, phase
        self.starts = list(accumulate((len(own) for _, own in events), initial=0))
        self.within = range(self.starts[-1])[start:end]

    def __len__(self) -> int:
        return len(self.within)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Names: ...
    def __getitem__(self, at: int | slice) -> Tensor | Names:
        if isinstance(at, slice):
            twin = copy(self)
            twin.within = self.within[at]
            return twin
        place = self.within[at]
        piece = bisect_right(self.starts, place) - 1
        module, events = self.events[piece]
        return self._name(module, events[place - self.starts[piece]])

    def __iter__(self) -> Iterator[Tensor]:
        every = ((module, event) for module, events in self.events for event in events)
        return starmap(self._name, islice(every, self.within.start, self.within.stop))

    def _name(self, module: str, event: Hold | Drop) -> Tensor:
        return Tensor(event.name, module, self.phase, event.shape, event.dtype) if isinstance(event, Hold) else ENDS


class NamingRank(Rank):
    """A rank that is told what its requests are for."""

    __slots__ = ("label", "microbatch", "names", "phase")

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(settings)
        self.label, self.phase = Tensor(""), ""
        self.microbatch: int | None = None
        """Of the events to come;"""
        self.names: Sequence[Tensor] = ()
        """and of those of a pass, one by one."""

    @property
    def steps(self) -> bool:
        """What begins or ends outside of passes belongs to an optimizer step."""
        return False

    def names_of(self, events: Pass, start: int) -> Sequence[Tensor]:
        """Of the operations of a pass, or of its part from ``start`` on."""
        count = len(events.operations)
        return self.names if len(self.names) == count else self.names[start : start + count]


class NamedRun(Run):
    """A run whose tensors have names."""

    rank: NamingRank

    def take(self, tape: Iterable[Event]) -> None:
        for event in tape:
            if isinstance(event, Hold):
                self.rank.label = Tensor(event.name, "", self.rank.phase)
            super().keep((event,))

    def keep(self, tape: Iterable[Event]) -> None:
        super().keep(self._labelled(tape))

    def _labelled(self, tape: Iterable[Event]) -> Iterator[Event]:
        """``tape``, the rank being told of each event before it."""
        rank = self.rank
        rank.phase, rank.microbatch = "step" if rank.steps else "", None
        for event in tape:
            if isinstance(event, Hold):
                rank.label = static_tensor(event, rank.phase)
            yield event

    def run(self, what: What, number: int, microbatch: int) -> None:
        rank = self.rank
        chunk, role = self.chunks[number], self.program.order.role(microbatch)
        rank.phase, rank.microbatch = phase_of(what), microbatch
        if what in WHOLE:
            start, end = chunk.next_piece(WHOLE[what], microbatch, role)
            rank.names = _names(chunk.chunk, chunk.passes, WHOLE[what], role, rank.phase, start, end)
        else:
            rank.names = _names(chunk.chunk, chunk.passes, what, role, rank.phase)
        super().run(what, number, microbatch)

    def receive(self, tensor: str, chunk: int, number: int, known: tuple[int, int, int]) -> int:
        self._between(tensor, number if number >= 0 else None)  # -1: one for all micro-batches
        return super().receive(tensor, chunk, number, known)

    def _between(self, tensor: str, microbatch: int | None) -> None:
        rank = self.rank
        rank.phase, rank.microbatch = phase_between(tensor), microbatch
        rank.label = _between_stages(tensor, rank.phase)


BACKWARD = ("backward", "reduce", "backward_piece")


def phase_of(what: What) -> str:
    return "backward" if what in BACKWARD else "forward"


def phase_between(tensor: str) -> str:
    """Of a tensor that is handed from stage to stage."""
    return "backward" if "grad" in tensor else "forward"


def static_tensor(hold: Hold, phase: str) -> Tensor:
    """What ``hold`` begins outside of passes: in the ``phase`` of a step, or before."""
    name = hold.name or Category(hold.category).key.replace("_", " ")
    return Tensor(name, "optimizer" if phase else "", phase, hold.shape, hold.dtype)


@lru_cache(maxsize=64)
def _between_stages(tensor: str, phase: str) -> Tensor:
    return Tensor(tensor, "pipeline", phase)


@lru_cache(maxsize=256)
def _names(
    chunk: Chunk, passes: Passes, what: What, role: Role, phase: str, start: int = 0, end: int | None = None
) -> Names:
    spans = chunk.unrolled or (*chunk.spans, *chunk.losses)
    modules = [name for span in spans for name in span.names]
    return Names([(modules[place], events) for place, events in passes.events(what, role)], phase, start, end)


ENDS = Tensor("")
"""An operation that ends a tensor, which has a name already."""
