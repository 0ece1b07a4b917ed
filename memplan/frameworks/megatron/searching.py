"""Megatron-Core in a search: its axes and rules, cuts of layers that are all alike, and bounds of a stage's peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from ...layers.autograd import ITEMSIZE
from ...layers.module import Options
from ...plan.errors import PlanError
from ...plan.megatron_layout import layout_text
from ...plan.plan import Plan
from ...plan.resolved import ResolvedPlan
from ...schedules import megatron_flight
from ...schedules.megatron_flight import Range
from ...schedules.megatron_fold import MegatronOrder
from ...search.cuts import (
    ChunkLayers,
    Criteria,
    Fields,
    Option,
    Ratios,
    StageLayers,
    choose,
    fastest,
    fewest_of,
    most_that,
    spread,
    stage_layers,
    stage_seconds,
)
from ...search.framework import FrameworkSearch, Proposal
from ...search.lower_bounds import LayerNeeds, States
from ...search.point import NO_RECOMPUTE, UNCUT_FIELDS, Extra, Point, Recomputing, updated
from ...search.space import Space
from ...search.time import work_of
from ...tape.program import Program, fold_program, module_elements
from . import programs

UNBOUNDED = 1 << 62
"""Bytes; more than any rank has."""


class MegatronSearch(FrameworkSearch):
    chooses_cut = True
    stops_early = True

    def searched(self, base: Plan) -> bool:
        """The collectives of experts have no time yet, and cuts are of layers that are alike."""
        model, sharded = base.model, base.megatron.fsdp != "none"
        return not (model.experts or model.latent_kv_rank or model.mtp_layers or sharded)

    # -- axes and points -----------------------------------------------------------------------------------

    def sizes(self, plan: ResolvedPlan) -> frozenset[str]:
        return super().sizes(plan) - (frozenset() if plan.attention == "flash" else {"cp"})

    def zero(self, plan: ResolvedPlan) -> tuple[int, ...]:
        return (1,) if plan.optimizer.precision_aware else (1, 0)

    def recomputing(self, plan: ResolvedPlan) -> tuple[Recomputing, ...]:
        return NO_RECOMPUTE, Recomputing("selective"), Recomputing("full")

    def extras(self, plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
        groups, optimizer = list[tuple[Extra, ...]](), plan.optimizer
        if plan.megatron.cross_entropy_fusion == "none":
            fused = "te" if plan.megatron.transformer_impl == "transformer_engine" else "native"
            loss: Fields = (("megatron.cross_entropy_fusion", fused),)
            groups.append((Extra("fused cross entropy", loss, changes_passes=True),))
        whole_states = optimizer.algorithm.precision_aware and not optimizer.precision_aware
        if whole_states and plan.precision.dtype == "bf16":
            states: Fields = (
                ("optimizer.precision_aware", True), ("optimizer.exp_avg", "bf16"), ("optimizer.exp_avg_sq", "bf16")
            )  # fmt: skip
            groups.append((Extra("Adam states in bf16", states, keeps_numerics=False, least_zero=1),))
        return groups

    def completed(self, base: Plan) -> Plan:
        """States of a precision-aware optimizer are sharded ones."""
        if base.megatron.fsdp != "none":
            problem = "must be none: layouts with Megatron-FSDP are not searched yet; estimate --vary compares some"
            raise PlanError("megatron.fsdp", base.megatron.fsdp, problem)
        if not self.searched(base):
            problem = "has experts, latent attention or multi-token prediction, whose layouts are not searched yet; "
            raise PlanError("model", base.model.name, f"{problem}estimate --vary compares some")
        if base.optimizer.name == "muon":
            raise PlanError(
                "optimizer.name", "muon", "must be adam, adamw or sgd: layouts with Muon are not searched yet"
            )
        if not base.optimizer.precision_aware or base.layout.zero:
            return base
        return base.model_copy(update={"layout": updated(base.layout, {"zero": 1})})

    def unrunnable(self, space: Space, tp: int, cp: int, pp: int, vpp: int, microbatches: int) -> str:
        if vpp > 1 and microbatches % pp:
            return "interleaving needs micro-batches in multiples of pp"
        if cp > 1 and space.seq % (2 * cp):
            return "2 cp must divide the sequence"
        if space.sequence_parallel and tp == 1:
            return "sequence parallelism needs tp above 1"
        if tp > 1 and space.seq // cp % tp:
            return "cp x tp must divide the sequence"
        return ""

    def fields(self, space: Space, point: Point) -> Mapping[str, Any]:
        parallel = point.tp > 1 if space.sequence_parallel is None else space.sequence_parallel
        fields: dict[str, Any] = {"layout.sequence_parallel": parallel}
        if not point.zero:
            fields |= {"megatron.overlap_param_gather": False, "megatron.distributed_optimizer_instances": 1}
        return fields

    def more_recompute(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        yield Proposal("selective recompute", {"recompute.mode": "selective"})
        most = max(chunk.layers for stage in work_of(plan) for chunk in stage)
        for layers in sorted({max(1, most // 4), max(1, most // 2)}):
            fields = {"recompute.mode": "full", "recompute.method": "block", "recompute.layers": layers}
            yield Proposal(f"full recompute of {layers} of {most} layers", fields)

    # -- memory --------------------------------------------------------------------------------------------

    def fullest(self, plan: ResolvedPlan, enough: int | None = None) -> tuple[int, int]:
        """Stages are folded in the order of a bound from above, until no bound is larger than what was found. The first
        stage, which has most in flight, and the last, which has the head, are bounded first."""
        stages, entries = programs.stages_of(plan, Options()), programs.stage_entries(plan)
        order = range(len(entries))
        ranges = []
        for at in dict.fromkeys((0, order[-1], *order)):
            own = entries[at] if stages.job.shape.layers else tuple(map(_renumbered, entries[at]))
            program = stages.program(at, own)
            bounds = between(program)
            if enough is not None and bounds.least > enough:
                return bounds.least, at
            ranges.append((bounds, program))
        ranges.sort(key=lambda pair: (-pair[0].most, pair[1].stage))
        largest = at = 0
        for bounds, program in ranges:
            if bounds.most < largest or (enough is not None and largest > enough):
                break
            peak = fold_program(program).peak
            largest, at = max((largest, at), (peak, -program.stage))
        return largest, -at

    def layer_needs(self, plan: ResolvedPlan) -> LayerNeeds:
        job = programs.stages_of(plan, Options()).job
        options = replace(job.options, keeps_input=False, drops_gradient=True)
        module = programs.layers_module((job.shape,), options, recomputed=plan.recompute.mode == "full")
        return LayerNeeds(module_elements(module), max(0, module.steady.forward_fold.net))

    def states(self, plan: ResolvedPlan) -> States:
        rules = programs.rules(plan)
        in_low = rules.low is not None and rules.low.parameters
        whole = (0 if in_low else ITEMSIZE[rules.dtype]) + ITEMSIZE[rules.gradients]
        divided = (rules.main_size if rules.mixed else 0) + sum(ITEMSIZE[dtype] for _, dtype in rules.moments)
        return States(whole, divided) if rules.distributed else States(whole + divided, 0)

    # -- cuts ----------------------------------------------------------------------------------------------

    def cut_fields(self, cut: StageLayers) -> Fields:
        counts = {chunk.layers for stage in cut for chunk in stage}
        chosen = None if len(counts) == 1 else layout_text([[chunk.layers for chunk in stage] for stage in cut])
        none = dict.fromkeys(("first_layers", "last_layers", "layout"), None) | {"count_embedding": False}
        fields = {**none, "count_loss": False, "layout": chosen}
        return tuple((f"pipeline.{name}", value) for name, value in fields.items())

    def other_cuts(self) -> Iterator[Proposal]:
        yield Proposal("even", UNCUT_FIELDS)

    def cut(
        self, plan: ResolvedPlan, ratios: Ratios, limit: int | None, criteria: Criteria, caps: Sequence[int] | None
    ) -> StageLayers | None:
        """Embedding and head have their places, layers are all alike.

        Options of a stage reach from the fewest layers that leave the others no more than they can hold, to the most
        that keep to ``limit``, or to what the fastest cut needs, which is one to be beaten. That more layers never need
        less is used for these two ends only (``tests/search/test_cuts.py`` checks it).
        """
        layers, pp, vpp = plan.model.layers, plan.layout.pp, plan.layout.vpp
        peaks, first = Peaks(plan), fastest(layers, pp, vpp, ratios, True)
        threshold = max(peaks(at, cut) for at, cut in enumerate(first)) if limit is None else limit

        def held(stage: int, count: int) -> tuple[ChunkLayers, ...]:
            return stage_layers(stage, pp, spread(count, vpp, last=stage == pp - 1))

        least = fewest_of(pp, vpp, True)

        tops = [layers] * pp if caps is None else [min(layers, cap) for cap in caps]
        most: list[int] = []
        below = 0  # how far the most that a stage can hold is below its cap
        for stage, top in enumerate(tops):
            if sum(most) + sum(tops[stage:]) < layers:
                return None

            def holds(count: int, stage: int = stage) -> bool:
                return peaks.keep_to(threshold, stage, held(stage, count))

            near = sum(chunk.layers for chunk in first[stage]) if caps is None else top - below
            most.append(most_that(holds, least[stage], top, near))
            below = top - most[-1]
        if sum(most) < layers or any(map(int.__lt__, most, least)):
            return None
        spare = sum(most) - layers
        options = [
            [
                Option(tuple(chunk.layers for chunk in cut), *criteria(peaks(stage, cut), stage_seconds(cut, ratios)))
                for count in range(max(least[stage], most[stage] - spare), most[stage] + 1)
                for cut in (held(stage, count),)
            ]
            for stage in range(pp)
        ]
        chosen = choose(options, layers)
        if chosen is None:
            return None
        return tuple(stage_layers(at, pp, option.chunks) for at, option in enumerate(chosen))


class Peaks:
    """Requested bytes of any stage of a resolved plan, whatever it holds; all layers have the precision of most."""

    def __init__(self, plan: ResolvedPlan) -> None:
        alike = plan.precision.model_copy(update={"first_16bit_layers": 0, "last_16bit_layers": 0})
        self._stages = programs.stages_of(plan.model_copy(update={"precision": alike}), Options())
        self._of = cache(self._computed)
        self._bounds = cache(self._between)

    def __call__(self, stage: int, cut: tuple[ChunkLayers, ...]) -> int:
        return self._of(stage, cut)

    def keep_to(self, limit: int, stage: int, cut: tuple[ChunkLayers, ...]) -> bool:
        """Whether that is ``limit`` at most."""
        bounds = self._bounds(stage, cut)
        if bounds.most <= limit:
            return True
        return bounds.least <= limit and self(stage, cut) <= limit

    def _computed(self, stage: int, cut: tuple[ChunkLayers, ...]) -> int:
        return fold_program(self._program(stage, cut)).peak

    def _between(self, stage: int, cut: tuple[ChunkLayers, ...]) -> Range:
        return between(self._program(stage, cut))

    def _program(self, stage: int, cut: tuple[ChunkLayers, ...]) -> Program:
        return self._stages.program(stage, tuple(_entries(chunk) for chunk in cut))


@lru_cache(maxsize=4096)
def _renumbered(entries: tuple[str, ...]) -> tuple[str, ...]:
    """The same with layers from 0 on, so that chunks with as many are one object."""
    layers = iter(range(len(entries)))
    return tuple([f"layer.{next(layers)}" if name.startswith("layer.") else name for name in entries])


@lru_cache(maxsize=4096)
def _entries(chunk: ChunkLayers) -> tuple[str, ...]:
    return (
        *(("embedding",) if chunk.embedding else ()),
        *(f"layer.{at}" for at in range(chunk.layers)),
        *(("final_norm", "head") if chunk.head else ()),
    )


def between(program: Program) -> Range:
    """Bounds of what a stage of Megatron-Core needs: all that is kept, with the most that passes in flight and one pass
    hold, or the step."""
    order, kept = program.order, program.kept
    assert isinstance(order, MegatronOrder)
    assert kept is not None
    moving = megatron_flight.between(order.schedule, [chunk.passes for chunk in order.chunks], order.sizes)
    if moving is None:
        return Range(0, UNBOUNDED)
    reports = order.schedule.microbatches * order.sizes.report if order.schedule.last else 0
    step = reports + kept.optimizer.peak
    retained, idle, busy = order.carried.net, kept.between.net, kept.during.net
    return Range(
        retained + max(idle, busy + max(moving.least, step)), retained + max(idle, busy + max(moving.most, step))
    )
