"""DeepSpeed's engine around an architecture that was learnt from traces of one device.

Until stage 2 hooks run where a gradient is ready and nowhere else: the traced events stay as they are, and each
gradient goes where the engine puts it. Stage 3 gathers around every submodule: its traces have marks where hooks of
submodules run (``trace.marks``), which are seams here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Options, Parameter, Tapes
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.plan import ResolvedPlan
from ...schedules.one_chunk import OneChunk
from ...tape.events import Category, Drop, Event, Hold, Hook, Seam, Stretch, Tape
from ...tape.program import Chunk, Program, Span, fold_program
from ...trace.fit import Born, Fit, Piece, Places
from ...trace.framework import in_compute
from ...trace.learned import fit_of
from ...trace.marks import Mark, mark_of
from ...trace.tapes import FIRST, FORWARD, FURTHER, Row, spans
from ...values import replace
from ..plain.hooked import HookedModule, Instance, Model
from ..plain.hooked_recorder import NO_PARAMETERS
from ..plain.learned import buffers_of, check_dtype, inputs_of, piece_of, ready_at, row_of
from ..plain.tuned import packed
from .config import check_model, check_settings, fields_of_a_plan, zero_of
from .engine import Rank, Setting, beside_packed, candidates, groups_of, placed_of, program_of, rank_of
from .states import initialisation_peak, shard


def learnt_program(plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
    """What ``fit`` comes to on the rank that needs most."""
    zero = zero_of(plan)
    b, s = plan.batch.mbs, plan.batch.seq
    with fields_of_a_plan(plan):
        check_settings(plan, zero)
        check_model(plan)
    piece = piece_of(plan, fit, b, s)
    row = row_of(plan, fit, piece)
    check_dtype(in_compute(plan), piece, plan.precision.dtype)
    recompute = plan.recompute.mode == "full"
    setting = Setting(zero, plan.layout.dp, plan.precision.dtype, plan.optimizer, recompute, plan.microbatches)
    model = _model(piece, row, b, s, options.kernel_workspaces, setting.dtype)
    buffers = buffers_of(piece, row)
    scales = beside_packed(model, plan)
    beside = (*inputs_of(plan, piece), *buffers, *quantisation_maps(plan.optimizer), *scales)
    parts = groups_of(setting, model)
    made = [_unrolled(rank_of(setting, model, parts, one), setting) for one in candidates(setting, model)]
    programs = [replace(program_of(rank, setting, beside), order=order) for rank, order in made]
    found = programs[0] if len(programs) == 1 else max(programs, key=lambda one: fold_program(one).peak)
    besides = sum(hold.bytes for hold in buffers)
    building = initialisation_peak(model, parts, besides, plan.hardware.capacity)
    tensors = [one.elements for each in model.instances for one in each.hooked.module.parameters]
    placed = placed_of(setting, model, parts)
    return replace(
        found,
        initialisation=building if setting.builds_as_measured else None,
        elements=sum(shard(one, setting.dp) for one in tensors) if zero.stage == 3 else sum(tensors),
        host=placed.on("host"),
        nvme=placed.on("nvme"),
    )


def _unrolled(rank: Rank, setting: Setting) -> tuple[Rank, OneChunk]:
    """With its order; for the allocator's replay all modules as one, since some end what others made."""
    own = tuple(Span(module, (name,)) for module, name in zip(rank.modules, rank.names, strict=True))

    def joined(tapes: list[Tapes]) -> Tapes:
        forward = tuple(chain.from_iterable(one.forward for one in tapes))
        return Tapes(forward, tuple(chain.from_iterable(one.backward for one in reversed(tapes))), 0, 0)

    first, steady = (joined([getattr(one, role) for one in rank.modules]) for role in ("first", "steady"))
    whole = Span(Module("model", first, steady, (), ()), ("model",))
    return rank, OneChunk((Chunk(own, unrolled=(whole,)),), setting.microbatches)


def learnt_model(plan: ResolvedPlan) -> Model:
    """That of ``plan``'s architecture, with hooks."""
    b, s, fit = plan.batch.mbs, plan.batch.seq, fit_of(plan)
    piece = piece_of(plan, fit, b, s)
    return _model(piece, row_of(plan, fit, piece), b, s, False, plan.precision.dtype)


