"""Plain PyTorch's layers in the time of a step, and ``device-map``: devices run one after the other.

The work of an architecture that was learnt from traces, as the time of a step counts it.

Layers that do the same are one kind. The most frequent kind is ``Entries.layer``, the next one ``dense``, and others,
which few models have, are ``kinds``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...layers.coverage import TRANSFORMERS, check_covered
from ...layers.huggingface import LayerShape
from ...layers.module import NO_PASSES, Options, Passes, run_again
from ...plan.plan import ResolvedPlan
from ...search.time.framework import FrameworkTime
from ...search.time.host import PYTHON_MODULES, Host
from ...search.time.rates import REPLICAS, before
from ...search.time.shape import Entries, StageWork, Work, recomputed
from ...trace.fit import Piece
from ...trace.learned import checked_fit, fit_of
from ...trace.recording import EMBEDDING, FINAL_NORM, HEAD
from ...trace.timed import Alike, alike, joined_of
from . import programs, recipes
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
    both = [(one.once, one.again) for one in layers]
    embedding, norm, head = (joined_of(found, name) for name in (EMBEDDING, FINAL_NORM, HEAD))
    return of_kinds(embedding, both, norm, head)


def stages_of(plan: ResolvedPlan) -> Work:
    """The one stage. Entries that are run again in backward are those that the traces saw run again."""
    layers = _layers(_alike(plan))
    counts = [(len(one.names), len(one.names) if one.again is not one.once else 0) for one in layers]
    return ((counted(counts, True, True, True),),)


def _alike(plan: ResolvedPlan) -> tuple[Alike, ...]:
    piece, fit = _piece(plan), fit_of(plan)
    return alike(piece, row_of(plan, fit, piece), plan.batch.mbs, plan.batch.seq, plan.microbatches > 1)


def _layers(found: tuple[Alike, ...]) -> list[Alike]:
    """The most frequent first."""
    return sorted((one for one in found if one.is_layer), key=lambda one: -len(one.names))


# -- timing --------------------------------------------------------------------------------------------


EARLY_STOP = (2, 1)
"""PyTorch whose recompute ends with the last saved tensor (``set_checkpoint_early_stop``)."""


class PlainTime(FrameworkTime):
    """transformers' modules."""

    compared = REPLICAS

    def entries(self, plan: ResolvedPlan) -> Entries:
        if not plan.model.has_sizes:
            return entries_of(plan)
        check_covered(plan.model, TRANSFORMERS, plan.framework)
        shape, spec = programs.layer_shape(plan), plan.model
        options = programs.recipe_options(plan, Options(counts="later" if plan.microbatches > 1 else "first"))
        full = plan.recompute.mode == "full"

        def layer(number: int, recompute: bool) -> Passes:
            if recompute and before(plan, EARLY_STOP):
                return run_again(layer(number, False))
            return recipes.layer_module(shape.of_layer(number), recompute, plan.code, options).work

        embedding, norm, head = recipes.end_modules(shape, plan.code, options, programs.head_loss(plan))
        normed = norm.work if norm is not None else NO_PASSES
        layers = [(layer(one, False), layer(one, full)) for one in last_of_each(shape, spec.layers)]
        return of_kinds(embedding.work, layers, normed, head.work)

    def host(self, plan: ResolvedPlan) -> Host:
        return PYTHON_MODULES

    def stages(self, plan: ResolvedPlan) -> Work:
        if not plan.model.has_sizes:
            return stages_of(plan)
        return ((work_of_layers(plan, range(plan.model.layers), True, plan.model.final_norm, True),),)

    def rounding(self, plan: ResolvedPlan) -> float:
        """Experts take whole rows each."""
        spec = plan.model
        return float(spec.experts > 0 and 2 * plan.batch.seq * spec.expert_top_k % spec.experts > 0)


def last_of_each(shape: LayerShape, layers: int) -> list[int]:
    """The last one of each kind of a model's ``layers``, of the most frequent kind first."""
    kinds = [shape.kind_of(number) for number in range(layers)]
    last = {kind: number for number, kind in enumerate(kinds)}
    return [last[kind] for kind, _ in Counter(kinds).most_common()]


def of_kinds(embedding: Passes, layers: Sequence[tuple[Passes, Passes]], norm: Passes, head: Passes) -> Entries:
    """Entries whose ``layers`` are of these kinds, each plain and recomputed."""
    most, second = (*layers, (NO_PASSES, NO_PASSES), (NO_PASSES, NO_PASSES))[:2]
    return Entries(embedding, *most, norm, head, *second, kinds=tuple(layers[2:]))


def counted(counts: Sequence[tuple[int, int]], embedding: bool, norm: bool, head: bool) -> StageWork:
    """Entries of a stage with so many layers of each kind, of which so many are recomputed."""
    (first, again), (second, second_again) = (*counts, (0, 0), (0, 0))[:2]
    ends = embedding, norm, head
    return StageWork(first + second, again + second_again, *ends, second, second_again, kinds=tuple(counts[2:]))


def work_of_layers(plan: ResolvedPlan, held: Sequence[int], embedding: bool, norm: bool, head: bool) -> StageWork:
    """Entries of a stage of the layers ``held``, all of which or none are recomputed."""
    shape = programs.layer_shape(plan)
    counts = Counter(map(shape.kind_of, held))
    numbers = [counts[shape.kind_of(one)] for one in last_of_each(shape, plan.model.layers)]
    return counted([(n, recomputed(plan.recompute, n)) for n in numbers], embedding, norm, head)


class DeviceMapTime(PlainTime):
    pipelined = False
    compared = ""

    def stages(self, plan: ResolvedPlan) -> Work:
        """The embedding, and a head that is tied to it, are on the first device, an untied head on the last."""
        assert plan.device_map is not None
        held = [plan.device_map[device] for device in sorted(plan.device_map)]
        last, tied = len(held) - 1, plan.model.tied_embeddings

        def work(at: int) -> StageWork:
            return work_of_layers(plan, held[at], not at, at == last, at == (0 if tied else last))

        return tuple((work(at),) for at in range(len(held)))
