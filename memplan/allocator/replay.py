"""A program's events, unrolled and replayed through PyTorch's caching allocator.

The fold knows what is requested; the allocator decides what that costs in blocks (*allocated*) and
segments (*reserved*). Both depend on the order of events, so here they are run one by one: building
the optimizer, micro-batches as the schedule orders them, the step; where states appear in the first step, a second
iteration. What repeats is run as often as the schedule's ``shortened`` has it.

Stages with equal modules differ in how many forward passes they run before the first backward, and
what they do until then are prefixes of one another: that is run once, and every stage branches off a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cache, cached_property, partial
from itertools import pairwise, takewhile
from operator import itemgetter

from ..tape.events import END_OF_GRADIENT, Bytes, Category, Drop, Event, Hold, rounded
from ..tape.program import SLOT, WHOLE, Action, Chunk, Exchanged, Order, Program, Role, What, Whole, drop_all
from ..values import dataclass
from .blocks import LARGEST_SMALL, SMALL_SEGMENT, UNIT_BITS
from .caching import AllocatorSettings
from .construction import construction, dropped, states, workspaces_of
from .operations import Operation
from .passes import Pass, Passes, passes, pieces
from .rank import NO_BLOCK, UNSEEN, Rank

TIMED = -1 << 30
"""Id of what is held while a kernel is timed, which no tape gives to anything."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one rank's steady iteration took, in bytes."""

    allocated: int
    reserved: int
    breakdown: Bytes
    """Live at the peak of ``allocated``, by category, summing to it."""
    static: int
    """Allocated between iterations."""
    first_iteration: int
    """Reserved at the end of the first iteration's micro-batches, before any optimizer step was applied."""


Key = tuple[str, int, int]
"""Name, chunk, and number or micro-batch of a tensor between passes."""

Block = tuple[int, int, int, int]
"""A tensor's block, bytes, category and stream: what ``Rank.drop`` takes."""


Amid = tuple[int, Callable[[], None]]
"""Behind how many operations of a pass what else is done."""


