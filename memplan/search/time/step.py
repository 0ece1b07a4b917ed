"""Seconds of one training step: entries' times into stages, stages into a pipeline, and what a step does once.

Sends are part of a stage's forward and backward in a pipeline: Megatron's and DeepSpeed's schedules wait for them, but
where an interleaved schedule overlaps them. Of the stages, some one is the slowest. It works without a pause from its
first forward pass to its last backward pass, but for one micro-batch's way through the stages before and behind it. So
with ``f_i`` and ``b_i`` of stage i and ``m`` micro-batches,

    1F1B         sum_i (f_i + b_i) + (m - 1) max_i (f_i + b_i)
    GPipe        sum_i f_i + (m - 1) max_i f_i  +  sum_i b_i + (m - 1) max_i b_i
    interleaved  m max_i (f_i + b_i) + one chunk's forward and backward through the other stages, and what the slowest
                 stage waits where their chunks are slower than its own

where ``f_i`` is the sum over a stage's chunks. Equal stages: (m + p - 1) (f + b), and for v chunks (m + (p - 1) / v)
(f + b), as in arXiv 2104.04473, section 2.2. GPipe's is exact. The others are exact where all stages are equal, or only
the ends slower; where stages differ in size alone they are an upper bound, off by a pass through the pipeline at most
(``tests/search/time/test_pipeline.py`` simulates).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...frameworks import framework
from ...plan.plan import ResolvedPlan
from ...values import NamedTuple, dataclass, replace
from .efficiency import Efficiency
from .layer import EntryTimes, entry_times
from .rates import Rates, assumptions, rates_of
from .shape import Entries, Shape, StageWork, Work, needed_flops, recomputed_flops, shape_of, work_of
from .updates import Replicas, Updates, updates


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and the parts that add up to it: those of the slowest stage, and what it waits for."""

    total: float
    compute: float
    recompute: float
    tensor_parallel: float
    """Exposed communication inside layers, of tensor, context and expert parallelism."""
    pipeline_bubble: float
    pipeline_send: float
    data_parallel: float
    """Exposed communication between replicas."""
    optimizer: float
    offload: float
    tokens_per_second: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    mfu: float = 0.0
    """Model FLOP/s over the published peak; scores are counted whole, causal or not, as MosaicML and torchtitan do."""
    mfu_halved: float = 0.0
    """The same with half of causal scores, as NVIDIA counts its published throughput."""
    hfu: float = 0.0
    """The same with what is computed again."""
    assumptions: tuple[str, ...] = ()


class _Chunk:
    """Seconds of one micro-batch through a chunk, of which ``parallel`` are exposed communication, ``recompute`` the
    rest of what is computed again, and ``send`` those of ``sends``, forward and backward."""

    __slots__ = ("backward", "forward", "parallel", "recompute", "send")

    def __init__(self, times: EntryTimes, work: StageWork, sends: tuple[bool, bool], send: float) -> None:
        layers = times.layers(work)
        parts = [(one, n) for one, n, _ in layers]
        parts += [(times.embedding, 1)] if work.embedding else []
        parts += [(times.final_norm, 1)] if work.final_norm else []
        parts += [(times.head, 1)] if work.head else []
        parts += [(times.further, 1)] if work.further else []
        self.forward = sum(n * part.forward for part, n in parts)
        again = sum(n * one.recomputed_parallel for one, _, n in layers)
        repeated = sum(n * one.recompute for one, _, n in layers)
        self.backward = sum(n * part.backward for part, n in parts) + repeated
        self.recompute = repeated - again
        self.parallel = sum(n * part.parallel for part, n in parts) + again
        self.send = sum(sends) * send
        self.forward += sends[0] * send
        self.backward += sends[1] * send


