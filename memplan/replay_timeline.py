"""The replay of a timeline: passes of several micro-batches in flight, on several streams.

As ``replay_streams`` does, it runs two iterations, of which the second has the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Iterable

from .allocator import AllocatorSettings
from .layers.module import GRAD_OUTPUT, INPUT, Module
from .pipeline.torch_schedules import Action
from .program import Program
from .replay import Replayed
from .replay_streams import StreamedRank, states_of
from .tape import Category, Drop, Hold, Tape
from .timeline import Part, Timeline, tapes_of

Key = tuple[int, int, int, int]
"""Part, micro-batch, place of the module (−1 for tensors that modules share), id."""


def replay_timeline(program: Program, settings: AllocatorSettings, workspaces: Iterable[Hold]) -> Replayed:
    """What ``program`` takes."""
    assert program.timeline is not None
    rank = StreamedRank(settings)
    for hold in (*states_of(program, late=False), *program.extra, *workspaces):
        rank.keep(hold)
    run = _Run(rank, program.timeline)
    run.iteration(first=True)
    first_iteration = rank.allocator.reserved
    for hold in states_of(program, late=True):
        rank.keep(hold)
    rank.step(program.step)
    run.end_gradients()
    rank.peak = 0
    run.iteration(first=False)
    rank.step(program.step)
    run.end_gradients()
    return rank.replayed(first_iteration)


class _Run:
    """A rank's iterations."""

    def __init__(self, rank: StreamedRank, timeline: Timeline) -> None:
        self.rank = rank
        self.timeline = timeline
        self.rows = [_Row(part) for part in timeline.parts]
        self.live: dict[Key, Hold] = {}

    def iteration(self, *, first: bool) -> None:
        """An iteration begins by ending what the one before has left."""
        for action in self.timeline.shortened[self.timeline.kept if first else 0 :]:
            self._do(action)

    def end_gradients(self) -> None:
        left = [key for key, hold in self.live.items() if hold.category is Category.GRADIENTS]
        assert len(self.live) - len(left) == self.timeline.kept, "something outlives an iteration"
        for key in left:
            self._drop(key)

    def _do(self, action: Action) -> None:
        what, chunk, microbatch, tensor = action
        row, first = self.rows[chunk], microbatch == 0
        if tensor is not None:
            lasting = row.part.lasting(tensor, first)
            assert lasting is not None
            key = (chunk, microbatch, lasting.place, lasting.hold.tensor)
            if what == "begin":
                self._hold(key, lasting.hold)
            else:
                self._drop(key)
            return
        if what == "merge":
            assert self.timeline.merged is not None
            key = (chunk, microbatch, -1, self.timeline.merged.tensor)
            self._hold(key, self.timeline.merged)
            self._drop(key)
            return
        places = range(len(row.modules))
        if what in ("forward", "loss"):
            model = len(row.part.spans)
            for place in places[:model] if what == "forward" else places[model:]:
                self._run(tapes_of(row.modules[place], first).forward, chunk, microbatch, place)
        elif what == "backward":
            for place in reversed(places):
                self._run(tapes_of(row.modules[place], first).backward, chunk, microbatch, place)
        else:
            for segment in row.part.segments.get(what, ()):
                self._run(segment.events, chunk, 0, segment.place)

    def _run(self, tape: Tape, chunk: int, microbatch: int, place: int) -> None:
        row = self.rows[chunk]
        for event in tape:
            if isinstance(event, Hold):
                self._hold(self._key(chunk, microbatch, place, event.tensor), event)
            elif isinstance(event, Drop):
                at, id = row.maker(place, event.tensor, microbatch == 0)
                self._drop(self._key(chunk, microbatch, at, id))

    @staticmethod
    def _key(chunk: int, microbatch: int, place: int, id: int) -> Key:
        return (chunk, microbatch, place if id > 0 else -1, id)

    def _hold(self, key: Key, hold: Hold) -> None:
        self.rank.hold(key, hold)
        self.live[key] = hold

    def _drop(self, key: Key) -> None:
        """What a later micro-batch ends without having begun it is the first one's."""
        if key not in self.live:
            key = (key[0], 0, *key[2:])
        del self.live[key]
        self.rank.drop(key)


class _Row:
    """The modules of a part, and who makes what they are given."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.modules: list[Module] = [module for module, _ in part.modules]

    def maker(self, place: int, id: int, first: bool) -> tuple[int, int]:
        """The place of the module that made a tensor, and its id there."""
        if id == INPUT:
            return self.part.handed(place - 1, first, backward=False)
        if id == GRAD_OUTPUT:
            return self.part.handed(place + 1, first, backward=True)
        return place, id