class _Chunk:
    """A chunk's micro-batches in flight, whose blocks lie in frames."""

    def __init__(self, chunk: Chunk, settings: AllocatorSettings, exchanged: Exchanged) -> None:
        self.chunk = chunk
        self.passes: Passes = passes(chunk, settings)
        self.exchanged = exchanged
        self.frames: dict[int, list[int]] = {}
        self.base: list[int] = []
        """Of tensors that later micro-batches end: the first micro-batch's, and gradients wherever they are."""
        self.left: list[tuple[list[int], Operation]] = []
        """What micro-batches leave until all have ended, with the frames of its blocks."""
        self.gradients: dict[int, Operation] = {}
        """What they leave until the step, by slot in ``base``, in the order of the parameters."""
        self.under_way: dict[tuple[Whole, int], tuple[list[int], int]] = {}
        """Frames of passes of which pieces are left to run, and the place of the next one."""
        self.slots: deque[int] = deque()
        """Blocks of tensors that a later micro-batch displaces."""
        self._left: dict[Pass, tuple[list[Operation], list[Operation]]] = {}

    def copy(self) -> _Chunk:
        twin = copy(self)
        frames = {id(frame): frame[:] for frame in (self.base, *self.frames.values(), *(one for one, _ in self.left))}
        twin.base, twin.frames = frames[id(self.base)], {at: frames[id(one)] for at, one in self.frames.items()}
        twin.left = [(frames[id(frame)], operation) for frame, operation in self.left]
        twin.gradients, twin.slots = self.gradients.copy(), self.slots.copy()
        return twin

    def begin(self) -> None:
        """An iteration begins."""
        self.base = [NO_BLOCK] * self.passes.slots

    def run(
        self, rank: Rank, what: What, microbatch: int, role: Role, amid: Sequence[Amid] = ()
    ) -> tuple[Pass, list[int]]:
        """A pass, its next piece, or what hooks do besides, which is the first micro-batch's. Of ``amid``, what is
        behind none of the pass's operations comes before it, and before a piece all."""
        whole = WHOLE.get(what)
        for at, take in amid:
            if whole or not at:
                take()
        if whole:
            return self._run_piece(rank, whole, microbatch, role)
        events = self.passes.of(what, role)
        frame = self._opened(what, microbatch, events)
        within = sorted([one for one in amid if one[0]], key=itemgetter(0)) if amid else ()
        if within:
            first, *others = pieces(events, tuple(at for at, _ in within))
            rank.run(first, frame)
            for (at, take), piece in zip(within, others, strict=True):
                take()
                rank.run(piece, frame, at)
        else:
            rank.run(events, frame)
        self._closed(what, events, frame)
        return events, frame

    def _run_piece(self, rank: Rank, whole: Whole, microbatch: int, role: Role) -> tuple[Pass, list[int]]:
        events, pieces = self.passes.of(whole, role), self.passes.pieces(whole, role)
        known = self.under_way.pop((whole, microbatch)) if (whole, microbatch) in self.under_way else None
        frame, at = known or (self._opened(whole, microbatch, events), 0)
        rank.run(pieces[at][1], frame)
        if at + 1 < len(pieces):
            self.under_way[whole, microbatch] = frame, at + 1
        else:
            self._closed(whole, events, frame)
        return events, frame

    def next_piece(self, whole: Whole, microbatch: int, role: Role) -> tuple[int, int]:
        """The places of the first and the last operation, the latter excluded, of the piece that runs next."""
        _, at = self.under_way.get((whole, microbatch), (None, 0))
        start, piece = self.passes.pieces(whole, role)[at]
        return start, start + len(piece.operations)

    def _opened(self, what: What, microbatch: int, events: Pass) -> list[int]:
        passes, base = self.passes, self.base
        if what == "forward":
            frame = self.frames[microbatch] = [NO_BLOCK] * passes.slots if microbatch else base
            if passes.stale:
                for slot in passes.stale.values():
                    frame[slot] = self.slots.popleft()
        elif what == "backward":
            frame = self.frames.pop(microbatch)
        else:
            frame = self.frames[microbatch] if what == "loss" else base
        for slot in events.inherited:
            base[slot], frame[slot] = NO_BLOCK, base[slot]
            self.gradients.pop(slot, None)
        return frame

    def _closed(self, what: What, events: Pass, frame: list[int]) -> None:
        passes, base = self.passes, self.base
        if frame is base:
            for slot in events.spent:
                base[slot] = NO_BLOCK
        elif self.displaced and what != "forward":
            self._hand_on(events, frame)
        if what == "forward":
            if passes.staying:
                self.slots.extend([frame[slot] for slot in passes.staying])
        elif what != "loss" and events.left:
            gradients, others = self._left.get(events) or self._told_apart(what, events)
            for operation in gradients:
                self.gradients[operation.slot] = operation
                base[operation.slot] = frame[operation.slot]
            self.left += [(frame, operation) for operation in others]

    def _hand_on(self, events: Pass, frame: list[int]) -> None:
        """Blocks of ``displaced`` tensors go to where the next micro-batch looks for them."""
        for operation in events.left:
            slot = operation.slot
            if slot in self.displaced and frame[slot] != NO_BLOCK:
                self.base[slot], frame[slot] = frame[slot], NO_BLOCK

    @cached_property
    def displaced(self) -> frozenset[int]:
        """Slots of tensors of hooks, gradients apart, that each micro-batch leaves for the next one to end, as the
        input of a reduction that is still under way."""
        if not self.passes.hooks:
            return frozenset()
        whats: tuple[What, ...] = ("forward", "loss", "backward")
        ended = {slot for what in whats for slot in self.passes.of(what, "steady").inherited}
        left = [self.passes.of("backward", role).left for role in ("first", "steady")]
        return frozenset(
            one.slot for own in left for one in own if one.slot in ended and one.category is not Category.GRADIENTS
        )

    def _told_apart(self, what: What, events: Pass) -> tuple[list[Operation], list[Operation]]:
        """What a pass leaves: gradients, and what ends when all micro-batches have."""
        gradients = [one for one in events.left if one.category is Category.GRADIENTS]
        others = [one for one in events.left if one.category is not Category.GRADIENTS and one.slot not in self.apart]
        self._left[events] = found = gradients, others if what == "backward" else []
        return found

    @cached_property
    def apart(self) -> frozenset[int]:
        """Slots of what passes leave to others, or to the schedule."""
        slots = [*self.passes.staying, *(made.slot for own in self.made.values() for _, made in own)]
        roles: tuple[Role, ...] = ("steady", "first") if self.chunk.first_differs else ("steady",)
        for role in roles if self.exchanged.numbered else ():
            slots += [self.passes.of(what, role).handed for what in ("forward", "backward")]
        return frozenset(slots)

    @cached_property
    def made(self) -> dict[tuple[What, Role], list[tuple[str, Operation]]]:
        """What passes make for the schedule to end."""
        found: dict[tuple[What, Role], list[tuple[str, Operation]]] = {}
        roles: tuple[Role, ...] = ("first", "steady")
        for what, tensors in self.exchanged.passes.items():
            for role in roles:
                lasting = [(tensor, self.chunk.lasting(tensor, role == "first")) for tensor in tensors]
                own = found[what, role] = []
                for tensor, one in lasting:
                    if one is not None:
                        own.append((tensor, self.passes.operation(one.place, one.hold)))
        return found

    def end(self, rank: Rank) -> None:
        """Drops what the micro-batches in flight still hold, but for what stays in slots."""
        for frame in self.frames.values():
            left = self.passes.of("forward", "steady").left
            self.left += [(frame, one) for one in left if one.slot not in self.apart]
        self.frames.clear()
        for frame, operation in self.left:
            if frame[operation.slot] != NO_BLOCK:  # another micro-batch may have ended it
                rank.drop(frame[operation.slot], operation.bytes, operation.category, operation.stream)
        self.left.clear()

    def end_gradient(self, rank: Rank, size: int) -> bool:
        """Drops the first gradient of ``size`` bytes; whether there was one."""
        for slot, operation in self.gradients.items():
            if operation.bytes == size:
                rank.drop(self.base[slot], operation.bytes, operation.category, operation.stream)
                del self.gradients[slot]
                return True
        return False

    def end_gradients(self, rank: Rank, keep: int = 0) -> None:
        """Drops gradients, but for those of the first parameters up to ``keep`` bytes (a share of the first rank)."""
        for slot, operation in list(self.gradients.items()):
            if keep > 0:
                keep -= operation.bytes
            else:
                rank.drop(self.base[slot], operation.bytes, operation.category, operation.stream)
                del self.gradients[slot]