def assemble(
    times: EntryTimes,
    stages: Sequence[Sequence[StageWork]],
    microbatches: int,
    *,
    schedule: str = "1f1b",
    overlapped_sends: bool = False,
    pipelined: bool = True,
    once: Updates | None = None,
) -> StepTime:
    """The step of ``stages`` (by stage, then by chunk): ``once`` a step is added. Without ``pipelined`` the stages run
    one after the other, as a device map's do."""
    once = once or Updates()
    last, send = (len(stages) - 1, len(stages[0]) - 1), 0.0 if overlapped_sends else times.send
    known: dict[tuple[StageWork, bool, bool], _Chunk] = {}
    chunks = []
    for at, stage in enumerate(stages):
        row = []
        for number, work in enumerate(stage):
            key = (work, (at, number) != last, (at, number) != (0, 0))
            if key not in known:
                known[key] = _Chunk(times, work, key[1:], send)
            row.append(known[key])
        chunks.append(row)
    passes = [[Stage(chunk.forward, chunk.backward) for chunk in stage] for stage in chunks]
    wholes = [sum(chunk.forward + chunk.backward for chunk in stage) for stage in passes]
    if pipelined:
        at = wholes.index(max(wholes))
        whole, counted = seconds(passes, microbatches, schedule), chunks[at]
        whole += 2 * (len(stages) - 1) * times.send if overlapped_sends else 0.0
    else:
        whole, counted = microbatches * sum(wholes), [chunk for stage in chunks for chunk in stage]
    again = microbatches * sum(chunk.recompute for chunk in counted)
    parallel = microbatches * sum(chunk.parallel for chunk in counted)
    sent = microbatches * sum(chunk.send for chunk in counted)
    busy = microbatches * sum(chunk.forward + chunk.backward for chunk in counted)
    return StepTime(
        total=whole + once.total,
        compute=busy - again - parallel - sent,
        recompute=again,
        tensor_parallel=parallel,
        pipeline_bubble=whole - busy,
        pipeline_send=sent,
        data_parallel=once.data_parallel,
        optimizer=once.optimizer,
        offload=once.offload,
    )


def step_time(plan: ResolvedPlan, efficiency: Efficiency | None = None) -> StepTime:
    """One step of a resolved plan. ``PlanError`` where no GPU is named, or something of it is not timed."""
    shape, rates, work = shape_of(plan), rates_of(plan, efficiency), work_of(plan)
    found = _assembled(plan, shape, rates, work)
    return _with_rates(found, plan, shape.entries, work, rates.peak, assumptions(plan, efficiency))


def step_total(plan: ResolvedPlan, shape: Shape | None = None) -> float:
    """``step_time(plan).total`` alone."""
    return _assembled(plan, shape or shape_of(plan), rates_of(plan), work_of(plan)).total


def _assembled(plan: ResolvedPlan, shape: Shape, rates: Rates, work: Work) -> StepTime:
    """The step without what is derived from its parts."""
    times = entry_times(plan, shape, rates)
    replicas, microbatches = Replicas(plan, shape, rates), plan.microbatches
    staged = len(work) > 1
    once = max(
        (updates(replicas, stage, times, microbatches, staged) for stage in dict.fromkeys(work)),
        key=lambda one: one.total,
    )
    return assemble(
        times,
        work,
        microbatches,
        schedule=plan.pipeline.schedule,
        overlapped_sends=shape.overlapped_sends,
        pipelined=framework(plan.framework).time.pipelined,
        once=once,
    )


def _with_rates(
    found: StepTime,
    plan: ResolvedPlan,
    entries: Entries,
    work: Sequence[Sequence[StageWork]],
    peak: float,
    notes: tuple[str, ...],
) -> StepTime:
    gpus, tokens = plan.hardware.gpus or 1, plan.tokens_of_step
    model = needed_flops(plan, entries, work)
    again = recomputed_flops(plan, entries, work)
    reachable = found.total * gpus * peak
    return replace(
        found,
        tokens_per_second=tokens / found.total,
        tokens_per_second_per_gpu=tokens / found.total / gpus,
        mfu=model / reachable,
        mfu_halved=needed_flops(plan, entries, work, halves=True) / reachable,
        hfu=(model + again) / reachable,
        assumptions=notes,
    )


class Stage(NamedTuple):
    """Seconds of one micro-batch through a stage (or one of its chunks)."""

    forward: float
    backward: float


def seconds(stages: Sequence[Sequence[Stage]], microbatches: int, schedule: str = "1f1b") -> float:
    """Of all passes of an iteration; ``stages`` by stage, then by chunk."""
    if schedule == "gpipe":
        forwards = [sum(chunk.forward for chunk in stage) for stage in stages]
        backwards = [sum(chunk.backward for chunk in stage) for stage in stages]
        slowest = max(forwards) + max(backwards)
        return sum(forwards) + sum(backwards) + (microbatches - 1) * slowest
    wholes = [sum(chunk.forward + chunk.backward for chunk in stage) for stage in stages]
    slowest = max(wholes)
    if len(stages[0]) == 1:
        return sum(wholes) + (microbatches - 1) * slowest
    at = wholes.index(slowest)
    before, behind = stages[:at], stages[at + 1 :]
    ways = sum(sum(stage[0]) for stage in before) + sum(sum(stage[-1]) for stage in behind)
    return microbatches * slowest + ways + (len(stages) - 1) * _late(stages[at], before, behind)


