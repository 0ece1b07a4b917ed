"""FSDP1 around an architecture that was learnt from traces of one device, in one dtype but for adapters': every layer
is a unit with a flat parameter, and so is each adapter's weight; the root has what is left (``flat``)."""

from __future__ import annotations

from functools import lru_cache

from ...layers.module import Options
from ...optimizers.bitsandbytes import quantisation_maps
from ...optimizers.steps import step_temporaries
from ...plan.resolved import ResolvedPlan
from ...schedules.one_chunk import OneChunk
from ...tape.events import Stretch
from ...tape.program import Chunk, Program, Span, drop_all
from ...trace.fit import Fit, Piece, Places
from ...trace.tapes import Row
from ..plain.learned import buffers_of, check_dtype, inputs_of, piece_of, row_of
from ..plain.tuned import shared_table
from . import flat
from .flat_states import Flat, flat_states, managed_states, pieces_of, units_held
from .learned import joined_row, seamed, told_apart


def flat_program_of(plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
    """What ``fit`` comes to on every rank of ``plan``, whose shards and gradients are in the dtype of compute, those
    of adapters in their own."""
    given, ranks = plan.fsdp, plan.layout.dp
    flat.check(plan, given)
    b, s = plan.batch.mbs, plan.batch.seq
    piece = piece_of(plan, fit, b, s)
    row = told_apart(row_of(plan, fit, piece))
    compute, trained = plan.precision.dtype, plan.lora.dtype or plan.precision.dtype
    check_dtype(plan, piece, compute)
    made = seamed(piece, row, b, s)
    ahead = given.backward_prefetch == "pre" and not plan.recompute.reentrant
    units = flat.units_of(made, compute, given.reshard_after_forward, False, False)
    how = (units, made[-1].names[0], ranks, compute, False, ahead)
    unrolled = _unrolled(piece, row, b, s, options.kernel_workspaces, plan.microbatches > 1, *how)
    maps = quantisation_maps(plan.optimizer)
    hooked, flats = units_held(flat.with_hooks(made, *how), units)
    tensors = [one for span in hooked for one in span.module.parameters]
    pieces = pieces_of(plan.optimizer, tensors, ranks, ranks, flats, trained)
    return Program(
        stage=0,
        ranks=tuple(range(ranks)),
        entries=tuple(dict.fromkeys(name for one in row for name in one.names)),
        order=OneChunk((Chunk(hooked, unrolled=unrolled),), plan.microbatches),
        states=flat_states(plan.optimizer, ranks, ranks, flats, trained),
        extra=(*inputs_of(plan, piece), *buffers_of(piece, row), *shared_table(plan), *maps),
        step=Stretch(drop_all(step_temporaries(plan.optimizer, pieces, trained), 1)),
        saving=flat.saving_of(units, trained, ranks),
        late_states=True,
        managed=managed_states(plan.optimizer, tensors, ranks, ranks, flats, trained),
        **flat.wrapping_of(plan, units, ahead),
        elements=sum(-(-one.elements // ranks) for one in tensors),
    )


@lru_cache(maxsize=16)
def _unrolled(
    piece: Piece,
    row: tuple[Places, ...],
    b: int,
    s: int,
    workspaces: bool,
    several: bool,
    units: tuple[Flat, ...],
    end: str,
    ranks: int,
    compute: str,
    mixed: bool,
    ahead: bool,
) -> tuple[Span, ...]:
    """All modules as one, in which every tensor has a number of its own, with the hooks' events."""
    around = flat.around_modules(seamed(piece, row, b, s), units, end, ranks, compute, mixed, ahead)
    made = Row(piece, row, b, s, workspaces)
    return joined_row(made, around.modules, around.renamed, (around.first, around.steady), several)
