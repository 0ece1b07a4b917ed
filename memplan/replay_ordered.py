"""The replay of a program whose schedule runs several chunks: Megatron-Core's.

The schedule's events are run one by one: a pass is the tapes of its chunk's modules, an exchange holds or
drops one hidden state. A long steady phase runs as many micro-batches as it takes to repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .allocator import AllocatorSettings
from .passes import Operation, Pass, Passes, passes
from .pipeline.megatron_fold import CATEGORIES
from .pipeline.megatron_schedule import Call, Change, Kind, Schedule, trace
from .program import Order, Program
from .replay import Rank, Replayed, replayed
from .tape import Drop, Hold, Tape


def replay_ordered(programs: Sequence[Program], settings: AllocatorSettings) -> tuple[Replayed, ...]:
    """One result per program."""
    return tuple(_Run(program, settings).result() for program in programs)


class _Run:
    """One rank through construction, a first iteration, the step that makes states, and a steady iteration."""

    def __init__(self, program: Program, settings: AllocatorSettings) -> None:
        assert program.order is not None
        assert program.kept is not None
        self.order: Order = program.order
        self.kept = program.kept
        self.rank = Rank(settings)
        self.static: dict[int, int] = {}
        """Blocks of static tensors, by the ids of their tapes."""
        self.exchanged: dict[tuple[Kind, int], int] = {}
        """Blocks of the tensors between stages that are alive, by kind and number."""
        whole, short = self.order.schedule, _shortened(self.order.schedule)
        self.events = trace(short)
        self.reports = whole.microbatches - short.microbatches if whole.last else 0
        """Reports of the micro-batches that are left out, all of which a late one finds there."""
        self.chunks = [_Chunk(passes(chunk.spans, settings)) for chunk in self.order.chunks]
        self.kinds = {kind: (self.order.sizes.of(kind), category) for kind, category in CATEGORIES.items()}
        """Bytes and category of the tensors between stages."""

    def result(self) -> Replayed:
        rank, kept = self.rank, self.kept
        self._static(kept.construction)
        self._static(kept.workspaces)
        self._iteration()
        first = rank.reserved
        self._static(kept.states)
        self._step()
        for hold in kept.carried:
            if isinstance(hold, Hold):
                self._static((Drop(hold.tensor, hold.bytes, hold.category),))
        rank.peak = 0
        self._iteration()
        self._step()
        return replayed(rank, first)

    def _step(self) -> None:
        """The optimizer's step; then the reports of the iteration's losses end."""
        self._static(self.kept.step)
        for kind, number in list(self.exchanged):
            if kind == "report":
                self.rank.drop(self.exchanged.pop((kind, number)), *self.kinds[kind])

    def _static(self, tape: Tape) -> None:
        for event in tape:
            if isinstance(event, Hold):
                self.static[event.tensor] = self.rank.hold(event.bytes, event.category)
            elif isinstance(event, Drop):
                self.rank.drop(self.static.pop(event.tensor), event.bytes, event.category)

    # -- an iteration -------------------------------------------------------------------------------

    def _iteration(self) -> None:
        before = self.exchanged
        numbered = sorted(before)
        self.exchanged = {}
        for kind in _LEFT:  # a trace counts what the iteration before left from 0
            left = [before[name] for name in numbered if name[0] == kind]
            self.exchanged |= {(kind, number): block for number, block in enumerate(left)}
        for number in range(self.reports):
            self.exchanged["report", -1 - number] = self.rank.hold(*self.kinds["report"])
        self._run()
        self._end()

    def _run(self) -> None:
        rank, kinds, chunks, exchanged = self.rank, self.kinds, self.chunks, self.exchanged
        handed = 0
        for event in self.events:
            if isinstance(event, Change):
                sign, kind, number = event
                if sign < 0:
                    if (kind, number) in exchanged:  # nothing is left from an iteration before the first
                        rank.drop(exchanged.pop((kind, number)), *kinds[kind])
                elif kind in ("output", "input_grad"):  # made by the pass before
                    exchanged[kind, number] = handed
                else:
                    exchanged[kind, number] = rank.hold(*kinds[kind])
            elif isinstance(event, Call):
                handed = chunks[event.chunk].run(rank, event)

    def _end(self) -> None:
        """Keeps each receiving chunk's last input and its gradient, and the reports."""
        plan = self.order.schedule
        receiving = sum(map(plan.receives, range(plan.chunks)))
        kept = {name for name in self.exchanged if name[0] == "report"}
        for kind in _LEFT:
            alive = sorted(name for name in self.exchanged if name[0] == kind)
            kept.update(alive[-receiving:] if receiving else ())
        for name in self.exchanged.keys() - kept:
            self.rank.drop(self.exchanged.pop(name), *self.kinds[name[0]])
        for chunk in self.chunks:
            chunk.end(self.rank)


_LEFT: tuple[Kind, ...] = ("input", "input_grad")
"""What outlives an iteration, besides reports."""


class _Chunk:
    """The passes of a chunk of layers, and its micro-batches in flight."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.frames: dict[int, list[int]] = {}
        handed = {passes.forward.handed, passes.steady.handed}
        self.left = [operation for operation in passes.steady.left if operation.slot not in handed]
        self.rest: list[tuple[int, Operation]] = []
        """Blocks that micro-batches have left until the iteration ends."""

    def run(self, rank: Rank, call: Call) -> int:
        """A pass; the block that it hands on."""
        if call.what == "F":
            events: Pass = self.passes.forward
            frame = self.frames[call.microbatch] = [0] * self.passes.slots
        else:
            events = self.passes.steady
            frame = self.frames.pop(call.microbatch)
        rank.run(events, frame)
        if self.left and call.what == "B":
            self.rest += [(frame[operation.slot], operation) for operation in self.left]
        return frame[events.handed]

    def end(self, rank: Rank) -> None:
        for block, operation in self.rest:
            rank.drop(block, operation.bytes, operation.category)
        self.rest.clear()


def _shortened(plan: Schedule) -> Schedule:
    """The schedule with no more micro-batches than its warm-up takes and two periods of the steady phase."""
    period = 1 if plan.chunks == 1 else plan.group
    enough = (-(-plan.warmup // (period * plan.chunks)) + 2) * period + plan.microbatches % period
    return plan if plan.microbatches <= enough else replace(plan, microbatches=enough)
