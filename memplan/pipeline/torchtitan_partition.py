"""Which layers torchtitan puts into which stage, where nobody says so.

A partition is the list of every stage's first layer and the number of layers. The embedding comes with the first
stage, norm and head with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..plan.errors import PlanError
from .partition import FIELD, explicit


def split_points(layers: int, stages: int) -> list[int]:
    """``generate_split_points`` of December 2024 (commit 9dec370): equal stages; what is left over goes to the
    stages behind the first, one each, and the last takes the rest."""
    assert stages <= layers, "more stages than layers"
    size, extra = divmod(layers, stages)
    edges = [0, size]
    for _ in range(stages - 2):
        edges.append(edges[-1] + size + (extra > 0))
        extra -= extra > 0
    return [*edges[:stages], layers]


def weighted(layers: int, stages: int) -> list[int]:
    """``_generate_llm_fqn_per_model_part``, since July 2025: the embedding counts as a layer, norm and head as
    another (``pipeline_parallel_first_stage_less_layers``, ``…_last_…``); what is left over goes to the first
    stages, one each."""
    size, extra = divmod(layers + 2, stages)
    assert size, "more stages than layers, embedding and head"
    sizes = [size + (stage < extra) - (not stage) for stage in range(stages - 1)]
    return [0, *accumulate(sizes), layers]


def of_entries(edges: Sequence[int], layers: int, stages: int) -> list[int]:
    """Boundaries by hand, in entries: embedding, layers, norm, head. Returned in layers."""
    explicit(list(edges), layers + 3, stages)
    if edges[1] < 1 or edges[-2] > layers + 1:
        problem = "must leave the embedding to the first stage, and norm and head to the last"
        raise PlanError(FIELD, list(edges), problem)
    if any(low == high for low, high in pairwise(edges[1:-1])):
        raise PlanError(FIELD, list(edges), "must give every stage a layer, but for the first and the last")
    return [0, *(edge - 1 for edge in edges[1:-1]), layers]
