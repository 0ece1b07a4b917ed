"""Megatron-DeepSpeed in a search: cuts of BigScience's layer list."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import inf

from ...layers.autograd import ITEMSIZE
from ...layers.module import Options
from ...plan.plan import ResolvedPlan
from ...search.cuts import ChunkLayers, Criteria, Fields, Holds, Ratios, StageLayers, contiguous, fastest
from ...search.framework import FrameworkSearch, Proposal, eight_bit_adam
from ...search.lower_bounds import LayerNeeds, States
from ...search.point import Extra
from ...tape.program import fold_program, module_elements
from . import programs

METHODS = ("type:transformer", "type:embed|transformer", "parameters", "uniform")
"""Methods of DeepSpeed's ``PipelineModule._partition_layers``, with the two patterns that BigScience used."""

BEFORE = 3
"""Entries of BigScience's layer list in front of the layers (``programs.layer_list``)."""
BEHIND = 4


class MegatronDeepspeedSearch(FrameworkSearch):
    chooses_cut = True
    expandable_segments = False
    flash_attention = False

    def zero(self, plan: ResolvedPlan) -> tuple[int, ...]:
        return 1, 0

    def extras(self, plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
        groups = []
        if plan.loss.kind == "vocab-parallel":
            fields = (("loss.kind", "adaptive-softmax"),)
            groups.append((Extra("adaptive softmax", fields, keeps_numerics=False, changes_passes=True),))
        return groups + eight_bit_adam(plan, (("optimizer.embeddings_32bit", False),))

    def cut_fields(self, cut: StageLayers) -> Fields:
        return (("pipeline.partition", edges(cut)),)

    def other_cuts(self) -> Iterator[Proposal]:
        for method in METHODS:
            yield Proposal(method, {"pipeline.partition": method})

    def layer_needs(self, plan: ResolvedPlan) -> LayerNeeds:
        shape = programs.parallel_shape(plan)
        module = programs.layer_module(shape, 1 if plan.recompute.mode == "full" else 0, Options())
        return LayerNeeds(module_elements(module), max(0, module.steady.forward_fold.net))

    def states(self, plan: ResolvedPlan) -> States:
        dtype, algorithm = plan.precision.dtype, plan.optimizer.algorithm
        moments = algorithm.moments(plan.optimizer) * (1 if algorithm.eight_bit else 4)
        whole, divided = 2 * ITEMSIZE[dtype], moments + 4 * (dtype != "fp32")
        shards = plan.layout.zero == 1 or dtype == "bf16"
        return States(whole, divided) if shards else States(whole + divided, 0)

    def cut(
        self, plan: ResolvedPlan, ratios: Ratios, limit: int | None, criteria: Criteria, holds: Holds | None
    ) -> StageLayers | None:
        """Any run of entries may be a stage that has a layer; others could not run (``notices``)."""
        shape = programs.parallel_shape(plan)
        entries = programs.layer_list(plan, shape)
        stages, total = plan.layout.pp, len(entries)
        names = [entry.name for entry in entries]
        layer = [name.startswith("layer.") for name in names]

        @cache
        def peak(stage: int, held: tuple[str, ...]) -> int:
            """Of a stage with entries of these names, layers of which are all alike."""
            low = names.index(held[0])
            found = entries[low : low + len(held)]
            return fold_program(programs.stage_program(plan, shape, stage, found, stages, Options())).peak

        def canonical(low: int, high: int) -> tuple[str, ...]:
            """``names[low:high]`` as the first run that is the same but for the numbers of its layers."""
            if layer[low] and not all(layer[low:high]):
                return tuple(names[low:high])
            if layer[low]:
                return tuple(names[BEFORE : BEFORE + high - low])
            return tuple(names[low:high])

        bounds = edges(fastest(plan.model.layers, stages, 1, ratios, False))
        threshold = limit
        if threshold is None:
            threshold = max(peak(at, canonical(low, high)) for at, (low, high) in enumerate(pairwise(bounds)))
        alone = peak(stages - 1, canonical(BEFORE, BEFORE + 2)) - peak(stages - 1, canonical(BEFORE, BEFORE + 1))
        weights = {"embedding": ratios.embedding, "head": ratios.head}
        seconds = [weights.get(name, 1.0 if layer[at] else 0.0) for at, name in enumerate(names)]

        @cache
        def values(stage: int, low: int, high: int) -> tuple[float, float]:
            held = names[low:high]
            if ("embedding" in held) != (stage == 0) or ("head" in held) != (stage == stages - 1):
                return inf, inf  # what follows the head stays with it
            if not sum(layer[low:high]) or sum(layer[low:high]) * alone > threshold:
                return inf, inf
            size = peak(stage, canonical(low, high))
            return criteria(size, sum(seconds[low:high])) if size <= threshold else (inf, inf)

        chosen = contiguous(
            stages, total, lambda *at: values(*at)[0] if at[1] < at[2] else inf, lambda *at: values(*at)[1]
        )
        if chosen is None:
            return None

        def chunk(low: int, high: int) -> ChunkLayers:
            held = names[low:high]
            return ChunkLayers(sum(layer[low:high]), "embedding" in held, "head" in held, "final_norm" in held, high)

        return tuple((chunk(low, high),) for low, high in pairwise(chosen))


def edges(cut: StageLayers) -> tuple[int, ...]:
    """First entry of every stage, and the length of the list; ends with their neighbours unless they say otherwise."""
    edges, at = [0], BEFORE
    for (chunk,) in cut:
        at += chunk.layers
        edges.append(chunk.until or at + BEHIND * chunk.head)
    return tuple(edges)
