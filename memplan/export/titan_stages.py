"""Cuts of torchtitan's model by the names of its modules.

Edges are entries in the list tok_embeddings, layers, norm, output: the first of every stage, and the list's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..pipeline.torchtitan_partition import weighted


def torchtitans_own(layers: int, pp: int, vpp: int) -> tuple[int, ...] | None:
    """The cut that torchtitan makes from its degree alone (``generate_llm_fqn_per_model_part``): one stage on a rank,
    or two where the schedule is interleaved; ``None`` where it would make others."""
    if vpp > 2 or pp * vpp > layers + 2:
        return None
    _, *inner, _ = weighted(layers, pp * vpp)
    return (0, *(layer + 1 for layer in inner), layers + 3)


def parts(edges: Sequence[int], layers: int) -> list[list[str]]:
    """``module_fqns_per_model_part``: the modules of every stage."""
    names = modules(layers)
    return [names[low:high] for low, high in pairwise(edges)]


def split_points(edges: Sequence[int], layers: int) -> list[str]:
    """``pipeline_parallel_split_points``: the first module of every stage behind the first."""
    names = modules(layers)
    return [names[edge] for edge in edges[1:-1]]


def modules(layers: int) -> list[str]:
    return ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "output"]