class Run:
    """One ``rank`` through construction, micro-batches and steps."""

    named = False
    """States are called after their parameters."""

    def __init__(self, program: Program, rank: Rank, workspaces: Sequence[Hold]) -> None:
        self.rank = rank
        self.program = program
        self.exchanged = program.order.exchanged
        self.chunks = [_Chunk(chunk, rank.settings, self.exchanged) for chunk in program.order.chunks]
        self.static: dict[int, tuple[int, int]] = {}
        """Blocks of static tensors and their streams, by the ids of their tapes."""
        self.pool = 0
        """The stream of static tensors that begin now."""
        self.stepped = False
        """A step has been applied."""
        self.between: dict[Key, Block] = {}
        """Tensors between passes."""
        self.begun: dict[tuple[int, str], tuple[int, int, int]] = {}
        """Bytes, category and stream of tensors between passes that have begun so far, by chunk and name."""
        self.full: dict[tuple[str, int], int] = {}
        """Segments that are full of equal tensors between passes, by name and chunk;"""
        self.taken: dict[tuple[str, int], int] = {}
        """and those that were so in an earlier iteration."""
        self.handed = NO_BLOCK
        """Block of what the last pass hands on,"""
        self.stream = 0
        """and its stream."""
        of_threads = {"forward": tuple(workspaces[:1]), "backward": tuple(workspaces[1:])}
        self.untaken = {thread: holds for thread, holds in of_threads.items() if holds}
        """Workspaces that the threads of the two directions take with their first products of matrices."""
        self.tuned = set[str]()
        """Kernels whose variants have been timed."""
        if self.second_differs:
            rank.peak = UNSEEN
        self.keep(self.construct())

    def construct(self) -> Iterable[Event]:
        return construction(self.program, named=self.named)

    def copy(self, program: Program) -> Run:
        twin = copy(self)
        twin.program, twin.rank = program, self.rank.copy()
        twin.chunks = [chunk.copy() for chunk in self.chunks]
        twin.static, twin.between, twin.untaken = self.static.copy(), self.between.copy(), self.untaken.copy()
        twin.full, twin.taken, twin.begun = self.full.copy(), self.taken.copy(), self.begun.copy()
        twin.tuned = self.tuned.copy()
        return twin

    def keep(self, tape: Iterable[Event]) -> None:
        """Static tensors begin and end; those called ``SLOT`` lie in slots."""
        rank, static = self.rank, self.static
        for event in tape:
            if isinstance(event, Hold):
                tensor, size, category, name, _, _, stream = event
                stream = stream or self.pool
                block = rank.hold(size, category, stream)
                static[tensor] = block, stream
                if name == SLOT:
                    self.chunks[0].slots.append(block)
            elif isinstance(event, Drop):
                tensor, size, category = event
                if tensor == END_OF_GRADIENT:
                    self.end_gradient(size)
                else:
                    block, stream = static.pop(tensor)
                    rank.drop(block, size, category, stream)

    def end_gradient(self, size: int) -> None:
        """The first gradient of ``size`` bytes ends."""
        next(chunk for chunk in self.chunks if chunk.end_gradient(self.rank, size))

    def result(self, actions: Sequence[Action], done: int) -> Replayed:
        """``actions`` of an iteration; so many of the first one's have been ``done``."""
        rank = self.rank
        self.iterate(actions[done:])
        first_iteration = rank.most_reserved
        if self.second_differs:
            self.first_step()
            rank.peak = 0
            self.begin()
            self.iterate(actions)
        self.step()
        static, peak = rank.allocated << UNIT_BITS, rank.peak << UNIT_BITS
        aside = self.program.set_aside
        return Replayed(peak, rank.most_reserved + aside, rank.breakdown(), static, first_iteration + aside)

    @property
    def second_differs(self) -> bool:
        """The first step leaves more behind than was there before, so that the iterations after it need more."""
        return self.program.kept is not None or self.program.late_states

    def first_step(self) -> None:
        """The step with which optimizer states appear."""
        self.step(states(self.program, named=self.named))
        self.end_carried()

    def end_carried(self) -> None:
        """What a step leaves until the next iteration begins, ends."""
        self.keep(() if self.program.kept is None else dropped(self.program.kept.carried))

    def begin(self) -> None:
        """An iteration begins. What the one before has left of some tensors is counted from 0."""
        for chunk in self.chunks:
            chunk.begin()
        for tensor in self.exchanged.renumbered:
            left = sorted(key for key in self.between if key[0] == tensor)
            blocks = [(chunk, self.between.pop((tensor, chunk, number))) for _, chunk, number in left]
            self.between |= {(tensor, chunk, number): block for number, (chunk, block) in enumerate(blocks)}

    def iterate(self, actions: Iterable[Action]) -> None:
        self.do(actions)
        for chunk in self.chunks:
            chunk.end(self.rank)

    def do(self, actions: Iterable[Action]) -> None:
        """The passes of ``actions``, and the tensors that begin and end between them."""
        between, rank, numbered = self.between, self.rank, self.exchanged.numbered
        for what, chunk, number, tensor in actions:
            if tensor is None:
                self.run(what, chunk, number)
            elif what == "end":
                found = between.pop((tensor, chunk, number), None)
                if found is not None:  # nothing is left from an iteration before the first
                    block, size, category, stream = found
                    rank.drop(block, size, category, stream)
            elif what in ("begin_all", "end_all"):
                (self.begin_all if what == "begin_all" else self.end_all)(chunk, tensor, number)
            else:
                size, category, stream = known = self.begun.get((chunk, tensor)) or self._known(chunk, tensor)
                if tensor in numbered:
                    block, stream = self.handed, self.stream
                else:
                    block = self.receive(tensor, chunk, number, known)
                if what == "begin":
                    between[tensor, chunk, number] = block, size, category, stream
                else:  # outputs are merged, and the result is dropped
                    rank.drop(block, size, category, stream)

    def receive(self, tensor: str, chunk: int, number: int, known: tuple[int, int, int]) -> int:
        """The block of a tensor between passes that begins by itself."""
        size, category, stream = known
        return self.rank.hold(size, category, stream)

    def begin_all(self, chunk: int, tensor: str, count: int) -> None:
        """``count`` equal tensors. Once they have filled what small blocks are free, so many fill a segment each: those
        segments are only counted."""
        size, _, stream = known = self.begun.get((chunk, tensor)) or self._known(chunk, tensor)
        units, segments = self.rank.settings.units(size), 0
        if 0 < units <= LARGEST_SMALL and SMALL_SEGMENT % units == 0 and not stream:
            each = SMALL_SEGMENT // units
            segments = self.taken.setdefault((tensor, chunk), max(0, (count - self.rank.room(units)) // each - 1))
            count -= segments * each
            self.full[tensor, chunk] = segments
        for number in range(count):
            self.between[tensor, chunk, -1 - number] = self.receive(tensor, chunk, -1 - number, known), *known
        if segments:
            self.fill(tensor, segments, known)

    def fill(self, tensor: str, segments: int, known: tuple[int, int, int]) -> None:
        """So many segments become full of equal tensors."""
        self.rank.fill(segments, *known[:2])

    def end_all(self, chunk: int, tensor: str, count: int) -> None:
        """What ``begin_all`` began; nothing is left from an iteration before the first."""
        known = self.begun.get((chunk, tensor))
        segments = self.full.pop((tensor, chunk), 0)
        if known is None:
            return
        if segments:
            count -= segments * (SMALL_SEGMENT // self.rank.settings.units(known[0]))
            self.rank.fill(-segments, known[0], known[1])
        for number in range(count):
            found = self.between.pop((tensor, chunk, -1 - number), None)
            if found is not None:
                self.rank.drop(*found)

    def _known(self, chunk: int, tensor: str) -> tuple[int, int, int]:
        hold = self.program.order.begun(chunk, tensor)
        found = self.begun[chunk, tensor] = hold.bytes, hold.category, hold.stream
        return found

    def run(self, what: What, number: int, microbatch: int) -> None:
        """A pass, or what hooks do besides."""
        chunk, role = self.chunks[number], self.program.order.role(microbatch)
        events, frame = chunk.run(self.rank, what, microbatch, role, self.amid(chunk.passes, what, role))
        self.handed, self.stream = frame[events.handed], events.stream
        if self.exchanged.passes:
            for tensor, (slot, _, size, category, stream) in chunk.made.get((what, role), ()):
                self.between[tensor, number, microbatch] = frame[slot], size, category, stream
        if what == "backward" and self.exchanged.gradients:
            chunk.end_gradients(self.rank)

    def amid(self, passes: Passes, what: What, role: Role) -> list[Amid]:
        """What libraries take within a pass: a workspace where a thread multiplies matrices for the first time
        (``getCurrentCUDABlasHandle``), and what is held while variants of a kernel are timed."""
        found: list[Amid] = []
        thread = WHOLE.get(what, what) if self.untaken else ""
        if thread in self.untaken:
            at = 0 if what in WHOLE else passes.product(what, role)
            found.append((at, partial(self.take, self.untaken.pop(thread))))
        for at, seam in passes.tuned(what, role):
            if seam.name not in self.tuned:
                self.tuned.add(seam.name)
                held = Hold(0, rounded(seam.once), Category.WORKSPACES, seam.name)
                found.append((at, partial(self.take, drop_all((held,), TIMED))))
        return found

    def take(self, tape: Iterable[Event]) -> None:
        """What a library begins and ends within a pass."""
        self.keep(tape)

    def step(self, states: Iterable[Hold] = ()) -> None:
        """The optimizer's step, with which ``states`` appear and gradients end."""
        program = self.program
        if program.empties >= 1:
            self.rank.empty_cache()
        if program.kept is not None and self.stepped:
            self.pool = program.kept.pool
        step = program.step if program.kept is None else program.kept.step
        self.keep((*step[: program.clipping], *states, *step[program.clipping :]))
        self.pool, self.stepped = 0, True
        self.end_gradients(program.gradients_kept)
        self.keep(program.late_step)
        self.end_gradients()
        for key in [key for key in self.between if key[0] in self.exchanged.until_step]:
            self.rank.drop(*self.between.pop(key))
        for tensor, chunk in [key for key in self.full if key[0] in self.exchanged.until_step]:
            self.end_all(chunk, tensor, 0)
        if program.empties >= 2:
            self.rank.empty_cache()

    def end_gradients(self, keep: int = 0) -> None:
        for chunk in self.chunks:
            chunk.end_gradients(self.rank, keep)


def replay(
    programs: Sequence[Program], settings: AllocatorSettings, workspaces: Sequence[Hold]
) -> tuple[Replayed, ...]:
    """One result per program."""
    results: dict[int, Replayed] = {}
    for group in _alike(programs, settings):
        base = Run(group[0], Rank(settings), workspaces_of(group[0], workspaces))
        base.begin()
        runs = [(program.order, list(program.order.shortened), program) for program in group]
        runs.sort(key=lambda run: sum(1 for _ in takewhile(_is_early, run[1])))
        done = 0
        for (_, actions, program), shared in zip(runs, _shared(runs), strict=True):
            base.do(actions[done:shared])
            done = shared
            run = base if len(group) == 1 else base.copy(program)
            results[program.stage] = run.result(actions, done)
    return tuple(results[program.stage] for program in programs)


def _alike(programs: Sequence[Program], settings: AllocatorSettings) -> list[list[Program]]:
    """Programs that differ in nothing but their orders of passes."""
    groups: dict[tuple[object, ...], list[Program]] = {}
    for program in programs:
        modules = tuple([(id(span.module), len(span.names)) for span in program.spans])
        chunks = [passes(chunk, settings) for chunk in program.order.chunks] if program.order.exchanged.any else ()
        kept = program.kept
        tapes = () if kept is None else (kept.construction, kept.states, kept.step, kept.carried, kept.pool)
        made = program.before, program.building, program.states, program.made
        key = (modules, *chunks, *tapes, *made, program.extra, program.step, program.late_step)
        groups.setdefault(key, []).append(program)
    return list(groups.values())


def _shared(runs: Sequence[tuple[Order, Sequence[Action], Program]]) -> list[int]:
    """By run, how many first actions it does as all runs behind it do."""
    found = [0]
    for (order, actions, _), (other, theirs, _) in reversed([*pairwise(runs)]):
        is_begun_alike = cache(partial(_is_begun_alike, order, other))
        same = sum(1 for _ in takewhile(bool, map(partial(_is_same, is_begun_alike), actions, theirs)))
        found.append(min(same, found[-1]) if len(found) > 1 else same)
    return [*found[:0:-1], found[1] if len(found) > 1 else 0]


def _is_early(action: Action) -> bool:
    """It comes before the first backward pass, and leaves nothing half done."""
    return action.what in ("forward", "begin", "end", "begin_all")


def _is_begun_alike(order: Order, other: Order, chunk: int, tensor: str) -> bool:
    return order.begun(chunk, tensor) == other.begun(chunk, tensor)


def _is_same(is_begun_alike: Callable[[int, str], bool], action: Action, theirs: Action) -> bool:
    """An early action comes to the same in both orders."""
    tensor = action.tensor
    return action == theirs and _is_early(action) and (tensor is None or is_begun_alike(action.chunk, tensor))
