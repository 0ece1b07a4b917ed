"""Plain PyTorch's layers in the time of a step, and ``device-map``: devices run one after the other."""

from __future__ import annotations

from ...layers.coverage import TRANSFORMERS, check_covered
from ...layers.module import NO_PASSES, Options, Passes, run_again
from ...plan.resolved import ResolvedPlan
from ...search.time.framework import FrameworkTime
from ...search.time.host import PYTHON_MODULES, Host
from ...search.time.rates import REPLICAS, before
from ...search.time.shape import Entries, StageWork, Work, recomputed
from . import programs, recipes
from .learned_time import entries_of, stages_of

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

        def layer(number: int, recompute: bool) -> Passes:
            if recompute and before(plan, EARLY_STOP):
                return run_again(layer(number, False))
            return recipes.layer_module(shape.of_layer(number), recompute, plan.code, options).work

        def both(number: int) -> tuple[Passes, Passes]:
            return layer(number, False), layer(number, plan.recompute.mode == "full")

        embedding, norm, head = recipes.end_modules(shape, plan.code, options, programs.head_loss(plan))
        normed = norm.work if norm is not None else NO_PASSES
        dense = both(spec.dense_layers[0]) if spec.experts and spec.dense_layers else ()
        most = next((i for i in range(spec.layers) if spec.has_experts(i)), 0)
        return Entries(embedding.work, *both(most), normed, head.work, *dense)

    def host(self, plan: ResolvedPlan) -> Host:
        return PYTHON_MODULES

    def stages(self, plan: ResolvedPlan) -> Work:
        return super().stages(plan) if plan.model.has_sizes else stages_of(plan)

    def rounding(self, plan: ResolvedPlan) -> float:
        """Experts take whole rows each."""
        spec = plan.model
        return float(spec.experts > 0 and 2 * plan.batch.seq * spec.expert_top_k % spec.experts > 0)


class DeviceMapTime(PlainTime):
    pipelined = False
    compared = ""

    def stages(self, plan: ResolvedPlan) -> Work:
        """The embedding, and a head that is tied to it, are on the first device, an untied head on the last."""
        assert plan.device_map is not None
        held = [len(plan.device_map[device]) for device in sorted(plan.device_map)]
        last, tied = len(held) - 1, plan.model.tied_embeddings
        return tuple(
            (StageWork(n, recomputed(plan.recompute, n), not at, at == last, at == (0 if tied else last)),)
            for at, n in enumerate(held)
        )
