"""Megatron-Core in the time of a step."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import inf
from typing import Any

from ...layers.coverage import MEGATRON_CORE, check_covered
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import NO_PASSES, Counted, Options, Passes, joined, regrouped, run_again
from ...layers.tuning import Tuning
from ...layers.work import Exchange, Kernel, Together, size_of
from ...plan.module_precision import names_layers, wide_modules
from ...plan.plan import Recompute, ResolvedPlan
from ...plan.spec import ModelSpec, block_of
from ...search.time.framework import FrameworkTime
from ...search.time.host import TRANSFORMER_ENGINE, Host
from ...search.time.rates import DIVIDED, before
from ...search.time.shape import ITEMSIZE, KINDS, Entries, Wide, Work, kinds_of, named
from ...search.time.updates import Exchange as Exchanged, Replicas, beside
from ...values import replace
from .adapters import tuning_of
from .from_plan import core_shape
from .memory_rules import counts_on_device
from .modules import end_module, layers_module, module_shapes, mtp_module, recomputes_further, stage_entries
from .states import bucket_size

SCATTERED = (1, 13)
"""PyTorch before which a plan's Megatron is that of 2021 and 2022, before Megatron-Core: its pipeline sent a hidden
state in ``tp`` parts (arXiv 2104.04473, section 4.1), and waited for sends between interleaved stages, too."""

NOT_OVERLAPPED = (1, 11)
"""PyTorch before which it is Megatron-LM up to 2.5: the reduction of a column-parallel layer's input gradient was not
yet beside its weight gradient, and the latter was added to the buffer by a kernel of its own."""


def beside_another(layer: Passes, attention: Passes) -> Passes:
    """``layer`` with every exchange between expert-parallel ranks beside what another micro-batch computes meanwhile:
    that of tokens to experts beside experts, that back beside ``attention``, each of the other direction
    (``TransformerLayerSchedulePlan.run``). Passes before the first such pair and behind the last are timed alike."""

    def of(counted: Counted, experts: Together, others: Together) -> Counted:
        made: list[tuple[Kernel, int]] = []
        *_, last = (None, *[one for one, _ in counted if isinstance(one, Exchange) and one.choices[0]])
        for kernel, times in counted:
            if isinstance(kernel, Exchange) and kernel.axis == "ep":
                back = 1 if kernel == last else times // 2
                parts = ((experts, times - back), (others, back))
                made += [(kernel._replace(beside=one), count) for one, count in parts if count]
            else:
                made.append((kernel, times))
        return tuple(made)

    forward, backward = (
        (_alone(Counter(dict(whole)) - Counter(dict(part))), _alone(Counter(dict(part))))
        for whole, part in ((layer.forward, attention.forward), (layer.backward, attention.backward))
    )
    return replace(layer, forward=of(layer.forward, *backward), backward=of(layer.backward, *forward))


def _alone(kernels: Counter[Kernel]) -> Together:
    return Together(tuple((kernel, times) for kernel, times in kernels.items() if not isinstance(kernel, Exchange)))


def _with_ends(shape: CoreShape, *settings: Any) -> Entries:
    """``_entries`` of ``shape``, some of whose layers may keep 16 bits."""
    made = _entries(shape, *settings)
    if not any(shape.sixteen_bit):
        return made
    wide = _entries(replace(shape, low=None, wide=frozenset(), sixteen_bit=(0, 0), layers=0), *settings)
    nothing = dict.fromkeys(("layer", "recomputed", "dense", "dense_recomputed"), NO_PASSES)
    ends = wide.of_layers
    return made._replace(**nothing, kinds=(*made.of_layers, *ends), wide=len(ends))


@lru_cache(maxsize=4096)
def _entries(
    whole: CoreShape,
    gradients: str | None,
    recent: bool,
    full: bool,
    again: bool,
    apart: bool,
    user_buffers: bool,
    tuning: Tuning | None,
) -> Entries:
    """Of all plans whose layers are of one shape and are recomputed in ``full`` or not; ``again``: what predicts
    further tokens is recomputed, too; ``apart``: it is not where the head is."""
    beside = whole.overlap is not None
    whole = replace(
        whole,
        asynchronous=recent,
        gradient_fusion=whole.gradient_fusion and recent,
        overlap=None,
        user_buffers=user_buffers,
    )
    options = Options(counts="later", consumes_gradients=True, summed=gradients, tuning=tuning)
    (shape, ends), spec = module_shapes(whole), whole.spec
    front = replace(shape, recompute_modules=())  # also of the ends before the head

    def layer(shape: CoreShape) -> tuple[Passes, Passes]:
        few, times = shape.fewest_experts if tuning is None else (shape, 1)
        plain = layers_module((replace(few, recompute_modules=()),), options).work
        again = run_again(plain) if full else layers_module((few,), options).work
        if shape.distributes:  # inputs are gathered again
            size = float(size_of(shape.hidden, shape.dtype))
            again = replace(again, backward=(*again.backward, (Exchange("all-gather", size), 1)))
        both = regrouped(plain, times), regrouped(again, times)
        if not beside or shape.experts is None:
            return both
        attention = replace(few, kind="*", experts=None)
        return beside_another(both[0], layers_module((replace(attention, recompute_modules=()),), options).work), (
            beside_another(both[1], layers_module((attention,), options).work)
        )

    embedding, norm = (
        end_module(name, replace(front, experts=None), False, options).work for name in ("embedding", "final_norm")
    )
    head = end_module("head", ends, False, options).work
    within = replace(shape, kind=spec.mtp_pattern)
    further = mtp_module(ends, within, False, options, recomputed=again).work if spec.mtp_layers else NO_PASSES
    if not apart:
        head, further = joined(further, head), NO_PASSES
    if spec.layer_pattern:
        kinds = tuple(
            layer(replace(shape, kind=kind, experts=shape.experts if kind == "E" else None))
            if kind in spec.layer_pattern
            else (NO_PASSES, NO_PASSES)
            for kind in KINDS
        )
        return Entries(embedding, NO_PASSES, NO_PASSES, norm, head, further=further, kinds=kinds)
    if spec.linear_interval:
        kinds = tuple(
            layer(replace(shape, linear=kind[0] == "G", experts=shape.experts if kind[1] == "E" else None))
            if _needed(spec, kind[1])
            else (NO_PASSES, NO_PASSES)
            for kind in kinds_of(spec)
        )
        return Entries(embedding, NO_PASSES, NO_PASSES, norm, head, further=further, kinds=kinds)
    if spec.layer_blocks:
        kinds = tuple(layer(shape.with_block(block_of(text))) for text in kinds_of(spec))
        return Entries(embedding, NO_PASSES, NO_PASSES, norm, head, kinds=kinds)
    dense = layer(replace(shape, experts=None)) if spec.experts and spec.dense_layers else ()
    return Entries(embedding, *layer(shape), norm, head, *(dense or (NO_PASSES, NO_PASSES)), further)


@lru_cache(maxsize=4096)
def _work(entries: tuple[tuple[tuple[str, ...], ...], ...], spec: ModelSpec, recompute: Recompute, wide: Wide) -> Work:
    return tuple(tuple(named(chunk, spec, recompute, wide) for chunk in stage) for stage in entries)


def _needed(spec: ModelSpec, kind: str) -> bool:
    """Whether the model has layers with experts (E), or with an MLP."""
    return spec.experts > 0 if kind == "E" else not spec.experts or bool(spec.dense_layers)


class MegatronTime(FrameworkTime):
    fused_attention = True
    compared = DIVIDED

    def entries(self, plan: ResolvedPlan) -> Entries:
        """Modules in 16 bits are those of every layer."""
        check_covered(plan.model, MEGATRON_CORE, plan.framework)
        patterns = plan.megatron.precision_of or ()
        if names_layers(patterns):
            raise plan.wrong(
                "megatron.precision_of",
                "must not tell layers apart by their numbers where time is asked for, or layouts are searched",
            )
        apart = plan.model.mtp_layers > 0 and any(chunk.further for stage in self.stages(plan) for chunk in stage)
        recent, full = not before(plan, NOT_OVERLAPPED), plan.recompute.mode == "full"
        shape = replace(core_shape(plan), precision_of=(), starts=(), wide=wide_modules(patterns, 0))
        buffers = plan.megatron.tp_comm_overlap
        again = recomputes_further(plan.recompute)
        return _with_ends(shape, plan.precision.gradients, recent, full, again, apart, buffers, tuning_of(plan))

    def host(self, plan: ResolvedPlan) -> Host:
        host = TRANSFORMER_ENGINE if plan.megatron.transformer_impl == "transformer_engine" else Host()
        replays = plan.megatron.cuda_graphs == "full_iteration"
        return host._replace(replays=replays, reads=not plan.experts.pad_to_capacity)

    def rounding(self, plan: ResolvedPlan) -> float:
        """Experts take whole rows each, less than their share by one at most (``Product.regrouped``), and drop such."""
        spec, layout, given = plan.model, plan.layout, plan.experts
        if not spec.experts:
            return 0.0
        if given.imbalance != "balanced" or given.capacity_factor is not None or counts_on_device(plan):
            return 1.0
        divided = layout.cp * layout.tp
        if 2 * plan.batch.seq // divided * spec.expert_top_k % spec.experts == 0:
            return 0.0
        return min(1.0, spec.experts / (plan.batch.seq // divided * spec.expert_top_k * layout.ep))

    def scattered_sends(self, plan: ResolvedPlan) -> bool:
        return super().scattered_sends(plan) or before(plan, SCATTERED)

    def overlapped_sends(self, plan: ResolvedPlan, vpp: int) -> bool:
        return super().overlapped_sends(plan, vpp) and not before(plan, SCATTERED)

    def stages(self, plan: ResolvedPlan) -> Work:
        return _work(stage_entries(plan), plan.model, plan.recompute, plan.precision.wide_layers)

    def gradient_dtype(self, plan: ResolvedPlan) -> str:
        return plan.precision.gradients or "fp32"

    def owners(self, replicas: Replicas) -> int:
        plan = replicas.plan
        return replicas.ranks // plan.megatron.distributed_optimizer_instances if plan.layout.zero else 1

    def expert_owners(self, replicas: Replicas) -> int:
        plan = replicas.plan
        if not plan.layout.zero:
            return 1
        return max(1, replicas.across_experts.ranks // plan.megatron.distributed_optimizer_instances)

    def exposed(self, replicas: Replicas, rank: Exchanged) -> float:
        """Experts' gradients have buckets of their own, on the same links."""
        given = replicas.plan.megatron
        size = inf
        if given.overlap_grad_reduce:  # without, one bucket has all gradients of a kind (``DistributedDataParallel``)
            size = given.bucket_size or bucket_size(replicas.ranks)
            size = rank.trained / given.buckets if given.buckets is not None else size
        reduced, gathered = replicas.exchanged(rank.trained - rank.experts, None, (size, size))
        if rank.experts:
            others = replicas.exchanged(rank.experts, replicas.across_experts, (size, size))
            reduced, gathered = reduced + others[0], gathered + others[1]
        if given.overlap_grad_reduce:
            reduced = beside(replicas.rates, reduced, rank.backward, size / rank.trained)
        if given.overlap_param_gather:
            gathered = beside(replicas.rates, gathered, rank.forward, 0.0)
        return reduced + gathered

    def mixed(self, plan: ResolvedPlan) -> bool:
        return plan.precision.dtype != "fp32"

    def buffer_bytes(self, plan: ResolvedPlan, ranks: int) -> float:
        """The buffer is set to zero, looked through for NaN, and divided by the number of replicas
        (``param_and_grad_buffer.py``, ``reset`` and ``start_grad_sync``)."""
        looks = 1 if plan.megatron.check_for_nan else 0
        divides = 2 if ranks > 1 and not plan.megatron.per_token_loss else 0
        return float(ITEMSIZE[self.gradient_dtype(plan)] * (1 + looks + divides))
