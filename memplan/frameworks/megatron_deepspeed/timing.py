"""Megatron-DeepSpeed in the time of a step."""

from __future__ import annotations

from itertools import pairwise

from ...plan.resolved import ResolvedPlan
from ...search.time.framework import FrameworkTime
from ...search.time.shape import Code, StageWork, Work, named
from ...search.time.updates import Exchange, Replicas
from .programs import parallel_shape, stage_bounds


class MegatronDeepspeedTime(FrameworkTime):
    positions_twice = True  # EmbeddingPipe

    def code(self, plan: ResolvedPlan) -> Code:
        given = plan.megatron
        return Code(
            norm_in_python=False,
            joined_inputs=True,
            joined_gradients=True,
            fused_softmax=True,
            parallel_loss=True,
            fused_activation=given.bias_gelu_fusion and given.bias_swiglu_fusion,
            fused_residual=given.bias_dropout_fusion,
            scattered_sends=True,
        )

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
    work, recompute = named(names, plan), plan.recompute
    size = recompute.layers or 1
    if not work.recomputed or recompute.mode != "full" or recompute.method != "uniform" or size == 1:
        return work
    kinds = [name for name in names if name not in ("to_float16", "to_fp32")]
    groups = [kinds[start : start + size] for start in range(0, len(kinds), size)]
    alone = [group for group in groups if all(name.startswith("layer.") for name in group)]
    return work._replace(recomputed=sum(map(len, alone)))
