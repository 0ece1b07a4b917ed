"""Megatron-Core in a search: its axes and rules, cuts of layers that are all alike, and bounds of a stage's peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from heapq import heappop, heappush
from typing import Any

from ...layers.autograd import ITEMSIZE
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Options
from ...plan.checks import listed
from ...plan.errors import PlanError
from ...plan.megatron_layout import layout_text
from ...plan.plan import Plan, ResolvedPlan
from ...plan.spec import ModelSpec
from ...schedules import megatron_flight
from ...schedules.megatron_flight import Range
from ...schedules.megatron_fold import MegatronOrder
from ...search.cuts import (
    ChunkLayers,
    Criteria,
    Fields,
    Holds,
    Option,
    Ratios,
    StageLayers,
    best_of,
    fastest,
    fastest_ways,
    held_with,
    layers_of,
    most_held,
    most_that,
    stage_layers,
    stage_of,
    stage_seconds,
)
from ...search.framework import FrameworkSearch, Proposal
from ...search.lower_bounds import (
    UNBOUNDED,
    Beside,
    LayerNeeds,
    LowerBounds,
    Needs,
    Shards,
    StageLoad,
    States,
    at_least,
    loads,
)
from ...search.point import NO_RECOMPUTE, UNCUT_FIELDS, Extra, Point, Recomputing, updated
from ...search.space import Space
from ...search.time import work_of
from ...tape.program import Program, fold_program
from ...values import replace
from . import programs
from .from_plan import rules as rules_of
from .modules import end_module, layer_forward, layers_module, module_shapes, stage_entries
from .notices import LARGE_MASK, unread_mask


def module_sets(plan: ResolvedPlan) -> Iterator[tuple[str, ...]]:
    """Modules whose recompute is worth trying. With experts or latent attention: activations of experts, which
    are large and cheap, where they are in one grouped product; norms and what leads up from lower ranks; and experts
    as a whole. Where all layers are alike: the MLP, and with eager attention its scores, which flash attention does
    not store. Where layers are of several kinds none is named, and Megatron recomputes its own choice."""
    spec = plan.model
    cheap = ("layernorm", *(("mla_up_proj",) if spec.latent_kv_rank else ()))
    cheap += ("gdn_norm_out",) if spec.linear_interval else ()
    if spec.experts:
        if plan.experts.grouped_gemm:
            yield ("moe_act",)
            yield ("moe_act", *cheap)
        yield ("moe", *cheap)
    elif spec.latent_kv_rank or spec.linear_interval:
        yield cheap
    elif _by_kinds(spec):
        return
    elif plan.attention == "flash":
        yield ("mlp",)
    else:
        yield ("core_attn",)
        yield ("core_attn", "mlp")


def first_layers(spec: ModelSpec) -> int | None:
    """Layers without experts that come before those with; ``None`` where some come behind, or other kinds take
    turns."""
    dense = spec.dense_layers if spec.experts else ()
    first = dense == tuple(range(len(dense))) and not (_by_kinds(spec) or spec.nope_interval)
    return len(dense) if first else None


def _by_kinds(spec: ModelSpec) -> bool:
    """Layers are of kinds or sizes that take turns."""
    return bool(spec.layer_pattern or spec.layer_blocks or spec.linear_interval)


NO_MASK = Extra(
    "no attention mask", (("megatron.attention_mask_in_dataloader", False),), lacking="with an attention mask"
)
WORTH_LEAVING_OUT = 1 << 26
"""Bytes of one sequence's mask, of 8,192 tokens, below which a search does not name one more flag."""

LONG_SEQUENCE = 8192
"""Tokens of a sequence up to which tensor parallelism divides latent attention enough."""


NOT_SEARCHED = (
    ("fsdp", "none", "with Megatron-FSDP"),
    ("torch_fsdp", "none", "with PyTorch's FSDP2 in Megatron-Core"),
    ("optimizer_offload", "0", "with states on the host"),
    ("offload_modules", "left out", "with activations on the host"),
    ("offload_layers", "0", "with layers on the host"),
    ("defer_embedding_wgrad", "false", "that defer weight gradients"),
    ("distribute_saved", "false", "with it"),
    ("optimizer_graph", "false", "with it"),
    ("cuda_graphs", "none", "with CUDA graphs"),
)
"""Fields of the section, what each must be in a search, and what layouts it makes otherwise."""