def _late(slowest: Sequence[Stage], before: Sequence[Sequence[Stage]], behind: Sequence[Sequence[Stage]]) -> float:
    """Seconds that the slowest stage waits for each of the p - 1 other micro-batches of a round, which run a chunk one
    after the other: where the first chunk of a stage before takes longer than its own, or the last of one behind."""
    first, last = slowest[0], slowest[-1]
    forward = max((stage[0].forward for stage in before), default=0.0)
    backward = max((stage[0].backward for stage in before), default=0.0)
    end = max((sum(stage[-1]) for stage in behind), default=0.0)
    return max(0.0, forward - first.forward) + max(0.0, backward - first.backward) + max(0.0, end - sum(last))


def step_seconds(
    times: EntryTimes,
    groups: Sequence[tuple[int, Sequence[StageWork]]],
    microbatches: int,
    once: float = 0.0,
    overlapped_sends: bool = False,
) -> float:
    """``assemble(...).total`` of 1F1B, plain or interleaved, and nothing else. Equal neighbours are one group:
    how many stages, and their chunks; ``once`` is added."""
    send = 0.0 if overlapped_sends else times.send
    final, stages, whole, slowest, at = len(groups) - 1, 0, 0.0, 0.0, 0
    known: dict[StageWork, float] = {}
    parts: list[list[float]] = []
    for number, (equal, chunks) in enumerate(groups):
        sums = []
        for chunk in chunks:
            one = known.get(chunk)
            if one is None:
                one = known[chunk] = _chunk_seconds(times, chunk) + 2 * send
            sums.append(one)
        if number == 0:
            sums[0] -= send
        if number == final:
            sums[-1] -= send
        total = sum(sums)
        if total > slowest:
            slowest, at = total, number
        stages += equal
        whole += equal * total
        parts.append(sums)
    extra = once + (2 * (stages - 1) * times.send if overlapped_sends else 0.0)
    if len(parts[0]) == 1:
        return whole + (microbatches - 1) * slowest + extra
    return microbatches * slowest + extra + _interleaved(times, groups, parts, at, stages, send)


def _interleaved(
    times: EntryTimes,
    groups: Sequence[tuple[int, Sequence[StageWork]]],
    parts: Sequence[Sequence[float]],
    at: int,
    stages: int,
    send: float,
) -> float:
    """What ``seconds`` adds to the slowest stage's passes, the first stage of group ``at``."""
    ways, forward, backward, last = (groups[at][0] - 1) * parts[at][-1], 0.0, 0.0, 0.0
    if at:
        own = _first_forward(times, groups[at][1][0], send)
        for number in range(at):
            first, sums = _first_forward(times, groups[number][1][0], send), parts[number]
            ways += groups[number][0] * sums[0]
            forward = max(forward, first - own)
            backward = max(backward, sums[0] - first - parts[at][0] + own)
    for number in range(at + 1, len(groups)):
        ways += groups[number][0] * parts[number][-1]
        last = max(last, parts[number][-1] - parts[at][-1])
    return ways + (stages - 1) * (forward + backward + last)


def _chunk_seconds(times: EntryTimes, chunk: StageWork) -> float:
    """Forward and backward of a chunk, without sends."""
    total = 0.0
    for one, layers, again in times.layers(chunk):
        total += layers * (one.forward + one.backward) + again * one.recompute
    if chunk.embedding:
        total += times.embedding.forward + times.embedding.backward
    if chunk.final_norm:
        total += times.final_norm.forward + times.final_norm.backward
    if chunk.head:
        total += times.head.forward + times.head.backward
    if chunk.further:
        total += times.further.forward + times.further.backward
    return total


def _first_forward(times: EntryTimes, chunk: StageWork, send: float) -> float:
    """Of a stage's first chunk, which is not the model's last."""
    total = 0.0
    for one, layers, _ in times.layers(chunk):
        total += layers * one.forward
    return total + (times.embedding.forward if chunk.embedding else 0.0) + send


HOUR = 3600.0


def cost_of_step(plan: ResolvedPlan, time: StepTime) -> float | None:
    """In the currency of ``hardware.price``; ``None`` without one."""
    price, gpus = plan.hardware.price, plan.hardware.gpus
    return None if price is None or gpus is None else price * gpus * time.total / HOUR


def cost_of_tokens(plan: ResolvedPlan, time: StepTime) -> float | None:
    """Of training on a billion tokens."""
    step = cost_of_step(plan, time)
    return None if step is None else step * 1e9 / (time.tokens_per_second * time.total)
