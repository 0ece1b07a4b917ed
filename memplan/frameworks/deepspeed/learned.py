"""DeepSpeed's engine with ZeRO 0 to 2 around an architecture that was learnt from traces of one device.

Until stage 2 hooks run where a gradient is ready and nowhere else: the traced events stay as they are, and each
gradient goes where the engine puts it. Stage 3 gathers around every submodule, of which a fit knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Options, Parameter, Tapes
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.resolved import ResolvedPlan
from ...schedules.one_chunk import OneChunk
from ...tape.events import Category, Drop, Event, Hook, Seam, Tape
from ...tape.program import Chunk, Program, Span, fold_program
from ...trace.fit import Born, Fit, Piece, Places
from ...trace.framework import in_compute
from ...trace.tapes import FIRST, FORWARD, FURTHER, Row, spans
from ..plain.hooked import HookedModule, Instance, Model
from ..plain.learned import buffers_of, check_dtype, inputs_of, piece_of, row_of
from ..plain.tuned import packed
from .config import check_model, check_settings, fields_of_a_plan, zero_of
from .engine import Rank, Setting, beside_packed, candidates, groups_of, placed_of, program_of, rank_of
from .states import initialisation_peak


def learnt_program(plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
    """What ``fit`` comes to on the rank that needs most."""
    zero = zero_of(plan)
    b, s = plan.batch.mbs, plan.batch.seq
    assert s is not None
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
    beside = (*inputs_of(piece, b, s), *buffers, *quantisation_maps(plan.optimizer), *scales)
    parts = groups_of(setting, model)
    made = [_unrolled(rank_of(setting, model, parts, one), setting) for one in candidates(setting, model)]
    programs = [replace(program_of(rank, setting, beside), order=order) for rank, order in made]
    found = programs[0] if len(programs) == 1 else max(programs, key=lambda one: fold_program(one).peak)
    besides = sum(hold.bytes for hold in buffers)
    building = initialisation_peak(model, parts, besides, plan.hardware.capacity)
    return replace(
        found,
        initialisation=building if setting.builds_as_measured else None,
        elements=sum(one.elements for each in model.instances for one in each.hooked.module.parameters),
        host=placed_of(setting, model, parts).on("host"),
    )


def _unrolled(rank: Rank, setting: Setting) -> tuple[Rank, OneChunk]:
    """With its order; for the allocator's replay all modules as one, since some end what others made."""
    own = tuple(Span(module, (name,)) for module, name in zip(rank.modules, rank.names, strict=True))

    def joined(tapes: list[Tapes]) -> Tapes:
        forward = tuple(event for one in tapes for event in one.forward)
        return Tapes(forward, tuple(event for one in reversed(tapes) for event in one.backward), 0, 0)

    first, steady = (joined([getattr(one, role) for one in rank.modules]) for role in ("first", "steady"))
    whole = Span(Module("model", first, steady, (), ()), ("model",))
    return rank, OneChunk((Chunk(own, unrolled=(whole,)),), setting.microbatches)


@lru_cache(maxsize=16)
def _model(piece: Piece, row: tuple[Places, ...], b: int, s: int, workspaces: bool, dtype: str) -> Model:
    """The row with a seam where each gradient is ready."""
    made = Row(piece, row, b, s, workspaces)
    names = [(name, span.module) for span in spans(piece, row, b, s) for name in span.names]
    instances = []
    parameters: list[Parameter] = []
    ids: dict[str, int] = {}
    for at, (name, module) in enumerate(names):
        kind = made.kinds[at]
        tapes = Tapes(tuple(made.of(at, FORWARD)), tuple(_with_seams(made, at, dtype)), 0, 0)
        hooked = Module(module.name, tapes, tapes, module.evaluation, kind.parameters)
        read = tuple(packed(one, dtype) for one in kind.parameters)
        one = Instance(name, HookedModule(hooked, {}, frozenset(), read))
        instances.append(one)
        for parameter in read:
            ids[one.qualified(parameter.name, False)] = len(parameters)
            parameters.append(parameter)
    return Model(tuple(instances), tuple(parameters), ids, False, dtype)


def _with_seams(row: Row, at: int, dtype: str) -> Iterator[Event]:
    """A backward pass in which gradients end where a further micro-batch has added them, behind their seams and in the
    order in which they are ready: a linear layer's bias goes before its weight."""
    kind, tape = row.kinds[at], tuple(row.of(at, FURTHER))
    ends = _ends(row, at, dtype, tape)
    numbers = {end.tensor: number for number, end in ends.items()}
    waiting = list(ends)
    for event in tape:
        number = numbers.get(event.tensor) if isinstance(event, Drop) else None
        if number is None:
            yield event
        while number in waiting:
            ready = waiting.pop(0)
            yield Seam(kind.parameters[ready].name, Hook.GRADIENT, ends[ready].tensor)
            yield ends[ready]


def _ends(row: Row, at: int, dtype: str, tape: Tape) -> dict[int, Drop]:
    """By number of a parameter, in the order in which they are ready: where its gradient, which a first micro-batch
    leaves behind, ends in a further one."""
    kind, start = row.kinds[at], row.starts[FURTHER][at]
    made = (one for one in kind.passes[FIRST] if isinstance(one, Born))
    gradients = {
        start + number: row.sizes.exact[one.size]
        for number, one in enumerate(made)
        if one.category == Category.GRADIENTS
    }
    ended = [event for event in tape if isinstance(event, Drop) and event.tensor in gradients]
    found = {}
    for number in kind.ready:
        size = kind.parameters[number].elements * ITEMSIZE[dtype]
        end = next(one for one in ended if gradients[one.tensor] == size)
        ended.remove(end)
        found[number] = end
    return found


def lacks(plan: ResolvedPlan, fit: Fit) -> str:
    """Why the engine's part is not known of ``fit``; nothing where it is."""
    piece = fit.pieces[0]
    gradients = [
        sorted(
            piece.polynomials[one.size](*least_of(piece))
            for one in kind.passes[FIRST]
            if isinstance(one, Born) and one.category == Category.GRADIENTS
        )
        for kind in piece.kinds
    ]
    size = ITEMSIZE[plan.precision.dtype]
    ready = [sorted(kind.parameters[one].elements * size for one in kind.ready) for kind in piece.kinds]
    if fit.buckets and gradients == ready:
        return ""
    return "gradients of this architecture are not ready layer by layer, so where hooks run is unknown"


def least_of(piece: Piece) -> tuple[int, int]:
    """The smallest sizes that it was verified for."""
    return piece.domain.b_from, piece.domain.s_from
