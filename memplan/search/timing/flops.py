"""Floating-point operations of a step's products, as frameworks count them for MFU and HFU."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.plan import Plan
from .stages import StageWork


def model_flops(plan: Plan) -> float:
    """FLOPs of a step's products, forward and backward: 6 for each weight of a matrix and token, 12 for each layer,
    feature and score (arXiv 2205.05198, appendix A)."""
    spec, batch = plan.model, plan.batch
    assert batch.gbs is not None
    assert batch.seq is not None
    head = spec.vocab * spec.hidden
    matrices = spec.layers * matrix_elements(plan) + head
    attended = 12.0 * spec.layers * spec.attention_features * batch.seq
    return batch.gbs * batch.seq * (6.0 * matrices + attended)


def matrix_elements(plan: Plan) -> int:
    """Weights of a layer's products."""
    spec = plan.model
    return spec.hidden * (spec.qkv_features + spec.attention_features) + mlp_elements(plan)


def mlp_elements(plan: Plan) -> int:
    """Those of its MLP."""
    return (3 if plan.model.gated else 2) * plan.model.hidden * plan.model.ffn


def recomputed_flops(plan: Plan, work: Sequence[Sequence[StageWork]]) -> float:
    """FLOPs of products that backward computes again."""
    spec, batch = plan.model, plan.batch
    assert batch.gbs is not None
    assert batch.seq is not None
    layers = sum(chunk.recomputed for stage in work for chunk in stage)
    scores = 4.0 * spec.attention_features * batch.seq
    if plan.fsdp.per_operator:
        each = float(matrix_elements(plan))
    elif plan.recompute.mode == "selective":
        modules = plan.recompute.modules or ("core_attn",)
        each = (scores if "core_attn" in modules else 0.0) + (2.0 * mlp_elements(plan) if "mlp" in modules else 0.0)
    else:
        each = 2.0 * matrix_elements(plan) + scores
    return batch.gbs * batch.seq * layers * each
