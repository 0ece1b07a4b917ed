"""The replay of a program whose schedule runs several chunks: Megatron-Core's.

The schedule's events are run one by one: a pass is the tapes of its chunk's modules, an exchange holds or
drops one hidden state. A long steady phase runs as many micro-batches as it takes to repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .allocator import AllocatorSettings
from .layers.module import SHARED
from .pipeline.megatron_fold import CATEGORIES
from .pipeline.megatron_schedule import Call, Change, Schedule, trace
from .program import Order, Program
from .replay import MICROBATCH, MODULE, Rank, Replayed, instances
from .tape import Category, Drop, Hold, Tape

_EXCHANGED = 1 << 60
"""Keys of exchanged tensors begin here."""


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
        self.keys: dict[int, int] = {}
        """Of static tensors, by the ids of their tapes."""
        self.exchanged: dict[tuple[str, int], int] = {}
        """Keys of the tensors between stages that are alive, by kind and number."""
        whole, short = self.order.schedule, _shortened(self.order.schedule)
        self.events = trace(short)
        self.reports = whole.microbatches - short.microbatches if whole.last else 0
        """Reports of the micro-batches that are left out, all of which a late one finds there."""

    def result(self) -> Replayed:
        rank, kept = self.rank, self.kept
        self._static(kept.construction)
        self._static(kept.workspaces)
        self._iteration()
        first = rank.allocator.peak_reserved
        self._static(kept.states)
        self._step()
        for hold in kept.carried:
            if isinstance(hold, Hold):
                self._static((Drop(hold.tensor, hold.bytes, hold.category),))
        rank.peak = 0
        self._iteration()
        self._step()
        breakdown = rank.peak_by[:]
        breakdown[Category.BLOCK_ROUNDING] = rank.peak - sum(breakdown)
        return Replayed(rank.peak, rank.allocator.peak_reserved, tuple(breakdown), rank.allocated, first)

    def _step(self) -> None:
        """The optimizer's step; then the reports of the iteration's losses end."""
        self._static(self.kept.step)
        for _, number in [name for name in self.exchanged if name[0] == "report"]:
            self._change(Change(-1, "report", number))

    def _static(self, tape: Tape) -> None:
        for event in tape:
            if isinstance(event, Hold):
                self.keys[event.tensor] = self.rank.keep(event.bytes, event.category)
            elif isinstance(event, Drop):
                self.rank.drop(self.keys.pop(event.tensor), event.bytes, event.category)

    # -- an iteration -------------------------------------------------------------------------------

    def _iteration(self) -> None:
        before = dict(self.exchanged)
        self.exchanged.clear()
        numbered = sorted(before)
        fresh: dict[tuple[str, int], int] = {}
        for kind in ("input", "input_grad"):  # a trace counts what the iteration before left from 0
            left = [before[key] for key in numbered if key[0] == kind]
            fresh |= {(kind, number): key for number, key in enumerate(left)}
        self.exchanged = fresh
        for number in range(self.reports):
            self._change(Change(1, "report", -1 - number))
        for event in self.events:
            if isinstance(event, Call):
                self._call(event)
            elif isinstance(event, Change):
                self._change(event)
        self._end()

    def _call(self, call: Call) -> None:
        order, rank = self.order, self.rank
        spans = order.chunks[call.chunk].spans
        microbatch = call.microbatch * len(order.chunks) + call.chunk
        made = instances(spans, microbatch, False)
        if call.what == "F":
            for base, tapes, input, _ in made:
                rank.run(tapes.forward, base, microbatch, input, 0)
                if tapes.output > 0:
                    self.last = base + tapes.output
            return
        gradient = 0
        for base, tapes, input, _ in reversed(made):
            rank.run(tapes.backward, base, microbatch, input, gradient)
            if tapes.grad_input > 0:
                gradient = base + tapes.grad_input
            elif tapes.grad_input <= SHARED:
                gradient = microbatch * MICROBATCH + MODULE // 2 - tapes.grad_input
        self.last = gradient

    def _change(self, change: Change) -> None:
        rank, name = self.rank, (change.kind, change.number)
        if change.sign < 0:
            key = self.exchanged.pop(name, None)
            if key is not None:
                rank.drop(key, *rank.live.pop(key))
            return
        if change.kind in ("output", "input_grad"):  # made by the pass before
            self.exchanged[name] = self.last
            return
        category = CATEGORIES[change.kind]
        key = _EXCHANGED + rank.next_static
        rank.next_static -= 1
        size = self.order.size(change.kind)
        rank.hold(key, size, category)
        rank.live[key] = (size, category)
        self.exchanged[name] = key

    def _end(self) -> None:
        """Keeps each receiving chunk's last input and its gradient, and the reports."""
        rank, order = self.rank, self.order
        receiving = sum(map(order.schedule.receives, range(order.schedule.chunks)))
        kept = {name: key for name, key in self.exchanged.items() if name[0] == "report"}
        for kind in ("input", "input_grad"):
            alive = sorted(name for name in self.exchanged if name[0] == kind)
            kept |= {name: self.exchanged[name] for name in alive[-receiving:] if receiving}
        for key in [key for key in rank.live if key not in set(kept.values())]:
            rank.drop(key, *rank.live.pop(key))
        self.exchanged = kept


def _shortened(plan: Schedule) -> Schedule:
    """The schedule with no more micro-batches than its warm-up takes and two periods of the steady phase."""
    period = 1 if plan.chunks == 1 else plan.group
    enough = (-(-plan.warmup // (period * plan.chunks)) + 2) * period + plan.microbatches % period
    return plan if plan.microbatches <= enough else replace(plan, microbatches=enough)
