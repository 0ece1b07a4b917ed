"""Tapes of modules made ready for replaying: one flat list of operations for a pass of one micro-batch.

A micro-batch's tensors lie in a *frame*, one slot each: those that modules share first, then those of every module
in a row. What a tape refers to by its neighbour's role (its input, the gradient of its output) is a slot of the
neighbour here, so that nothing is looked up by name while a pass runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from operator import itemgetter

from ..layers.module import SHARED, STALE, Module, Tapes
from ..tape.events import GRAD_OUTPUT, INPUT, NOTHING, PRODUCT, Bytes, Category, Drop, Event, Hold, Hook, Seam, Tape
from ..tape.program import Chunk, Hooked, Role, Span, What, Whole
from ..values import NamedTuple, dataclass
from .blocks import LARGEST_SMALL, SHIFT, UNBOUNDED, Given, SegmentPool, Step, Stretch
from .caching import AllocatorSettings
from .operations import Listed, Operation, Operations, Placed, alone, ends, listed, takes_over
from .requests import Requests
from .stretches import FIRST_PART, NEVER, order_of, requests_of, stretches

FEW = 4
"""In its first runs, so many, a row takes its steps one by one: to find its stretches would take longer."""


class Row:
    """Steps in a row on one stream."""

    def __init__(self, steps: Sequence[Step], *, small: bool = False) -> None:
        self.steps, self.small = steps, small
        self.length = len(steps)
        self.runs = 0
        """So far."""
        self.opened: tuple[Step, ...] = ()  # what is run instead, once no stretch gives back all it takes

    def run(self, pool: SegmentPool, blocks: list[int], limit: int) -> tuple[int, int, int]:
        """As ``SegmentPool.run_all``."""
        self.runs += 1
        if self.runs <= FEW or self.opened:
            return pool.run(self.opened or self.steps, blocks, limit)
        if len(self.stretches) == 1 and self.stretches[0].requests is None:
            self.opened = self.stretches[0].steps
        return pool.run_all(self.stretches, blocks, limit)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        return stretches(self.steps, small=self.small)

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots of blocks that were taken before and are given back, and of those that stay."""
        before: list[int] = []
        taken: dict[int, int] = {}
        for slot, units, _, _, _ in self.steps:
            if units > 0:
                taken[slot] = units
            elif units and not taken.pop(slot, 0):
                before.append(slot)
        return tuple(before), tuple(taken)


