"""From a plan to a report: what every stage needs, at which moment, and what for.

A framework writes one program per stage; its fold gives the requested bytes and where they peak; the
allocator's replay gives allocated and reserved; facts about driver and libraries give the device.

Whether a rank fits into its device is decided in ``verdict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import hypot
from typing import TYPE_CHECKING

from .allocator.caching import AllocatorSettings
from .allocator.replay import Replayed, replay
from .assumptions import assumptions
from .caches import begin_plan
from .device.facts import Cause
from .device.gpus import threads_of
from .device.measured import (
    NOTHING,
    Measured,
    all_known,
    beyond,
    causes,
    held_workspaces,
    outside_assumptions,
    outside_range,
    reading_warnings,
    taken_assumptions,
    takes_oldest,
    torch_version,
)
from .frameworks import framework
from .layers.module import Options
from .notices import warnings
from .plan.environment import OF_ALLOCATOR
from .plan.errors import PlanError
from .plan.plan import Plan, ResolvedPlan
from .plan.resolve import resolve
from .plan.sizes import headroom_bytes
from .plan.traced_spec import TracedSpec
from .result import Estimate, Judged, ModuleTape, Notice, Peak, StageEstimate, Verdict, worst, worst_moment
from .tape.events import Hold
from .tape.program import Folded, Program, fold_evaluation, fold_program, ranks_on_node
from .values import NamedTuple, replace
from .verdict import Replays, evaluation_peak, judge

if TYPE_CHECKING:
    from .allocator.timeline import Line, Timeline


NOT_JUDGED = Judged()
LARGEST_RANK = 1 << 47
"""Bytes of tensors on one rank. The replay numbers four times as many addresses, because segments come to
more than the tensors in them."""


def programs_of(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """What every stage of a resolved plan does."""
    if isinstance(plan.model, TracedSpec):
        return framework(plan.framework).running.learnt_programs(plan, options)
    return framework(plan.framework).programs(plan, options)


def check(plan: Plan) -> ResolvedPlan:
    """``plan`` with every default filled in. ``PlanError`` where ``estimate`` would refuse it."""
    plan = resolve(plan)
    _check_addresses(plan, (folded.peak for folded in fold(plan)))
    return plan


MASKS_FIRST = (1, 11)
"""PyTorch with ``native_dropout_cuda`` (pull request 63937); before, ``fused_dropout_cuda`` makes the mask last."""


def kernel_programs(plan: ResolvedPlan) -> tuple[Program, ...]:
    """``programs_of`` with what kernels allocate inside on the plan's GPU."""
    gpu = plan.hardware.gpu
    threads = threads_of(gpu) if gpu is not None else 0
    masks_first = torch_version(plan) >= MASKS_FIRST
    return programs_of(plan, Options(kernel_workspaces=True, threads=threads, masks_first=masks_first))


def fold(plan: ResolvedPlan) -> tuple[Folded, ...]:
    """Requested bytes of every stage of a resolved plan: what a search evaluates."""
    return tuple(fold_program(program) for program in programs_of(plan, Options()))


def estimate(
    plan: Plan, known: Measured = NOTHING, stage: int | None = None, replays: Replays | None = None
) -> Estimate:
    """The whole report, with what is ``known`` of the user's own GPUs; of one ``stage`` alone where that is named.
    ``PlanError`` where the plan contradicts itself or is not modelled."""
    begin_plan()
    plan = resolve(plan)
    programs = programs_of(plan, Options())
    own = programs if stage is None else (programs[stage],)
    folds = [fold_program(program) for program in own]
    _check_addresses(plan, (folded.peak for folded in folds))  # kernels take a part of what they need
    every = kernel_programs(plan), evaluation_programs(plan, programs)
    with_workspaces, evaluated = every if stage is None else [(found[stage],) for found in every]
    settings, workspaces = allocator_settings(plan), held_workspaces(plan, known)
    replays = Replays() if replays is None else replays
    replayed = replays.replayed(with_workspaces, settings, workspaces)
    _check_addresses(plan, (max(one.allocated, one.reserved) for one in replayed))
    reserved = [
        _reserved(program, one, settings, workspaces) for program, one in zip(with_workspaces, replayed, strict=True)
    ]
    stages = tuple(
        _stage(plan, known, replays, *of_stage)
        for of_stage in zip(own, with_workspaces, folds, replayed, reserved, evaluated, strict=True)
    )
    capacity = plan.hardware.capacity
    headroom = headroom_bytes(plan.headroom, capacity)
    notices = (*warnings(plan, programs), *reading_warnings(plan, stages), *_moment_warnings(plan, stages))
    taken = (*taken_assumptions(plan, known, stages), *assumptions(plan), *outside_assumptions(plan, stages))
    return Estimate(plan, capacity, headroom, stages, notices, taken)


