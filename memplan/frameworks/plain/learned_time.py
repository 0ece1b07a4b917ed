"""The work of an architecture that was learnt from traces, as the time of a step counts it.

Layers that do the same are one kind. The most frequent kind is ``Entries.layer``, the next one ``dense``, and others,
which few models have, are ``kinds``.
"""

from __future__ import annotations

from ...layers.module import NO_PASSES, Passes
from ...plan.resolved import ResolvedPlan
from ...search.time.shape import Entries, StageWork, Work
from ...trace.fit import Piece
from ...trace.learned import checked_fit, fit_of
from ...trace.recording import EMBEDDING, FINAL_NORM, HEAD
from ...trace.timed import Alike, alike, joined_of
from .learned import piece_of, row_of


def has_work(plan: ResolvedPlan) -> bool:
    """Whether what was learnt for a resolved plan says what operators do. ``PlanError`` where nothing was learnt that
    serves it."""
    checked_fit(plan)
    return _piece(plan).work is not None


def _piece(plan: ResolvedPlan) -> Piece:
    return piece_of(plan, fit_of(plan), plan.batch.mbs, plan.batch.seq)


def entries_of(plan: ResolvedPlan) -> Entries:
    """Of one micro-batch; of no work where that is not known, so that layouts are ranked by what else a step does."""
    found = _alike(plan)
    layers = _layers(found)
    both: list[tuple[Passes, Passes]] = [(one.once, one.again) for one in layers]
    most, second = (*both, (NO_PASSES, NO_PASSES), (NO_PASSES, NO_PASSES))[:2]
    embedding, norm, head = (joined_of(found, name) for name in (EMBEDDING, FINAL_NORM, HEAD))
    return Entries(embedding, *most, norm, head, *second, kinds=tuple(both[2:]))


def stages_of(plan: ResolvedPlan) -> Work:
    """The one stage. Entries that are run again in backward are those that the traces saw run again."""
    layers = _layers(_alike(plan))
    counts = [(len(one.names), len(one.names) if one.again is not one.once else 0) for one in layers]
    (first, again), (second, second_again) = (*counts, (0, 0), (0, 0))[:2]
    all_layers = first + second, again + second_again
    work = StageWork(*all_layers, True, True, True, second, second_again, kinds=tuple(counts[2:]))
    return ((work,),)


def _alike(plan: ResolvedPlan) -> tuple[Alike, ...]:
    piece, fit = _piece(plan), fit_of(plan)
    return alike(piece, row_of(plan, fit, piece), plan.batch.mbs, plan.batch.seq, plan.microbatches > 1)


def _layers(found: tuple[Alike, ...]) -> list[Alike]:
    """The most frequent first."""
    return sorted((one for one in found if one.is_layer), key=lambda one: -len(one.names))
