"""Other plans beside an answer: the smallest changes that make one fit, and other cuts of the same layout.

Each change is of one thing, with the bytes that it gains and the seconds that it loses. Cuts are those that a
framework's own methods make: ``estimate --partition METHOD`` gives the same bytes.

Single changes of a plan that may make it need less: what to try, before anything is folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..device.gpus import GPUS
from ..device.measured import NOTHING, Measured
from ..estimate import Reading, estimate, fold, judged_ends
from ..frameworks import framework
from ..plan.errors import PlanError
from ..plan.lora import ALL_LINEAR, default_targets, last_names
from ..plan.loss_checks import FUSED
from ..plan.plan import Plan, ResolvedPlan
from ..plan.releases import takes_package
from ..plan.resolve import resolve
from ..plan.tuning_checks import is_tuned
from ..result import Verdict
from ..values import dataclass
from .candidates import Clock, chunks_of
from .cuts import fields_of, fitting, smallest
from .framework import Proposal, divisors
from .point import UNCUT_FIELDS, Point, Recomputing, changed
from .result import UNTIMED, Change, Suggestion
from .search import Report
from .space import space_of
from .time import is_timed, lacks_network, ranking_seconds, ranking_time, work_of

OTHER_NUMBERS = "training gives other numbers"
"""What a change costs that keeps states in fewer bits, or approximates."""
LORA_RANK = 16
"""The rank of the adapters that are proposed."""


def point_of(plan: ResolvedPlan) -> Point:
    """Where a resolved plan lies in a space of layouts."""
    layout, recompute = plan.layout, plan.recompute
    done = Recomputing(recompute.mode, recompute.method, recompute.layers, recompute.modules or ())
    experts = (layout.ep, layout.etp or layout.tp) if plan.model.experts else (1, 1)
    dense = layout.tp, layout.cp, layout.pp, layout.vpp, layout.dp or 1
    return Point(*dense, *experts, layout.zero, plan.batch.mbs, done)


def proposals(given: Suggestion, limit: int) -> Iterator[Proposal]:
    """What to try."""
    plan = resolve(given.plan)
    search = framework(plan.framework).search
    yield from _smaller_batches(plan)
    if given.worst_moment[0] == "evaluation":
        yield Proposal("no evaluation", {"trainer.evaluation_mbs": 0}, "training is not evaluated")
    yield from _more_recompute(plan)
    yield from _more_sharding(plan)
    yield from search.elsewhere(plan)
    yield from _other_cuts(plan, limit)
    for group in search.extras(plan):
        for extra in group:
            yield Proposal(extra.label, dict(extra.fields), "" if extra.keeps_numerics else OTHER_NUMBERS)
    yield from _other_losses(plan)
    yield from _fine_tuning(plan)
    if plan.attention == "eager" and search.flash_attention:
        yield Proposal("flash attention", {"attention": "flash"})
    if plan.masked_kernel and not plan.padded and takes_package(plan):
        yield Proposal("flash_attention_2 (flash-attn, which has no masks)", {"attention": "flash_attention_2"})
    yield from _expandable_segments(plan)
    yield from _larger_gpus(plan, given.needs)


def _expandable_segments(plan: ResolvedPlan) -> Iterator[Proposal]:
    """Where the plan says nothing of PyTorch's allocator."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in plan.environment and framework(plan.framework).search.expandable_segments:
        environment = {**plan.environment, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        yield Proposal("expandable segments", {"environment": environment})


def _smaller_batches(plan: ResolvedPlan) -> Iterator[Proposal]:
    mbs, evaluated = plan.batch.mbs, plan.trainer.evaluation_mbs or 1
    for size in reversed(divisors(mbs)[:-1]):
        fields = {"batch.mbs": size, "batch.gbs": plan.batch.gbs, "batch.accumulation": None}
        yield Proposal(f"micro-batch {mbs} → {size}", fields, degree_of="micro-batch")
    for size in reversed(divisors(evaluated)[:-1]):
        what = f"evaluation batch {evaluated} → {size}"
        yield Proposal(what, {"trainer.evaluation_mbs": size}, degree_of="evaluation batch")


def _more_recompute(plan: ResolvedPlan) -> Iterator[Proposal]:
    mode = plan.recompute.mode
    if mode == "none":
        yield from framework(plan.framework).search.more_recompute(plan)
    if mode != "full":
        fields = {"recompute.mode": "full", "recompute.method": "uniform", "recompute.layers": None}
        yield Proposal("full recompute", {**fields, "recompute.modules": None})


def _other_losses(plan: ResolvedPlan) -> Iterator[Proposal]:
    """Losses that never hold all logits, where the framework has them and the plan has none; Liger's is an extra."""
    if plan.loss.kind == "plain" and not plan.loss.logits_to_keep:
        for kind, what in (("chunked", "loss in chunks"), ("cut", "Apple's cut cross entropy")):
            if kind in FUSED and kind in framework(plan.framework).supports.losses:
                yield Proposal(what, {"loss.kind": kind})


def _fine_tuning(plan: ResolvedPlan) -> Iterator[Proposal]:
    """Adapters in place of training all, where the plan is of fine-tuning and the framework has them: parts are frozen
    already, transformers' Trainer runs, or one GPU holds transformers' own code, on which few people pretrain."""
    own = framework(plan.framework)
    if not own.runs_transformers(plan) or "lora" not in own.supports.sections:
        return
    if not (is_tuned(plan) or plan.trainer.loop == "transformers" or plan.hardware.gpus == 1):
        return
    rank: dict[str, Any] = {"lora.rank": LORA_RANK}
    named = ""
    if default_targets(plan.model) is None:
        targets = last_names(plan.model) if plan.model.experts else (ALL_LINEAR,)
        rank["lora.targets"], named = tuple(targets), f" (--lora-targets {','.join(targets)})"
    alone = f"only adapters of rank {plan.lora.rank or LORA_RANK}{named if plan.lora.rank is None else ''} are trained"
    if plan.lora.rank is None:
        yield Proposal("LoRA", rank, alone)
    if plan.quantisation.kind == "none":
        quantised = {"quantisation.kind": "nf4"}
        what, fields = ("QLoRA", {**rank, **quantised}) if plan.lora.rank is None else ("QLoRA", quantised)
        yield Proposal(what, fields, f"{alone}, on weights of 4 bits")


def _more_sharding(plan: ResolvedPlan) -> Iterator[Proposal]:
    """Other sizes leave another number of replicas: the batch of a step is kept, as work and time are compared."""
    layout, own = plan.layout, framework(plan.framework)
    batch = {"batch.gbs": plan.batch.gbs, "batch.accumulation": None}
    dp = layout.dp or 1
    for zero in range(layout.zero + 1, max(own.supports.zero) + 1):
        if dp * layout.cp > 1:
            yield Proposal(own.zero_words(zero), {"layout.zero": zero})
    shards_sequence = own.search.chooses_cut and own.supports.sequence_parallel
    for name in ("tp", "pp", "cp") if own.search.chooses_cut else ():
        size, gpus = 2 * getattr(layout, name), plan.hardware.gpus
        if gpus is not None and dp % 2:  # replicas cannot be fewer
            gpus *= 2
        if name in own.supports.sizes and (dp % 2 == 0 or gpus is not None):
            fields = {f"layout.{name}": size, "layout.dp": None, **UNCUT_FIELDS, **batch, "hardware.gpus": gpus}
            if name == "tp" and shards_sequence:
                fields["layout.sequence_parallel"] = True
            ranks = layout.tp * layout.cp * (dp + dp % 2 * dp)
            if name == "tp" and plan.model.experts and ranks % (layout.ep * size):
                fields["layout.etp"] = layout.etp  # experts fill the ranks, and are not divided like the layers around
            more, costs = (f" on {gpus:,} GPUs", "twice the GPUs") if dp % 2 else ("", "")
            yield Proposal(f"{name} {size // 2} → {size}{more}", fields, costs)
    yield from _experts(plan)
    if layout.tp > 1 and not layout.sequence_parallel and shards_sequence:
        yield Proposal("sequence parallelism", {"layout.sequence_parallel": True})
    if plan.hardware.gpus is not None and "dp" in own.supports.sizes:
        gpus = 2 * plan.hardware.gpus
        fields = {"hardware.gpus": gpus, "layout.dp": None, **batch}
        yield Proposal(f"{gpus:,} GPUs", fields, "twice the GPUs")


def _experts(plan: ResolvedPlan) -> Iterator[Proposal]:
    """Experts on more ranks, and no more tokens for any than the mean, where some may get more."""
    ep, given = plan.layout.ep, plan.experts
    if plan.model.experts and plan.model.experts % (2 * ep) == 0:
        yield Proposal(f"ep {ep} → {2 * ep}", {"layout.ep": 2 * ep})
    if plan.model.experts and given.imbalance != "balanced" and given.capacity_factor is None:
        yield Proposal(
            "a capacity of 1 (tokens beyond it are dropped)", {"experts.capacity_factor": 1.0}, OTHER_NUMBERS
        )


def _other_cuts(plan: ResolvedPlan, limit: int) -> Iterator[Proposal]:
    search = framework(plan.framework).search.of(plan)
    if not search.chooses_cut or plan.layout.pp == 1 or not search.searched(plan):
        return
    point = point_of(plan)
    ratios = Clock(space_of(plan, plan, {})).ratios(point)
    for what, cut in (
        ("the fastest cut that fits", fitting(plan, ratios, limit)),
        ("the cut that needs least", smallest(plan, ratios)),
    ):
        if cut is not None:
            yield Proposal(what, dict(fields_of(plan.framework, cut)))


def _larger_gpus(plan: ResolvedPlan, needs: int) -> Iterator[Proposal]:
    """The smallest GPU of a data centre on which the plan may fit, where the capacity is the table's."""
    name = plan.hardware.gpu
    if name is None or plan.hardware.capacity != GPUS[name].process_bytes:
        return
    runs_cuda, gpus = GPUS[name].compute_capability is not None, plan.hardware.gpus
    larger = [
        gpu
        for gpu in GPUS.values()
        if gpu.process_bytes >= needs
        and not gpu.name.startswith("rtx")
        and (gpu.compute_capability is not None) == runs_cuda
        and is_timed(gpu.name) == is_timed(name)
        and lacks_network(plan, gpus, gpu.name) == lacks_network(plan, gpus)
    ]
    if larger:
        gpu = min(larger, key=lambda gpu: gpu.process_bytes)
        yield Proposal(gpu.name, {"hardware.gpu": gpu.name, "hardware.capacity": None}, "another GPU")


def stated(base: Plan) -> Suggestion:
    """A plan as it is, before the allocator is replayed. ``PlanError`` where it cannot run."""
    plan = resolve(base)
    requested, stage = framework(plan.framework).search.fullest(plan)
    if not plan.model.has_sizes and not framework(plan.framework).search.searched(base):
        return Suggestion(point_of(plan), (), base, requested, stage, UNTIMED)
    step = ranking_time(plan)
    return Suggestion(point_of(plan), chunks_of(work_of(plan)), base, requested, stage, step.total, step=step)


def replayed(suggestion: Suggestion, known: Measured = NOTHING) -> Suggestion:
    """With the verdict on the fullest stage and those at the ends, or on all where those are few."""
    plan = resolve(suggestion.plan)
    if framework(plan.framework).search.chooses_cut:
        return suggestion.replayed(judged_ends(plan, suggestion.fullest, known))
    whole = estimate(suggestion.plan, known)
    return suggestion.replayed(Reading(whole.peak, whole.worst, whole.judged))


def measured(base: Plan, known: Measured = NOTHING) -> Suggestion:
    """A plan as it is, with its verdict. ``PlanError`` where it cannot run."""
    return replayed(stated(base), known)


def without_retries(retrying: Suggestion, known: Measured = NOTHING) -> Suggestion | None:
    """A layout that fits with retries alone, with expandable segments, if those end all retries."""
    for proposal in _expandable_segments(resolve(retrying.plan)):
        try:
            after = measured(changed(retrying.plan, proposal.fields), known)
        except PlanError:
            return None
        if after.judged.verdict is Verdict.FITS:
            return after
    return None


def changes_of(
    given: Suggestion, limit: int, fixed: Mapping[str, object], report: Report, known: Measured = NOTHING
) -> list[Change]:
    """Single changes of ``given`` that need less, or fit; those that fit first, and of these the fastest. Of degrees
    the least that fits without a retry, or the most. What is ``fixed`` stays."""
    found: list[Change] = []
    of_degree: dict[str, Change] = {}
    proposed = [one for one in proposals(given, limit) if not one.fields.keys() & fixed.keys()]
    for at, one in enumerate(proposed):
        report("changes that could help", at, len(proposed))
        less = of_degree.get(one.degree_of)
        if less is not None and less.suggestion.is_safe and not less.suggestion.judged.retries:
            continue  # less is enough
        base = changed(given.plan, one.fields)
        try:
            after = measured(base, known)
        except PlanError:
            continue
        gained, lost = given.needs - after.needs, after.seconds - given.seconds
        if gained > 0 or after.fits:
            change = Change(one.what, tuple(one.fields.items()), after, gained, lost, after.fits)
            if one.degree_of:
                of_degree[one.degree_of] = change
            else:
                found.append(change)
    return sorted((*found, *of_degree.values()), key=_smallest_first)


def _smallest_first(change: Change) -> tuple[object, ...]:
    """What fits first; other hardware behind the same; then the fastest, or what gains most."""
    buys = any(path.startswith("hardware.") and path != "hardware.gpus" for path, _ in change.fields)
    return not change.fits, buys, change.lost if change.fits else -change.gained, -change.gained


# -- other cuts --------------------------------------------------------------------------------------------

LEAST = "least memory"
"""What the search's own cut by memory is called, where the proposed one is faster and needs more."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to cut the recommended layout, and what comes of it."""

    name: str
    requested: int | None
    """Bytes of its fullest stage; ``None`` where the method cannot make a cut of it."""
    fullest: int | None
    seconds: float | None
    problem: str = ""
    """Why it cannot."""


def methods_of(suggestion: Suggestion) -> tuple[Method, ...]:
    """The cut of ``suggestion``, then others of its layout; empty where there is nothing to cut."""
    plan = suggestion.plan
    if len(suggestion.cut) < 2:
        return ()
    proposed = Method("proposed", suggestion.requested, suggestion.fullest, suggestion.seconds)
    others = (_measured(one.what, plan, one.fields) for one in _ways(suggestion))
    return (proposed, *(one for one in others if one.name != LEAST or one.requested != proposed.requested))


def _ways(suggestion: Suggestion) -> Iterator[Proposal]:
    """Ways to cut, by their names."""
    least = _least(suggestion)
    if least is not None:
        yield Proposal(LEAST, least)
    yield from framework(suggestion.plan.framework).search.of(suggestion.plan).other_cuts()


def _least(suggestion: Suggestion) -> Mapping[str, Any] | None:
    """The cut whose fullest stage needs least, if it is another one."""
    resolved = resolve(suggestion.plan)
    if not framework(resolved.framework).search.of(resolved).chooses_cut:
        return None
    ratios = Clock(space_of(suggestion.plan, resolved, {})).ratios(suggestion.point)
    cut = smallest(resolved, ratios)
    return None if cut is None or cut == suggestion.cut else dict(fields_of(resolved.framework, cut))


def _measured(name: str, plan: Plan, fields: Mapping[str, Any]) -> Method:
    try:
        resolved = resolve(changed(plan, fields))
        peaks = [folded.peak for folded in fold(resolved)]
        return Method(name, max(peaks), peaks.index(max(peaks)), ranking_seconds(resolved))
    except PlanError as error:
        return Method(name, None, None, None, f"{error.field}: {error.problem}")