@lru_cache(maxsize=16)
def _model(piece: Piece, row: tuple[Places, ...], b: int, s: int, workspaces: bool, dtype: str) -> Model:
    """The row with a seam where each gradient is ready, and where it has marks."""
    made = Row(piece, row, b, s, workspaces)
    names = [(name, span.module) for span in spans(piece, row, b, s) for name in span.names]
    labels, ready = _labels([name for name, _ in names], made), ready_at(piece, row)
    owners = {name: labels[at] for at, (name, _) in enumerate(names)}
    instances = []
    parameters: list[Parameter] = []
    ids: dict[str, int] = {}
    for at, (name, module) in enumerate(names):
        kind, marked = made.kinds[at], _Marked(owners, name)
        hooks = [(made.kinds[home].parameters[one], _label(labels, at, home, one)) for home, one in ready[at]]
        forward, backward = marked.seams(made.of(at, FORWARD)), marked.seams(_with_seams(made, at, dtype, hooks))
        tapes = Tapes(Stretch(forward), Stretch(backward), 0, 0)  # cut once for all ranks and stages
        evaluation = Stretch(marked.seams(module.evaluation))
        hooked = Module(module.name, tapes, tapes, evaluation, kind.parameters)
        read = tuple(packed(one, dtype) for one in kind.parameters)
        instances.append(Instance(name, HookedModule(hooked, marked.reads, marked.unhooked, read)))
        for label, parameter in zip(labels[at], read, strict=True):
            ids[one_of(name, label)] = len(parameters)
            parameters.append(parameter)
    for at, place in enumerate(ready):
        for home, one in place:
            ids[one_of(names[at][0], _label(labels, at, home, one))] = ids[one_of(names[home][0], labels[home][one])]
    for instance in instances:  # what a module reads of another one, as a tied head does
        found = (one for names in instance.hooked.reads.values() for one in names if "/" in one)
        ids |= {one_of(instance.name, one): ids[one] for one in found}
    makers = {tensor: at for tensor, (_, at) in gradients_of(made).items()}
    return Model(tuple(instances), tuple(parameters), ids, False, dtype, makers=makers)


def one_of(instance: str, parameter: str) -> str:
    """``Instance.qualified``, of a model whose tied weight is its first owner's."""
    return f"{instance}/{parameter}"


def _labels(names: Sequence[str], row: Row) -> list[list[str]]:
    """What parameters are called at seams, by entry: their names, which several may have, and entries, too."""
    seen: Counter[str] = Counter()
    found: list[list[str]] = []
    for name, kind in zip(names, row.kinds, strict=True):
        found.append([])
        for one in kind.parameters:
            key = one_of(name, one.name)
            found[-1].append(f"{one.name}#{seen[key]}" if seen[key] else one.name)
            seen[key] += 1
    return found


def _label(labels: Sequence[Sequence[str]], at: int, home: int, number: int) -> str:
    """In the entry ``at``, of a parameter of the entry ``home``."""
    return labels[home][number] if home == at else f"{labels[home][number]}@{home}"


class _Marked:
    """Marks in the tapes of the module ``name``; ``owners`` are names of parameters by module."""

    def __init__(self, owners: Mapping[str, Sequence[str]], name: str) -> None:
        self.owners, self.name = owners, name
        self.reads: dict[str, tuple[str, ...]] = {}
        """Parameters of each submodule, by the first."""
        self.ended: set[str] = set()
        """Submodules whose backward's end is noticed."""

    @property
    def unhooked(self) -> frozenset[str]:
        return frozenset(self.reads) - self.ended

    def seams(self, tape: Iterable[Event]) -> Iterator[Event]:
        """``tape`` with seams for marks."""
        marks: set[int] = set()
        read: tuple[str, ...] = ()
        for event in tape:
            mark = mark_of(event) if isinstance(event, Hold) else None
            if mark is not None:
                marks.add(event.tensor)
                read = (*read, *self._read(mark))
                if not mark.more:
                    yield self._seam(mark.hook, read)
                    read = ()
            elif not (isinstance(event, Drop) and event.tensor in marks):
                yield event

    def _read(self, mark: Mark) -> Sequence[str]:
        own = self.owners[mark.entry or self.name][mark.first : mark.first + mark.size]
        foreign = mark.entry not in ("", self.name)
        return tuple(one_of(mark.entry, one) if foreign else one for one in own)

    def _seam(self, hook: Hook, read: tuple[str, ...]) -> Seam:
        if not read:
            return Seam(NO_PARAMETERS, hook)
        self.reads[read[0]] = read
        if hook is Hook.AFTER_BACKWARD:
            self.ended.add(read[0])
        return Seam(read[0], hook)