class MegatronSearch(FrameworkSearch):
    chooses_cut = True
    stops_early = shares_shapes = True

    def searched(self, base: Plan) -> bool:
        """Cuts are of layers that are alike, but for the first ones; those of hybrids nobody chooses."""
        known = first_layers(base.model) is not None or _by_kinds(base.model)
        return known and base.megatron.fsdp == base.megatron.torch_fsdp == "none"

    def of(self, plan: Plan) -> FrameworkSearch:
        if not _by_kinds(plan.model):
            return self
        return LINEAR if plan.model.linear_interval else HYBRIDS

    # -- axes and points -----------------------------------------------------------------------------------

    def sizes(self, plan: ResolvedPlan) -> frozenset[str]:
        """Context-parallel sizes with a recipe alone (``te_context``); of models with latent attention and of hybrids,
        whose searches are the largest, for long sequences or where the plan has one."""
        large = plan.model.latent_kv_rank or _by_kinds(plan.model)
        long = plan.batch.seq > LONG_SEQUENCE or plan.layout.cp > 1 or not large
        divides = plan.attention == "flash" and long
        return super().sizes(plan) - (frozenset() if divides else {"cp"})

    def zero(self, plan: ResolvedPlan) -> tuple[int, ...]:
        return (1,) if plan.optimizer.precision_aware or plan.precision.fp8_parameters else (1, 0)

    def recomputing(self, plan: ResolvedPlan) -> tuple[Recomputing, ...]:
        """Of models with experts or latent attention, modules whose recompute costs least for what it saves come first.
        Full recompute is not tried beside layers that predict further tokens, which run again or not by its method."""
        modules = tuple(module_sets(plan)) or ((),)
        beside = plan.experts.overlap_exchange
        full = () if plan.model.mtp_layers or beside else (Recomputing("full"),)
        allowed = [one for one in modules if not (beside and "moe" in one)]
        return NO_RECOMPUTE, *(Recomputing("selective", modules=one) for one in allowed), *full

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

    def free(self, plan: ResolvedPlan) -> tuple[Extra, ...]:
        """Without the data loader's mask where no kernel reads it, as Megatron-Bridge's recipes have it
        (``GPTDatasetConfig.skip_getting_attention_mask_from_dataset``)."""
        return (NO_MASK,) if unread_mask(plan) >= plan.batch.mbs * WORTH_LEAVING_OUT else ()

    def elsewhere(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        if unread_mask(plan) >= LARGE_MASK:
            yield Proposal(NO_MASK.label, dict(NO_MASK.fields))

    def completed(self, base: Plan) -> Plan:
        """States of a precision-aware optimizer are sharded ones, and so are those of parameters in 8 bits."""
        for name, allowed, what in NOT_SEARCHED:
            if getattr(base.megatron, name) not in ("none", None, False):
                raise base.wrong(
                    f"megatron.{name}",
                    f"must be {allowed}: layouts {what} are not searched yet; estimate --vary compares some",
                )
        if not self.searched(base):
            field = "nope_interval" if base.model.nope_interval else "dense_layers"
            wanted = "0" if base.model.nope_interval else "the first ones"
            raise base.wrong(
                f"model.{field}", f"must be {wanted}: other layouts are not searched yet; estimate --vary compares some"
            )
        if base.optimizer.name == "muon":
            raise base.wrong("optimizer.name", "must be adam, adamw or sgd: layouts with Muon are not searched yet")
        if base.layout.zero or not (base.optimizer.precision_aware or base.precision.fp8_parameters):
            return base
        return base.model_copy(update={"layout": updated(base.layout, {"zero": 1})})

    def unrunnable(self, space: Space, tp: int, cp: int, pp: int, vpp: int, microbatches: int) -> str:
        if space.base.experts.overlap_exchange and pp > 1 and vpp == 1:
            return "the exchange of tokens beside another micro-batch needs interleaved stages"
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
        model, way = space.base.model, "cp_communication"
        knows = model.sliding_window is not None or model.attention_sinks  # ``layout_rules._check_context_way``
        if knows and point.cp > 1 and way not in space.base.megatron.model_fields_set:
            fields[f"megatron.{way}"] = "a2a"
        if model.experts:
            fields |= {"layout.ep": point.ep, "layout.etp": point.etp}
        if not point.zero:
            fields |= {"megatron.overlap_param_gather": False, "megatron.distributed_optimizer_instances": 1}
        if not point.zero or point.vpp == 1:
            fields["megatron.gather_in_step"] = False
        if point.vpp == 1:
            fields["pipeline.overlap_p2p_warmup"] = False
        if point.pp == 1:
            fields |= {"megatron.defer_embedding_wgrad": False, "megatron.wgrad_deferral_limit": 0}
        return fields

    def more_recompute(self, plan: ResolvedPlan) -> Iterator[Proposal]:
        for modules in tuple(module_sets(plan)) or (None,):
            yield Proposal(
                "selective recompute" if modules is None else f"recompute of {listed(modules, 'and')}",
                {"recompute.mode": "selective", "recompute.modules": modules},
            )
        most = max(chunk.layers for stage in work_of(plan) for chunk in stage)
        for layers in sorted({max(1, most * eighths // 8) for eighths in range(1, 8)} - {most}):
            fields = {"recompute.mode": "full", "recompute.method": "block", "recompute.layers": layers}
            yield Proposal(f"full recompute of {layers} of {most} layers", fields, degree_of="recomputed layers")

    # -- memory --------------------------------------------------------------------------------------------

    def fullest(self, plan: ResolvedPlan, enough: int | None = None) -> tuple[int, int]:
        """Stages are folded in the order of a bound from above, until no bound is larger than what was found. The first
        stage, which has most in flight, and the last, which has the head, are bounded first. Of stages between them
        that hold the same each has fewer passes in flight than the one before, so that no bound of it is larger
        (``megatron_flight``): it is bounded once that one was folded."""
        stages, whole = programs.stages_of(plan, Options()), stage_entries(plan)
        first = None if stages.job.shape.layers else first_layers(plan.model)
        entries = [tuple([_renumbered(chunk, first) for chunk in stage]) for stage in whole]
        last = len(entries) - 1
        bounded = not plan.experts.overlap_exchange
        alike = {at for at in range(2, last) if bounded and entries[at] == entries[at - 1]}
        ahead: list[tuple[int, int, Program]] = []
        for at in dict.fromkeys((0, last, *range(last))):
            if at not in alike:
                program = stages.program(at, entries[at])
                bounds = between(program)
                if enough is not None and bounds.least > enough:
                    return bounds.least, at
                heappush(ahead, (-bounds.most, at, program))
        largest = fullest = 0
        while ahead and (enough is None or largest <= enough):
            most, at, program = heappop(ahead)
            if -most < largest:
                break
            largest, fullest = max((largest, fullest), (fold_program(program).peak, -at))
            if at + 1 in alike:
                program = stages.program(at + 1, entries[at + 1])
                heappush(ahead, (-between(program).most, at + 1, program))
        return largest, -fullest

    def layer_needs(self, plan: ResolvedPlan) -> LayerNeeds:
        job = programs.stages_of(plan, Options()).job
        options, full = replace(job.options, keeps_input=False, drops_gradient=True), plan.recompute.mode == "full"
        shape, _ = module_shapes(job.shape)

        def of(shape: CoreShape) -> tuple[int, int]:
            few, times = shape.fewest_experts if options.tuning is None else (shape, 1)
            parameters, saved = layer_forward(few, options, full)
            own = sum(one.elements for one in parameters if one.expert)
            experts.append(own * times)
            return sum(one.elements for one in parameters) + own * (times - 1), max(0, saved)

        experts: list[int] = []
        if plan.model.linear_interval:
            elements, saved = zip(*(of(replace(shape, linear=linear)) for linear in (False, True)), strict=True)
            return LayerNeeds(min(elements), min(saved), experts[0])
        whole, dense = of(shape), of(replace(shape, experts=None)) if plan.model.dense_layers else (0, 0)
        return LayerNeeds(*whole, experts[0], *dense)

    def beside_layers(self, plan: ResolvedPlan) -> Beside:
        """Layers of a block that is recomputed may come before others; pieces of passes have peaks of their own."""
        job = programs.stages_of(plan, Options()).job
        shape, ends = module_shapes(job.shape)
        embedding, head = (
            sum(one.elements for one in end_module(name, ends, False, job.options).parameters)
            for name in ("embedding", "head")
        )
        if plan.recompute.method == "block" or plan.experts.overlap_exchange:
            return Beside(embedding, head)
        options, full = replace(job.options, keeps_input=False, drops_gradient=True), plan.recompute.mode == "full"
        few, _ = shape.fewest_experts
        layer = layers_module((few,), options, recomputed=full)
        return Beside(embedding, head, min(one.backward_fold.peak for one in (layer.first, layer.steady)))

    def states(self, plan: ResolvedPlan) -> States:
        rules = rules_of(plan)
        if plan.lora.rank is not None:  # of frozen parameters, as nearly all are: no less of others
            return States(1 if rules.low is not None else ITEMSIZE[rules.dtype], 0)
        in_low = rules.low is not None and rules.low.parameters
        whole = (0 if in_low else ITEMSIZE[rules.dtype]) + ITEMSIZE[rules.gradients]
        divided = (rules.main_size if rules.mixed else 0) + sum(ITEMSIZE[dtype] for _, dtype in rules.moments)
        return States(whole, divided, rules.copied_size) if rules.distributed else States(whole + divided, 0)

    # -- cuts ----------------------------------------------------------------------------------------------

    def cut_fields(self, cut: StageLayers) -> Fields:
        if not cut:
            return ()
        counts = {chunk.layers for stage in cut for chunk in stage}
        chosen = None if len(counts) == 1 else layout_text([[chunk.layers for chunk in stage] for stage in cut])
        none = dict.fromkeys(("first_layers", "last_layers", "layout"), None) | {"count_embedding": False}
        fields = {**none, "count_loss": False, "layout": chosen}
        return tuple((f"pipeline.{name}", value) for name, value in fields.items())

    def other_cuts(self) -> Iterator[Proposal]:
        yield Proposal("even", UNCUT_FIELDS)

    def cut(
        self, plan: ResolvedPlan, ratios: Ratios, limit: int | None, criteria: Criteria, holds: Holds | None
    ) -> StageLayers | None:
        """Embedding and head have their places, layers are all alike.

        Options of a stage reach from the fewest layers that leave the others no more than they can hold, to the most
        that keep to ``limit``, or to what the fastest cut needs, which is one to be beaten. That more layers never need
        less is used for these two ends only (``tests/search/test_cuts.py`` checks it).
        """
        layers, pp, vpp = plan.model.layers, plan.layout.pp, plan.layout.vpp
        peaks, first = Peaks(plan), fastest(layers, pp, vpp, ratios, True)
        threshold = max(peaks(at, cut) for at, cut in enumerate(first)) if limit is None else limit
        starts: Sequence[int] | Holds = layers_of(first) if holds is None else holds

        def options(dense: tuple[int, ...]) -> list[list[Option]] | None:
            return self._options(peaks, dense, (layers, pp, vpp, threshold), starts, ratios, criteria)

        ways = fastest_ways(layers, (pp, vpp, True), ratios)
        if limit is None:  # the largest cost is one of bytes
            ways = [(0.0, dense) for _, dense in ways]
        return best_of(layers, pp, ways, options)

    @staticmethod
    def _options(
        peaks: Peaks,
        dense: tuple[int, ...],
        sizes: tuple[int, int, int, int],
        starts: Sequence[int] | Holds,
        ratios: Ratios,
        criteria: Criteria,
    ) -> list[list[Option]] | None:
        """Of every stage, with the model's first layers as ``dealt``. ``sizes``: layers, stages, chunks and bytes to
        keep to; ``starts``: where the most that a stage can hold is looked for, or what bounds it."""
        layers, pp, vpp, threshold = sizes

        least, tops = held_with(dense, pp, vpp, True, layers)
        if callable(starts):
            found = most_held(dense, (pp, vpp, True), layers, starts)
            if found is None:
                return None
            tops = found
        most: list[int] = []
        below = 0  # how far the most that a stage can hold is below its cap
        for stage, top in enumerate(tops):
            if sum(most) + sum(tops[stage:]) < layers:
                return None

            def holds(count: int, stage: int = stage) -> bool:
                return peaks.keep_to(threshold, stage, stage_of(stage, pp, vpp, count, dense))

            near = top - below if callable(starts) else starts[stage]
            most.append(most_that(holds, least[stage], top, near))
            below = top - most[-1]
        if sum(most) < layers or any(map(int.__lt__, most, least)):
            return None
        spare = sum(most) - layers
        return [
            [
                Option(tuple(chunk.layers for chunk in cut), *criteria(peaks(stage, cut), stage_seconds(cut, ratios)))
                for count in range(max(least[stage], most[stage] - spare), most[stage] + 1)
                for cut in (stage_of(stage, pp, vpp, count, dense),)
            ]
            for stage in range(pp)
        ]


class HybridSearch(MegatronSearch):
    """A hybrid's stages have equally many layers, or those that its pattern says, whatever their kinds: nobody chooses
    cuts. Of a layout that is too large the first stage that shows it is folded alone (``fullest``)."""

    chooses_cut = False

    def check_cut(self, plan: ResolvedPlan) -> None:
        stage_entries(plan)

    def other_cuts(self) -> Iterator[Proposal]:
        return iter(())

    def lower_bounds(self, space: Space) -> LowerBounds:
        return _OfStates(space)


class LinearSearch(HybridSearch):
    """Layers with attention and gated delta nets by turns: bounds are those of as many of the one that needs least."""

    @property
    def bounds_layers(self) -> bool:
        return True

    def lower_bounds(self, space: Space) -> LowerBounds:
        return _OfLeast(space)


class _OfStates(LowerBounds):
    """States alone, of all layers whatever their kinds: the fullest stage keeps no less than the mean of all."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self._elements: dict[object, tuple[int, int]] = {}

    @cached_property
    def _needs(self) -> Needs:
        return Needs(self.space)

    def least(self, point: Point, enough: int) -> int:
        return int(self._mean(point, self._needs.states(point)))

    def saved(self, point: Point) -> float:
        try:
            states = self._needs.states(point)
            return self._mean(point, states.saved) if states.copied else 0.0
        except PlanError:
            return 0.0  # as in ``__call__``

    def _mean(self, point: Point, states: States) -> float:
        key = point.tp, point.ep, point.etp
        if key not in self._elements:
            alone = point._replace(mbs=1, recompute=NO_RECOMPUTE, zero=self.space.least_zero, extras=())
            (program,) = programs.programs(self.space.alone(alone), Options())
            tensors = program.parameter_tensors()
            shared, own = (sum(one.elements for one in tensors if one.expert is expert) for expert in (False, True))
            self._elements[key] = shared, own
        (shared, own), shards = self._elements[key], Shards.of(point)
        return (states.of(shared, shards.layers) + states.of(own, shards.experts)) / point.pp


class _OfLeast(LowerBounds):
    """As if all layers were of the kind that needs least."""

    @cached_property
    def _needs(self) -> Needs:
        return Needs(self.space)

    def __call__(self, point: Point, enough: int = UNBOUNDED) -> int:
        """Layers lie evenly, but where the plan says otherwise of as many stages and chunks."""
        layers, rest = divmod(self.space.base.model.layers, point.pp * point.vpp)
        layout, load = self.space.base.layout, self._needs.load(point)
        if rest or (layout.pp, layout.vpp) == (point.pp, point.vpp):
            return int(self._needs.at_best(point))
        return at_least(load, _even(point.pp, point.vpp, layers, load.microbatches))


@lru_cache(maxsize=4096)
def _even(pp: int, vpp: int, layers: int, microbatches: int) -> tuple[StageLoad, ...]:
    """Of stages whose every chunk has so many ``layers``."""
    return loads(tuple(stage_layers(stage, pp, (layers,) * vpp) for stage in range(pp)), microbatches)


HYBRIDS, LINEAR = HybridSearch(), LinearSearch()


REFUSED = 1 << 60
"""Bytes of a stage that is refused though the plan's own are not, as one without an adapter: no GPU has so many."""


class Peaks:
    """Requested bytes of any stage of a resolved plan, whatever it holds; all layers have the precision of most."""

    def __init__(self, plan: ResolvedPlan) -> None:
        alike = plan.precision.model_copy(update={"first_16bit_layers": 0, "last_16bit_layers": 0})
        self._stages = programs.stages_of(plan.model_copy(update={"precision": alike}), Options())
        self._has_mtp = plan.model.mtp_layers > 0
        self._first = first_layers(plan.model) or 0
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
        try:
            return fold_program(self._program(stage, cut)).peak
        except PlanError:
            return REFUSED

    def _between(self, stage: int, cut: tuple[ChunkLayers, ...]) -> Range:
        try:
            return between(self._program(stage, cut))
        except PlanError:
            return Range(REFUSED, REFUSED)

    def _program(self, stage: int, cut: tuple[ChunkLayers, ...]) -> Program:
        return self._stages.program(stage, tuple(_entries(chunk, self._has_mtp, self._first) for chunk in cut))


@lru_cache(maxsize=4096)
def _renumbered(entries: tuple[str, ...], first: int | None) -> tuple[str, ...]:
    """The same with layers from 0 on, or behind the ``first`` ones, which are of another kind, so that chunks with as
    many are one object; ``None`` where kinds take turns."""
    if first is None:
        return entries
    layers = [int(name.removeprefix("layer.")) for name in entries if name.startswith("layer.")]
    dense = sum(layer < first for layer in layers)
    numbers = iter(_numbers(len(layers), dense, first))
    return tuple([f"layer.{next(numbers)}" if name.startswith("layer.") else name for name in entries])


def _numbers(layers: int, dense: int, first: int) -> list[int]:
    """Of so many layers, the first ``dense`` of which are among the model's ``first``."""
    return [*range(dense), *range(first, first + layers - dense)]


@lru_cache(maxsize=4096)
def _entries(chunk: ChunkLayers, has_mtp: bool, first: int) -> tuple[str, ...]:
    return (
        *(("embedding",) if chunk.embedding else ()),
        *(f"layer.{at}" for at in _numbers(chunk.layers, chunk.dense, first)),
        *(("final_norm",) if chunk.final_norm else ()),
        *((*(("mtp",) if has_mtp else ()), "head") if chunk.head else ()),
    )


def between(program: Program) -> Range:
    """Bounds of what a stage of Megatron-Core needs: all that is kept, with the most that passes in flight and one pass
    hold, or the step."""
    order, kept = program.order, program.kept
    assert isinstance(order, MegatronOrder)
    assert kept is not None
    if order.schedule.beside:  # folded at once: of pieces of passes there are no bounds
        peak = fold_program(program).peak
        return Range(peak, peak)
    moving = megatron_flight.between(order.schedule, [chunk.passes for chunk in order.chunks], order.sizes)
    if moving is None:
        return Range(0, UNBOUNDED)
    reports = order.schedule.microbatches * order.sizes.report if order.schedule.last else 0
    step = reports + kept.optimizer.peak
    retained, idle, busy = order.carried.net, kept.between.net, kept.during.net
    return Range(
        retained + max(idle, busy + max(moving.least, step)), retained + max(idle, busy + max(moving.most, step))
    )