class ModuleRow(Row):
    """Small steps of modules in a row, whose stretches are those of each module, wherever it is."""

    def __init__(self, placed: Sequence[tuple[_ModuleSteps, Placed]]) -> None:
        self.placed = [(own, one) for own, one in placed if own.length]
        self.runs = 0
        self.length = sum([own.length for own, _ in self.placed])
        self.parts = [
            (own.small, one.offset, one.offset + own.size, [one.outer[id] for id in own.outer])
            for own, one in self.placed
        ]

    def apart(self) -> bool:
        """No module knows one slot under two names."""
        return all(
            len({*outer}) == len(outer) and not any(start <= slot < end for slot in outer)
            for _, start, end, outer in self.parts
            if outer
        )

    def run(self, pool: SegmentPool, blocks: list[int], limit: int) -> tuple[int, int, int]:
        self.runs += 1
        requests, given = self.given
        for place, (small, start, end, outer) in enumerate(self.parts):
            looks = place in given and not pool.picky
            if looks and pool.give_all(requests, given[place], blocks) is not None:
                break
            own = blocks[start:end]
            for slot in outer:
                own.append(blocks[slot])
            pool.run_all(small, own, UNBOUNDED)
            blocks[start:end] = own[: end - start]
            for at, slot in enumerate(outer, end - start):
                blocks[slot] = own[at]
        return 0, limit, -1

    @cached_property
    def given(self) -> tuple[set[Requests], dict[int, Given]]:
        """Of the last modules that each give back all they take: all requests; and by the place of a module from which
        on it is worth looking whether free blocks serve them, what they give back besides."""
        closed = 0
        for place, (own, _) in enumerate(self.placed):
            if any(units > 0 for _, units in own.lasting):
                closed = place + 1
        slots: list[int] = []
        starts: list[tuple[int, int]] = []
        total = 0
        requests = {own.requests for own, _ in self.placed[closed:] if own.requests.order}
        for own, one in self.placed[closed:]:
            starts.append((len(slots), total))
            slots += [one.slot(id) for id, _ in own.lasting]
            total -= own.ended
        found: dict[int, Given] = {}
        steps = least = 0
        for place, (own, _) in enumerate(self.placed[closed:]):
            if steps >= least:
                first, before = starts[place]
                found[closed + place] = Given(slots[first:], total - before)
                least = 2 * steps + max(FIRST_PART, len(slots) // 2)
            steps += own.length
        return requests, found

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        before: list[int] = []
        taken: dict[int, int] = {}
        for own, one in self.placed:
            for id, units in own.lasting:
                slot = one.slot(id)
                if units > 0:
                    taken[slot] = units
                elif not taken.pop(slot, 0):
                    before.append(slot)
        return tuple(before), tuple(taken)


Runs = tuple[tuple[int, Row], ...]
"""By the stream's number."""


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """Forward or backward of one micro-batch through a row of modules, or what hooks do besides."""

    operations: Operations
    small: Runs
    """The operations that small blocks serve, which never exceed requests: peaks are looked for in ``large``."""
    large: Runs
    """The others; held units count both."""
    handed: int
    """Slot of what the next in line gets: output or gradient of the input; 0 where there is none,"""
    stream: int
    """and the stream that it was made on."""
    left: tuple[Operation, ...]
    """Of the micro-batch's tensors, what is live behind the pass, by slot; begun in this pass or an earlier one."""
    inherited: tuple[int, ...]
    """Slots of tensors that an earlier micro-batch left behind and that this pass ends;"""
    spent: tuple[int, ...]
    """and of those that it does not replace."""
    net: int
    """Units."""
    net_by: tuple[tuple[int, int], ...]
    """Category and bytes, where it is not 0."""

    def until(self, place: int, known: tuple[int, Bytes] = (-1, NOTHING)) -> Bytes:
        """Change of bytes by category through the operation at ``place``; what it is at an earlier one is ``known``."""
        return tuple(map(int.__add__, known[1], self.operations.change(known[0] + 1, place + 1)))


Rows = tuple[tuple[Module, int], ...]


def passes(chunk: Chunk, settings: AllocatorSettings) -> Passes:
    """The passes of ``chunk``; the same object for chunks of the same modules."""
    own = _counted(chunk.unrolled or (*chunk.spans, *chunk.losses))
    return _passes(own, _counted(chunk.last), chunk if chunk.hooks or chunk.losses else None, settings)


def _counted(spans: Iterable[Span]) -> Rows:
    return tuple([(span.module, len(span.names)) for span in spans])


@lru_cache(maxsize=1 << 10)
def _passes(rows: Rows, last: Rows, chunk: Chunk | None, settings: AllocatorSettings) -> Passes:
    own, final = ([module for module, count in row for _ in range(count)] for row in (rows, last))
    model = len(own) if chunk is None else len(chunk.spans)
    return Passes(own, final, model, {} if chunk is None else chunk.hooks, settings)


class Passes:
    """What micro-batches run in one chunk of layers, and the frame in which their tensors lie. A pass is made ready
    when it is first asked for."""

    def __init__(
        self,
        modules: Sequence[Module],
        last: Sequence[Module],
        model: int,
        hooks: Mapping[What, Sequence[Hooked]],
        settings: AllocatorSettings,
    ) -> None:
        """``last``: the modules of the last micro-batch, if they are others. The first ``model`` modules make the
        output, those behind it the loss."""
        self.modules: dict[Role, Sequence[Module]] = {"first": modules, "steady": modules, "last": last or modules}
        self.model, self.hooks, self.settings = model, hooks, settings
        outside = [(one.place, listed(one.events, settings).operations) for own in hooks.values() for one in own]
        parts = [_parts(module, settings) for module in modules]
        others = [_parts(module, settings) for module in last] if last else parts
        largest = [max(part.largest, other.largest) for part, other in zip(parts, others, strict=True)]
        for place, operations in outside:
            largest[place] = max((largest[place], *(operation.slot for operation in operations)))
        ids = frozenset[int]().union(*(part.shared for part in (*parts, *others)))
        ids = ids.union(one.slot for _, operations in outside for one in operations if one.slot <= SHARED)
        self.shared = {id: 1 + i for i, id in enumerate(sorted(ids, reverse=True))}
        self.stale: dict[int, int] = {}
        """Slots of tensors that an earlier micro-batch left behind and that forward ends, by the module's place."""
        self.offsets: list[int] = []
        self.slots = 1 + len(ids)
        """Size of a frame."""
        for place, part in enumerate(parts):
            self.offsets.append(self.slots)
            self.slots += 1 + largest[place]
            if part.displaces:
                self.stale[place] = self.slots
                self.slots += 1
        self.staying = [at + module.slot for at, module in zip(self.offsets, modules, strict=True) if module.slot]
        """Slots of tensors that forward leaves behind for a later micro-batch to end."""
        self._made: dict[tuple[What, Role], Pass] = {}
        self._pieces: dict[tuple[Whole, Role], tuple[tuple[int, Pass], ...]] = {}
        self._tuned: dict[tuple[What, Role], tuple[tuple[int, Seam], ...]] = {}
        self._left: dict[int, Operation] = {}
        """What any pass so far leaves, by slot."""

    def of(self, what: What, role: Role) -> Pass:
        """A pass of the ``role``'s micro-batch, or what hooks do besides, which is the first micro-batch's."""
        found = self._made.get((what, role))
        if found is None:
            own = self._forward_role(role) if what == "forward" else role
            found = self._make(what, role) if own == role else self.of(what, own)
            self._made[what, role] = found
        return found

    def pieces(self, whole: Whole, role: Role) -> tuple[tuple[int, Pass], ...]:
        """The pieces of a pass (``Hook.PIECE``), each with the place of its first operation."""
        found = self._pieces.get((whole, role))
        if found is None:
            every, starts, at = self.of(whole, role).operations, [0], 0
            for _, event in self._events(whole, role):
                if isinstance(event, Seam):
                    starts += [at] if event.hook is Hook.PIECE else []
                else:
                    at += event.bytes > 0
            found = tuple((start, _part(every[start:end])) for start, end in pairwise([*starts, len(every)]))
            self._pieces[whole, role] = found
        return found

    def product(self, what: What, role: Role) -> int:
        """The place of the operation behind the result of the first product of matrices; 0 where no tape says so."""
        at = 0
        for _, event in self._events(what, role):
            if isinstance(event, Seam):
                if event.name == PRODUCT:
                    return at
            else:
                at += event.bytes > 0
        return 0

    def tuned(self, what: What, role: Role) -> tuple[tuple[int, Seam], ...]:
        """Behind how many operations the pass first comes to each kernel that is tuned (``Seam.once``)."""
        found = self._tuned.get((what, role))
        if found is None:
            places: dict[str, tuple[int, Seam]] = {}
            known: dict[int, tuple[int, list[tuple[int, Seam]]]] = {}
            start = 0
            for _, tape in self._tapes_in_order(what, role):
                count, seams = known.get(id(tape)) or known.setdefault(id(tape), _tuned(tape))
                for at, seam in seams:
                    places.setdefault(seam.name, (start + at, seam))
                start += count
            found = self._tuned[what, role] = tuple(places.values())
        return found

    def _events(self, what: What, role: Role) -> Iterator[tuple[int, Event]]:
        return ((at, one) for at, tape in self._tapes_in_order(what, role) for one in tape)

    def operation(self, place: int, hold: Hold) -> Operation:
        """What the module at ``place`` holds, with its slot."""
        (found,) = Placed(listed((hold,), self.settings), self.offsets[place], self.shared).operations()
        return found

    def name(self, what: What, role: Role, at: int) -> tuple[int, str]:
        """Of operation ``at`` of a pass, which begins a tensor: the place of its module, and what the tape calls it."""
        every = [(place, event) for place, events in self.events(what, role) for event in events]
        place, event = every[at]
        return place, event.name if isinstance(event, Hold) else ""

    def events(self, what: What, role: Role) -> list[tuple[int, Sequence[Hold | Drop]]]:
        """Of every operation of a pass its event on the tape, module by module in the order of the pass, each with its
        place."""
        known: dict[int, Sequence[Hold | Drop]] = {}
        found = []
        for place, tape in self._tapes_in_order(what, role):
            if id(tape) not in known:
                known[id(tape)] = [one for one in tape if isinstance(one, Hold | Drop) and one.bytes]
            found.append((place, known[id(tape)]))
        return found

    def _tapes_in_order(self, what: What, role: Role) -> Iterator[tuple[int, Tape]]:
        """The tapes of which ``of`` makes a pass, with the places of their modules."""
        if what not in ("forward", "loss", "backward"):
            yield from ((one.place, one.events) for one in self.hooks.get(what, ()))
            return
        role = self._forward_role(role) if what == "forward" else role
        modules, places = self.modules[role], range(len(self.offsets))
        if what == "backward":
            yield from ((place, _tapes(modules[place], role).backward) for place in reversed(places))
            return
        own = places[: self.model] if what == "forward" else places[self.model :]
        yield from ((place, _tapes(modules[place], role).forward) for place in own)
        yield from ((place, _tapes(modules[place], role).end) for place in own)

    def _forward_role(self, role: Role) -> Role:
        """Without hooks the first micro-batch's forward pass is that of all others, unless a loss computes gradients in
        it."""
        return "steady" if role == "first" and not self.hooks and not self.begins_apart else role

    @cached_property
    def begins_apart(self) -> bool:
        """The first micro-batch's forward pass leaves gradients behind: a fused loss computes them there."""
        modules = {id(module): module for module in self.modules["first"]}.values()
        return any(module.first.forward != module.steady.forward for module in modules)

    def _make(self, what: What, role: Role) -> Pass:
        modules, places = self.modules[role], range(len(self.offsets))
        if what == "backward":
            before = self.of("loss" if self.model < len(modules) else "forward", role)
            return self._backward(places[::-1], role, before.left)
        if what in ("forward", "loss"):
            before_loss = self.of("forward", role).left if what == "loss" else ()
            return self._forward(places[: self.model] if what == "forward" else places[self.model :], role, before_loss)
        return self._summed(
            [
                Placed(listed(one.events, self.settings), self.offsets[one.place], self.shared)
                for one in self.hooks.get(what, ())
            ],
            0,
            (),
        )

    def _forward(self, places: Sequence[int], role: Role, before: Sequence[Operation]) -> Pass:
        placed: list[Placed] = []
        inputs, modules = self._inputs(role), self.modules[role]
        for place in places:
            outer = {**self.shared, INPUT: inputs[place], STALE: self.stale.get(place, 0)}
            own = _operations(_tapes(modules[place], role), False, self.settings)
            placed.append(Placed(own, self.offsets[place], outer))
        for place in places:
            ended = _tapes(modules[place], role).end
            if ended:
                placed.append(Placed(listed(ended, self.settings), self.offsets[place], self.shared))
        return self._summed(placed, inputs[places[-1] + 1] if places else 0, before)

    def _inputs(self, role: Role) -> list[int]:
        """Slots of what each module is given, and of what the last one hands on."""
        found, role = [0], self._forward_role(role)
        for module, offset in zip(self.modules[role], self.offsets, strict=True):
            found.append(self._slot(_tapes(module, role).output, offset) or found[-1])
        return found

    def _slot(self, id: int, offset: int) -> int:
        """Of a tensor that a module has made, for it to hand on; 0 where it has not."""
        return offset + id if id > 0 else self.shared[id] if id <= SHARED else 0

    def _backward(self, places: Sequence[int], role: Role, before: Sequence[Operation]) -> Pass:
        placed: list[Placed] = []
        inputs, handed = self._inputs(role), 0
        for place in places:  # a module's gradient may lie where its input did
            tapes, offset = _tapes(self.modules[role][place], role), self.offsets[place]
            outer = {**self.shared, INPUT: inputs[place], GRAD_OUTPUT: handed}
            placed.append(Placed(_operations(tapes, True, self.settings), offset, outer))
            made = tapes.grad_input
            handed = inputs[place] if made == INPUT else self._slot(made, offset) or handed
        return self._summed(placed, handed, before)

    def _summed(self, placed: Sequence[Placed], handed: int, before: Sequence[Operation]) -> Pass:
        live = {operation.slot: operation for operation in before}
        by = [0] * len(Category)
        inherited: list[int] = []
        changed: dict[int, Operation] = {}
        displaced = self.stale.values()
        start, streams = 0, False
        operations = Operations(placed, changed)
        for own, offset, outer in placed:
            streams |= own.streams
            for kind, size in own.by:
                by[kind] += size
            for at, operation in own.lasting:
                id, units, size, category, stream = operation
                slot = offset + id if id > 0 else outer[id]
                if units > 0:
                    live[slot] = Operation(slot, units, size, category, stream)
                    continue
                held = live.pop(slot, None)
                if held is None and slot not in displaced:
                    inherited.append(slot)
                    held = self._left.get(slot)
                if held is not None and (held.category, held.stream) != (category, 0):
                    operation = operation._replace(slot=slot)
                    if takes_over(held, operation):
                        total = operations[start + at - 1]
                        live[total.slot] = total._replace(category=held.category)
                        operation = operation._replace(stream=held.stream)
                    else:
                        operation = ends(operation, held)
                    changed[start + at] = operation
                    streams |= held.stream > 0
                by[operation.category] -= size
            start += len(own.operations)
        small, large, net = _steps(operations) if streams or len(placed) < MANY else _module_steps(operations)
        left = tuple([live[slot] for slot in sorted(live)])
        self._left.update(live)
        net_by = tuple([(category, size) for category, size in enumerate(by) if size])
        spent = tuple([slot for slot in inherited if slot not in live])
        stream = live[handed].stream if handed in live else 0
        return Pass(operations, small, large, handed, stream, left, tuple(inherited), spent, net, net_by)


def _tapes(module: Module, role: Role) -> Tapes:
    return module.first if role == "first" else module.steady


class _Parts(NamedTuple):
    """What a frame has to know of a module."""

    largest: int
    """The largest id of a tensor of its own."""
    shared: frozenset[int]
    displaces: bool
    """Its forward ends a tensor that an earlier micro-batch left."""


@lru_cache(maxsize=1 << 12)
def _parts(module: Module, settings: AllocatorSettings) -> _Parts:
    first, steady = module.first, module.steady
    tapes = [(first, False), (first, True), (steady, False), (steady, True)]
    ids = {operation.slot for own, backward in tapes for operation in _operations(own, backward, settings).operations}
    displaces = STALE in ids
    ids |= {module.slot, first.output, steady.output, first.grad_input, steady.grad_input}
    return _Parts(max(ids), frozenset(id for id in ids if id <= SHARED), displaces)


@lru_cache(maxsize=1 << 13)
def _operations(tapes: Tapes, backward: bool, settings: AllocatorSettings) -> Listed:
    """A module's own operations."""
    return listed(tapes.backward if backward else tapes.forward, settings)


def _steps(operations: Sequence[Operation]) -> tuple[Runs, Runs, int]:
    """Small and large steps, and the net change in units. A small step's peak belongs to the large one before it."""
    small: dict[int, list[Step]] = {}
    large: list[tuple[int, Step]] = []
    slot = units = total = top = stream = 0
    place = -1
    for at, operation in enumerate(operations):
        total += operation.units
        if abs(operation.units) <= LARGEST_SMALL:
            own = small.setdefault(operation.stream, [])
            own.append((operation.slot, operation.units, operation.units << SHIFT, NEVER, -1))
            if total > top:
                top, place = total, at
            continue
        large.append((stream, (slot, units, units << SHIFT, top, place)))
        slot, units, stream, top, place = operation.slot, operation.units, operation.stream, total, at
    large.append((stream, (slot, units, units << SHIFT, top, place)))
    runs = [(stream, Row([step for _, step in own])) for stream, own in groupby(large, itemgetter(0))]
    return tuple((stream, Row(own, small=True)) for stream, own in small.items()), tuple(runs), total


class _ModuleSteps:
    """The steps of a module's operations that are all on the main stream, with tensors' ids as slots."""

    def __init__(self, own: Listed) -> None:
        small: list[Step] = []
        self.large: list[Step] = []
        """With units and places from the module's beginning on;"""
        self.before = (0, -1)
        """and the most units that small steps hold before the first of them, with the place, if more than none."""
        total = top = slot = units = 0
        place = -1
        for at, operation in enumerate((*own.operations, None)):
            if operation is not None and abs(operation.units) <= LARGEST_SMALL:
                total += operation.units
                small.append((operation.slot, operation.units, operation.units << SHIFT, NEVER, -1))
                if total > top:
                    top, place = total, at
                continue
            if units:
                self.large.append((slot, units, units << SHIFT, top, place))
            else:
                self.before = top, place
            if operation is not None:
                total += operation.units
                slot, units, top, place = operation.slot, operation.units, total, at
        self.net = total
        self.outer = sorted({slot for slot, _, _, _, _ in small if slot < 0})
        """Ids of others' tensors in small steps."""
        self.size = 1 + max([0, *(slot for slot, _, _, _, _ in small)])
        """Of the part of a frame that holds the own ones; others lie behind it."""
        ids = {id: self.size + place for place, id in enumerate(self.outer)}
        self.length = len(small)
        self.small = stretches([(ids.get(step[0], step[0]), *step[1:]) for step in small], small=True)
        taken: dict[int, int] = {}
        before: list[tuple[int, int]] = []
        for id, units, _, _, _ in small:
            if id > 0 and units > 0:
                taken[id] = units
            elif not taken.pop(id, 0):
                before.append((id, units))
        self.lasting = (*before, *taken.items())
        """Ids and units of the blocks that small steps give back and have not taken, and that they take for good; of
        others' tensors, all;"""
        self.ended = sum([units for _, units in self.lasting])
        """and their sum."""
        self.requests = requests_of(order_of(small))
        """Of small steps that take none for good."""


_steps_of = lru_cache(maxsize=1 << 13)(_ModuleSteps)


MANY = 8
"""Modules in a row whose small steps are worth looking at once for each kind of module."""


def _module_steps(operations: Operations) -> tuple[Runs, Runs, int]:
    """``_steps`` of modules that are all on the main stream."""
    steps = [(_steps_of(one.listed), one) for one in operations.placed]
    small = ModuleRow(steps)
    if not small.apart():
        return _steps(operations)
    total = 0
    large: list[Step] = [(0, 0, 0, 0, -1)]
    for (own, (_, offset, outer)), start in zip(steps, operations.starts, strict=False):
        top, place = own.before
        if total + top > large[-1][3]:
            large[-1] = (*large[-1][:3], total + top, start + place)
        large += [
            (offset + id if id > 0 else outer[id], units, code, total + top, start + place)
            for id, units, code, top, place in own.large
        ]
        total += own.net
    return (((0, small),) if small.length else ()), ((0, Row(large)),), total


@lru_cache(maxsize=1 << 8)
def parts_of(events: Pass, length: int) -> tuple[Pass, ...]:
    """A pass as several in a row, of up to ``length`` operations each. In a part no slot holds both small and large
    tensors, since a part's small ones come before its large ones."""
    parts: list[list[Operation]] = [[]]
    is_small: dict[int, bool] = {}
    for operation in events.operations:
        small = abs(operation.units) <= LARGEST_SMALL
        if len(parts[-1]) == length or is_small.get(operation.slot, small) is not small:
            parts.append([])
            is_small.clear()
        parts[-1].append(operation)
        is_small[operation.slot] = small
    return tuple(_part(part) for part in parts if part)


@lru_cache(maxsize=1 << 8)
def pieces(events: Pass, places: tuple[int, ...]) -> tuple[Pass, ...]:
    """A pass cut at each of ``places`` among its operations."""
    return tuple(_part(events.operations[start:end]) for start, end in pairwise((0, *places, None)))


def _tuned(tape: Tape) -> tuple[int, list[tuple[int, Seam]]]:
    """How many operations there are, and seams of kernels that are tuned, each with the number of those before it."""
    at, found = 0, list[tuple[int, Seam]]()
    for event in tape:
        if not isinstance(event, Seam):
            at += event.bytes > 0
        elif event.once:
            found.append((at, event))
    return at, found


def _part(operations: Sequence[Operation]) -> Pass:
    small, large, net = _steps(operations)
    by = [0] * len(Category)
    for _, units, size, category, _ in operations:
        by[category] += size if units > 0 else -size
    changed = tuple([(category, size) for category, size in enumerate(by) if size])
    return Pass(alone(operations), small, large, 0, 0, (), (), (), net, changed)