def _with_seams(row: Row, at: int, dtype: str, ready: Sequence[tuple[Parameter, str]]) -> Iterator[Event]:
    """A backward pass in which gradients end where a further micro-batch has added them, behind their seams and in the
    order in which they are ready: a linear layer's bias goes before its weight."""
    tape = tuple(row.of(at, FURTHER))
    ends = _ends(row, [one for one, _ in ready], dtype, tape)
    numbers = {end.tensor: number for number, end in enumerate(ends)}
    waiting = [*range(len(ends))]
    for event in tape:
        number = numbers.get(event.tensor) if isinstance(event, Drop) else None
        if number is None:
            yield event
        while number in waiting:
            first = waiting.pop(0)
            yield Seam(ready[first][1], Hook.GRADIENT, ends[first].tensor)
            yield ends[first]


def _ends(row: Row, ready: Iterable[Parameter], dtype: str, tape: Tape) -> list[Drop]:
    """Where the gradient of each of ``ready``, which a first micro-batch leaves behind, ends in a further one.
    ``LookupError`` where it does not."""
    made = gradients_of(row)
    ended = [event for event in tape if isinstance(event, Drop) and event.tensor in made]
    found = []
    for one in ready:
        size = one.elements * ITEMSIZE[dtype]
        end = next((one for one in ended if made[one.tensor][0] == size), None)
        if end is None:
            raise LookupError(one.name)
        ended.remove(end)
        found.append(end)
    return found


@lru_cache(maxsize=4)
def gradients_of(row: Row) -> dict[int, tuple[int, int]]:
    """Bytes, not rounded, of what a first backward leaves behind, and the place of the module that makes it, by its
    number in a further one. A tied weight's is the head's, to which the embedding's is added."""
    return {
        start + number: (row.sizes.exact[one.size], at)
        for at, (kind, start) in enumerate(zip(row.kinds, row.starts[FURTHER], strict=False))
        for number, one in enumerate(change for change in kind.passes[FIRST] if isinstance(change, Born))
        if one.category == Category.GRADIENTS
    }


def lacks(plan: ResolvedPlan, fit: Fit) -> str:
    """Why the engine's part is not known of ``fit``; nothing where it is."""
    piece = fit.pieces[0]
    if plan.layout.zero == 3:
        stacked = next((one.name for kind in piece.kinds for one in kind.parameters if len(one.shape) > MATRIX), "")
        if stacked:
            return f"{stacked} is a stack of matrices, views of which outlive what stage 3 gathers"
        names = [name for _, names in piece.row for name in names]
        if len(set(names)) < len(names):
            return "it has more than one list of layers, and marks of stage 3 name the entries of one"
    return _unready(piece, plan.precision.dtype)


MATRIX = 2
"""Dimensions of weights whose products keep no view of them."""
UNREADY = "gradients of this architecture are not ready layer by layer, so where hooks run is unknown"


@lru_cache(maxsize=64)
def _unready(piece: Piece, dtype: str) -> str:
    row = Row(piece, piece.row, *least_of(piece), False)
    try:
        for at, place in enumerate(ready_at(piece, piece.row)):
            tensors = [row.kinds[home].parameters[number] for home, number in place]
            _ends(row, tensors, dtype, tuple(row.of(at, FURTHER)))
    except LookupError:
        return UNREADY
    return ""


def least_of(piece: Piece) -> tuple[int, int]:
    """The smallest sizes that it was verified for."""
    return piece.domain.b_from, piece.domain.s_from
