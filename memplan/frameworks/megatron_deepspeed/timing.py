"""Megatron-DeepSpeed in the time of a step."""

from __future__ import annotations

from itertools import pairwise

from ...layers.module import Options, joined, run_again
from ...plan.plan import ResolvedPlan
from ...search.time.framework import FrameworkTime
from ...search.time.host import PYTHON_MODULES, Host
from ...search.time.rates import DIVIDED
from ...search.time.shape import Entries, StageWork, Work, named
from ...search.time.updates import Exchange, Replicas
from ...values import replace
from .programs import end_module, layer_module, parallel_shape, stage_bounds


class MegatronDeepspeedTime(FrameworkTime):
    compared = DIVIDED

    def entries(self, plan: ResolvedPlan) -> Entries:
        shape = parallel_shape(plan)
        options = Options(counts="later" if plan.microbatches > 1 else "first", summed=plan.precision.gradients)
        plain = layer_module(replace(shape, selective=False), 0, options).work
        again = run_again(plain) if plan.recompute.mode == "full" else layer_module(shape, 0, options).work
        ends = replace(shape, selective=False)
        embedding, into, back, norm, head = (
            end_module(name, ends, plan.loss, False, options).work
            for name in ("embedding", "transpose_in", "transpose_out", "final_norm", "head")
        )
        return Entries(joined(embedding, into), plain, again, norm, joined(back, head))

    def host(self, plan: ResolvedPlan) -> Host:
        """Modules and autograd functions in Python, as transformers' are (``megatron/model/transformer.py``,
        ``megatron/mpu/mappings.py``)."""
        return PYTHON_MODULES

    def scattered_sends(self, plan: ResolvedPlan) -> bool:
        return True

    def stages(self, plan: ResolvedPlan) -> Work:
        entries, bounds = stage_bounds(plan, parallel_shape(plan))
        names = [entry.name for entry in entries]
        return tuple((_work(names[low:high], plan),) for low, high in pairwise(bounds))

    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        return sum(replicas.exchanged(rank.trained))

    def mixed(self, plan: ResolvedPlan) -> bool:
        return plan.precision.dtype != "fp32"


def _work(names: list[str], plan: ResolvedPlan) -> StageWork:
    """Only a group of transformer layers alone is recomputed (``PipelineModule.forward``)."""
    recompute = plan.recompute
    work = named(names, plan.model, recompute)
    size = recompute.layers or 1
    if not work.recomputed or recompute.mode != "full" or recompute.method != "uniform" or size == 1:
        return work
    kinds = [name for name in names if name not in ("to_float16", "to_fp32")]
    groups = [kinds[start : start + size] for start in range(0, len(kinds), size)]
    alone = [group for group in groups if all(name.startswith("layer.") for name in group)]
    return work._replace(recomputed=sum(map(len, alone)))