def evaluation_programs(plan: ResolvedPlan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """``programs``, or those with evaluation's own batch size."""
    mbs, batch = plan.trainer.evaluation_mbs, plan.batch
    if not mbs or mbs == batch.mbs:
        return programs
    if fold_evaluation(programs[0]) is None:
        raise plan.wrong(
            "trainer.evaluation_mbs", "must be left out: evaluation in pipelines of torch.distributed is not modelled"
        )
    visible = plan.hardware.gpus if batch.multiply_by_visible_gpus else 1
    changed = {"mbs": mbs, "gbs": mbs * (visible or 1) * plan.layout.dp, "accumulation": None}
    return programs_of(plan.model_copy(update={"batch": batch.model_copy(update=changed)}), Options())


def _check_addresses(plan: ResolvedPlan, readings: Iterable[int]) -> None:
    """``PlanError`` where a rank needs more bytes than ``LARGEST_RANK``."""
    peak = max(readings)
    if peak > LARGEST_RANK:
        raise plan.wrong(
            "batch.mbs",
            f"needs {peak >> 40:,} TiB on one rank; memplan supports at most {LARGEST_RANK >> 40} TiB per rank",
        )


def _judged(
    plan: ResolvedPlan,
    known: Measured,
    program: Program,
    replayed: Replayed,
    outside: Sequence[Cause],
    evaluated: Program,
    replays: Replays,
    *,
    tells_tight: bool = True,
    tells_retries: bool = True,
) -> Judged:
    """The verdict on a stage; ``program`` with its kernels' workspaces, ``outside`` what is not the allocator's."""
    capacity = plan.hardware.capacity
    if capacity is None:
        return NOT_JUDGED
    return judge(
        program,
        replayed,
        evaluated if plan.trainer.evaluated else None,
        outside_range(outside),
        all_known=all_known(outside),
        capacity=capacity,
        headroom=headroom_bytes(plan.headroom, capacity),
        settings=allocator_settings(plan),
        workspaces=held_workspaces(plan, known),
        tells_tight=tells_tight,
        tells_retries=tells_retries,
        replays=replays,
    )


def detail(plan: Plan, stage: int) -> tuple[ModuleTape, ...]:
    """The tape of one micro-batch through ``stage``, module by module."""
    programs = programs_of(resolve(plan), Options())
    if not 0 <= stage < len(programs):
        raise PlanError("--detail", stage, f"must be a stage from 0 to {len(programs) - 1}")
    spans = programs[stage].spans
    forward = [ModuleTape(name, "forward", span.module.first.forward) for span in spans for name in span.names]
    ended = [ModuleTape(name, "forward", span.module.first.end) for span in spans for name in span.names]
    backward = [
        ModuleTape(name, "backward", span.module.first.backward)
        for span in reversed(spans)
        for name in reversed(span.names)
    ]
    reduced = [one for chunk in programs[stage].order.chunks for one in chunk.hooks.get("reduce", ())]
    reduce = [ModuleTape(one.name, "reduce", one.events) for one in reduced]
    step = ModuleTape("optimizer", "step", programs[stage].step + programs[stage].late_step)
    return tuple(tape for tape in (*forward, *ended, *backward, *reduce, step) if tape.events)


def timelines(
    estimated: Estimate, stages: Iterable[int] = (), known: Measured = NOTHING, *, contents: bool = True
) -> Iterator[Timeline]:
    """Event by event what ``stages`` of an estimate hold, or all of them; with the ``contents`` of their peaks."""
    from .allocator.timeline import timeline

    plan = estimated.plan
    settings, workspaces = allocator_settings(plan), held_workspaces(plan, known)
    programs = kernel_programs(plan)
    for at in stages or range(len(programs)):
        peak = estimated.stages[at].breakdown if contents else None
        yield timeline(programs[at], settings, workspaces, peak)


def lines(estimated: Estimate, stages: Iterable[int], known: Measured = NOTHING) -> Iterator[Line]:
    """How many bytes ``stages`` of an estimate hold through an iteration, whatever they are."""
    from .allocator.timeline import line

    plan = estimated.plan
    settings, workspaces = allocator_settings(plan), held_workspaces(plan, known)
    programs = kernel_programs(plan)
    return (line(programs[at], settings, workspaces) for at in stages)


class Reading(NamedTuple):
    """What stages of a plan take of their devices, in bytes, and whether it is there."""

    device: int
    """An iteration's furthest reading that is known."""
    worst: tuple[str, int]
    """The moment that needs most, and the bytes that it adds to that: 0 where that is an iteration."""
    judged: Judged

    @property
    def needs(self) -> int:
        """In the moment that needs most."""
        return self.device + self.worst[1]


def judged_stages(
    plan: ResolvedPlan,
    stages: Iterable[int],
    known: Measured = NOTHING,
    replays: Replays | None = None,
    *,
    tells_tight: bool = False,
    tells_retries: bool = True,
) -> Iterator[Reading]:
    """``stages`` of a resolved plan, negative ones counted from the last, each once; the same as in the whole report,
    but that without ``tells_tight`` what is tight there does not fit here, and without ``tells_retries`` what fits with
    retries."""
    programs = kernel_programs(plan)
    evaluated = evaluation_programs(plan, programs_of(plan, Options())) if plan.trainer.evaluated else programs
    settings, workspaces = allocator_settings(plan), held_workspaces(plan, known)
    replays = Replays() if replays is None else replays
    telling = {"tells_tight": tells_tight, "tells_retries": tells_retries}
    for stage in dict.fromkeys(at % len(programs) for at in stages):
        program, evaluation = programs[stage], evaluated[stage]
        (replayed,) = replays.replayed((program,), settings, workspaces)
        outside = causes(plan, stage, known)
        judged = _judged(plan, known, program, replayed, outside, evaluation, replays, **telling)
        reserved = _reserved(program, replayed, settings, workspaces).middle
        needed = worst_moment(_moments(program, replayed, evaluation if plan.trainer.evaluated else None), reserved)
        yield Reading(reserved + sum(outside_range(outside)) // 2, needed, judged)


def judged_ends(
    plan: ResolvedPlan,
    fullest: int,
    known: Measured = NOTHING,
    replays: Replays | None = None,
    *,
    tells_tight: bool = False,
    tells_retries: bool = True,
    tells_most: bool = True,
) -> Reading:
    """The most that some stages of a resolved plan take, and the verdict on the worst of them: the ``fullest`` by its
    tensors, and the first and the last, whose embedding, head and loss leave other blocks in the allocator's cache than
    layers do. Without ``tells_most`` the fullest stands for all where it does not fit."""
    telling = {"tells_tight": tells_tight, "tells_retries": tells_retries}
    readings = judged_stages(plan, (fullest, 0, -1), known, replays, **telling)
    found = [next(readings)]
    if tells_most or found[0].judged.verdict is not Verdict.DOES_NOT_FIT:
        found += readings
    device, most = max(one.device for one in found), max(found, key=lambda one: one.needs)
    return Reading(device, (most.worst[0], most.needs - device), worst(one.judged for one in found))


# -- readings ---------------------------------------------------------------------------------------


REPLAYED = -0.0104, 0.0237
"""Parts of what the replay reserves by which 95 % of readings are beside it: of the 64 that SimuMax 1.2 publishes
(eight runs of Megatron-Core on 8 x B200, every rank; all lie from 1.1 % below to 3.8 % above). Ranks that do the same
are up to 4.2 % apart there: when tensors end, and which block is free then, is settled while a job runs."""


class Reserved(NamedTuple):
    """Bytes that the allocator reserves, least and most."""

    loaded: tuple[int, int]
    """On the most loaded rank,"""
    mean: tuple[int, int]
    """and in the mean of the stage's ranks."""

    @classmethod
    def alike(cls, size: int) -> Reserved:
        """On all ranks, whatever happens."""
        return cls((size, size), (size, size))

    @property
    def middle(self) -> int:
        """The headline."""
        return sum(self.loaded) // 2

    @property
    def read(self) -> tuple[int, int]:
        """Where 95 % of readings of the mean should lie. How far ranks run ahead and what the replay misses have
        nothing to do with each other, so that they add up as independent errors do."""
        least, most = self.mean
        middle, apart = (least + most) / 2, (most - least) / 2
        below, above = (hypot(apart, part * middle) for part in REPLAYED)
        return round(middle - below), round(middle + above)


def _reserved(
    program: Program, replayed: Replayed, settings: AllocatorSettings, workspaces: Sequence[Hold]
) -> Reserved:
    """``replayed`` is the replay of ``program``, whose ranks may differ (``before_elsewhere``)."""
    most = replayed.reserved
    if not program.before_elsewhere:
        return Reserved.alike(most)
    others = [replace(program, before=tape) for tape in program.before_elsewhere]
    first, least = (replay((one,), settings, workspaces)[0].reserved for one in others)
    least, most, ranks = min(least, most), max(least, most), len(program.ranks)
    mean = [(first + (ranks - 1) * other) // ranks for other in (least, most)]
    return Reserved((max(first, least), max(first, most)), (mean[0], mean[1]))


def _stage(
    plan: ResolvedPlan,
    known: Measured,
    replays: Replays,
    program: Program,
    with_workspaces: Program,
    folded: Folded,
    replayed: Replayed,
    reserved: Reserved,
    evaluated: Program,
) -> StageEstimate:
    outside, together = causes(plan, program.stage, known), ranks_on_node(plan, program)
    judged = _judged(plan, known, with_workspaces, replayed, outside, evaluated, replays)
    replayed = replace(replayed, reserved=reserved.middle)
    read = reserved.read if not judged.reserved else Reserved.alike(judged.reserved).read
    apart, (low, high) = beyond(replayed, outside), outside_range(outside)
    device = replayed.reserved + (low + high) // 2 if apart.cuda_context is not None else None
    return StageEstimate(
        stage=program.stage,
        ranks=program.ranks,
        modules=program.entries,
        parameters=program.parameters(),
        requested=folded.peak,
        allocated=replayed.allocated,
        reserved=replayed.reserved,
        device=device,
        static=replayed.static,
        peak=_peak(folded, _is_bound(plan, program)),
        breakdown=replayed.breakdown,
        beyond=apart,
        moments={
            **_moments(program, replayed, evaluated),
            "first_iteration_device": None if device is None else device - replayed.reserved + replayed.first_iteration,
        },
        in_flight=program.order.in_flight,
        host=together * (program.host + program.managed),
        nvme=together * program.nvme,
        device_range=None if device is None else (reserved.loaded[0] + low, reserved.loaded[1] + high),
        reading_range=None if device is None else (read[0] + low, read[1] + high),
        outside=outside,
        judged=judged,
    )


def _moments(program: Program, replayed: Replayed, evaluated: Program | None) -> dict[str, int | None]:
    """What is alive at most in each moment, without the allocator's cache."""
    return {
        "initialisation": program.initialisation,
        "steady": replayed.allocated,
        "evaluation": None if evaluated is None else evaluation_peak(evaluated, replayed),
        "checkpoint": replayed.static + program.saving,
    }


def _peak(folded: Folded, upper_bound: bool) -> Peak:
    """The place that the fold carried: ``microbatch/phase/module/…/tensor``."""
    if folded.place == "static":
        return Peak("steady", "step", "optimizer", "", None, upper_bound)
    first, phase, *rest = folded.place.split("/")
    if first == "step":
        return Peak("steady", "step", "optimizer", "/".join(rest), None, upper_bound)
    return Peak("steady", phase, rest[0], "/".join(rest[1:]), int(first), upper_bound)


def _is_bound(plan: ResolvedPlan, program: Program) -> bool:
    """How many tokens fall into each cluster of an adaptive softmax is known at run time only."""
    return plan.loss.kind == "adaptive-softmax" and "head" in program.entries


def _moment_warnings(plan: ResolvedPlan, stages: Sequence[StageEstimate]) -> tuple[Notice, ...]:
    """Moments that need more than the headline."""
    found = []
    for stage in stages:
        evaluation = stage.moments["evaluation"]
        if evaluation is not None and stage.allocated is not None and evaluation > stage.allocated:
            found.append((evaluation, stage.allocated, stage.stage))
    if not found:
        return ()
    evaluation, steady, where = max(found)
    covered = "covers both" if plan.trainer.evaluated else "leaves evaluation out, because the plan has none"
    return (
        Notice(
            "evaluation-exceeds-steady",
            f"evaluation on stage {where} needs {evaluation / 2**30:.2f} GiB, more than training, "
            f"{steady / 2**30:.2f} GiB; the readings are training's, the verdict {covered}",
        ),
    )


def allocator_settings(plan: ResolvedPlan) -> AllocatorSettings:
    """The allocator as the plan's environment configures it, of its torch's release."""
    return replace(_environment_settings(plan), oldest_first=takes_oldest(plan))


def _environment_settings(plan: ResolvedPlan) -> AllocatorSettings:
    for name in OF_ALLOCATOR:
        value = plan.environment.get(name)
        if value is not None:
            try:
                return _parse_settings(value)
            except ValueError as error:
                raise PlanError(f"environment.{name}", value, str(error)) from None
    return AllocatorSettings()


@lru_cache(maxsize=64)
def _parse_settings(value: str) -> AllocatorSettings:
    return AllocatorSettings.parse(value)


__all__ = [
    "detail",
    "estimate",
    "evaluation_programs",
    "fold",
    "judged_ends",
    "judged_stages",
    "lines",
    "programs_of",
    "timelines",
]
