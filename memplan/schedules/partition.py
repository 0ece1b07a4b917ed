"""Methods that cut a list of layers into stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from ..plan.errors import PlanError
from ..values import dataclass

# -- partition -------------------------------------------------------------------------------------------


FIELD = "pipeline.partition"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the layer list."""

    kind: str
    """The class or function name that ``type:`` matches, such as ``EmbeddingPipe``."""
    name: str
    """What reports call it, such as ``layer.3``."""
    parameters: int
    """Trainable elements on one tensor-parallel rank."""


def partition(method: str | Sequence[int | str], entries: Sequence[Entry], stages: int) -> list[int]:
    """Stage boundaries by ``method``: uniform, parameters, type:REGEX, type:REGEX:W|…, or explicit."""
    if not isinstance(method, str):
        return explicit([int(edge) for edge in method], len(entries), stages)
    name = method.lower()
    if name == "uniform":
        return uniform(len(entries), stages)
    if name == "parameters":
        return balanced([entry.parameters for entry in entries], stages)
    if name.startswith("type:"):
        return balanced(type_weights(method[len("type:") :], entries), stages)
    raise PlanError(
        FIELD, method, "must be uniform, parameters, type:REGEX, type:REGEX:WEIGHT|REGEX:WEIGHT or a list of boundaries"
    )


def explicit(edges: list[int], entries: int, stages: int) -> list[int]:
    """Boundaries given by hand, checked: every entry in one stage, in order."""
    if len(edges) != stages + 1:
        raise PlanError(
            FIELD,
            edges,
            f"has {len(edges)} boundaries; {stages} stages need {stages + 1}: the first entry of each and the end",
        )
    if edges[0] != 0:
        raise PlanError(FIELD, edges, f"forgets entries 0 to {edges[0] - 1}: must begin with 0")
    if edges[-1] != entries:
        raise PlanError(
            FIELD,
            edges,
            f"ends at {edges[-1]}; the layer list has {entries} entries, so the last boundary must be {entries}",
        )
    for low, high in pairwise(edges):
        if high < low:
            raise PlanError(FIELD, edges, f"repeats entries {high} to {low - 1}: boundaries must not fall")
    return edges


def type_weights(pattern: str, entries: Sequence[Entry]) -> list[float]:
    """The weight of each entry: 1 where its kind matches, or the weight that the matching term names.

    ``embed:2|transformer:1`` is what BigScience's issue 186 asked for; DeepSpeed itself has only
    weights of 0 and 1. The first term that matches counts; case is ignored.
    """
    from ..plan.type_terms import type_terms

    terms = type_terms(pattern)
    kinds = dict.fromkeys(entry.kind for entry in entries)
    weights = {kind: next((weight for term, weight in terms if term.matches(kind)), 0.0) for kind in kinds}
    if not any(weights.values()):
        problem = f"matches no entry of the layer list ({', '.join(kinds)})"
        raise PlanError(FIELD, f"type:{pattern}", problem)
    return [weights[entry.kind] for entry in entries]


def uniform(entries: int, stages: int) -> list[int]:
    """``partition_uniform`` of 2021: equal stages, the rest in the last one."""
    if entries <= stages:
        return [min(stage, entries) for stage in range(stages + 1)]
    size = entries // stages
    return [size * stage for stage in range(stages)] + [entries]


def balanced(weights: Sequence[float], stages: int, epsilon: float = 1e-3) -> list[int]:
    """``partition_balanced`` of 2021: the smallest bottleneck, found by bisection, filled greedily."""
    if len(weights) <= stages:
        return uniform(len(weights), stages)
    prefix = list(accumulate(weights))
    low, high = prefix[-1] / stages, float(prefix[-1])
    while high > low + epsilon and low < (middle := low + (high - low) / 2) < high:
        if _probe(prefix, stages, middle)[1]:
            high = middle
        else:
            low = middle + epsilon
    parts, fits = _probe(prefix, stages, high)
    assert fits
    return parts


def _probe(prefix: list[float], stages: int, bottleneck: float) -> tuple[list[int], bool]:
    """``_lprobe``: fills stages up to ``bottleneck``, and says whether the last one keeps to it."""
    n = len(prefix)
    parts = [0] + [n] * stages
    chunk = n // stages
    step, limit = chunk, bottleneck
    for stage in range(1, stages):
        while step < n and prefix[step] < limit:
            step += chunk
        parts[stage] = bisect_left(prefix, limit, lo=step - chunk, hi=min(step, n))
        if parts[stage] == n:
            return parts, prefix[-1] - prefix[parts[stage - 1]] < bottleneck
        limit = prefix[parts[stage] - 1] + bottleneck
    return parts, limit >= prefix[-1]


def balanced_2023(weights: Sequence[float], stages: int) -> list[int]:
    """``partition_balanced`` since December 2023: the least spread between largest and smallest stage.

    ``best[j][i]`` cuts the first i entries into j stages; among equals the latest cut wins.
    """
    n = len(weights)
    prefix = [0.0, *accumulate(weights)]
    largest = [[inf] * (n + 1) for _ in range(stages + 1)]
    smallest = [[inf] * (n + 1) for _ in range(stages + 1)]
    spread = [[inf] * (n + 1) for _ in range(stages + 1)]
    cut = [[0] * (n + 1) for _ in range(stages + 1)]
    largest[0][0] = spread[0][0] = 0.0
    for i in range(1, n + 1):
        for j in range(1, min(i, stages) + 1):
            for k in range(i):
                part = prefix[i] - prefix[k]
                high, low = max(largest[j - 1][k], part), min(smallest[j - 1][k], part)
                if spread[j][i] >= high - low:
                    spread[j][i], largest[j][i], smallest[j][i], cut[j][i] = high - low, high, low, k
    parts = [n]
    for j in range(stages, 0, -1):
        parts.append(cut[j][parts[-1]])
    return parts[::-1]


# -- torchtitan partition --------------------------------------------------------------------------------


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
