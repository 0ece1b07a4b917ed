"""Seconds of one training step: entries' times into stages, stages into a pipeline, and what a step does once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...plan.plan import Plan
from .efficiency import Efficiency
from .ends import EntryTimes, entry_times
from .flops import model_flops, recomputed_flops
from .pipeline import Stage, seconds
from .rates import assumptions, rates_of
from .shape import shape_of
from .stages import StageWork, work_of
from .updates import Replicas, Updates, updates


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and the parts that add up to it: those of the slowest stage, and what it waits for."""

    total: float
    compute: float
    recompute: float
    tensor_parallel: float
    """Exposed communication inside layers, of tensor and context parallelism."""
    pipeline_bubble: float
    pipeline_send: float
    data_parallel: float
    """Exposed communication between replicas."""
    optimizer: float
    offload: float
    tokens_per_second: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    mfu: float = 0.0
    """Model FLOP/s over the published peak; scores are counted whole, causal or not, as Megatron and torchtitan do."""
    hfu: float = 0.0
    """The same with what is computed again."""
    assumptions: tuple[str, ...] = ()


class _Chunk:
    """Seconds of one micro-batch through a chunk, of which ``parallel`` are exposed communication, ``recompute`` the
    rest of what is computed again, and ``send`` those of ``sends``, forward and backward."""

    __slots__ = ("backward", "forward", "parallel", "recompute", "send")

    def __init__(self, times: EntryTimes, work: StageWork, sends: tuple[bool, bool], send: float) -> None:
        parts = [(times.layer, work.layers)]
        parts += [(times.embedding, 1)] if work.embedding else []
        parts += [(times.final_norm, 1)] if work.final_norm else []
        parts += [(times.head, 1)] if work.head else []
        self.forward = sum(n * part.forward for part, n in parts)
        again = times.layer.recomputed_parallel
        self.backward = sum(n * part.backward for part, n in parts) + work.recomputed * times.layer.recompute
        self.recompute = work.recomputed * (times.layer.recompute - again)
        self.parallel = sum(n * part.parallel for part, n in parts) + work.recomputed * again
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


def step_time(plan: Plan, efficiency: Efficiency | None = None) -> StepTime:
    """One step of a resolved plan. ``PlanError`` where no GPU is named, or something of it is not timed."""
    shape, rates, times, work = shape_of(plan), rates_of(plan, efficiency), entry_times(plan, efficiency), work_of(plan)
    batch, layout = plan.batch, plan.layout
    assert batch.gbs is not None
    microbatches = batch.gbs // (shape.b * (layout.dp or 1))
    replicas = Replicas(plan, shape, rates)
    staged = len(work) > 1
    once = max(
        (updates(replicas, stage, times, microbatches, staged) for stage in dict.fromkeys(work)),
        key=lambda one: one.total,
    )
    found = assemble(
        times,
        work,
        microbatches,
        schedule=plan.pipeline.schedule,
        overlapped_sends=shape.overlapped_sends,
        pipelined=plan.framework != "device-map",
        once=once,
    )
    return _with_rates(found, plan, work, rates.peak, assumptions(plan, efficiency))


def _with_rates(
    found: StepTime, plan: Plan, work: Sequence[Sequence[StageWork]], peak: float, notes: tuple[str, ...]
) -> StepTime:
    batch, gpus = plan.batch, plan.hardware.gpus or 1
    assert batch.gbs is not None
    assert batch.seq is not None
    tokens = batch.gbs * batch.seq
    model = model_flops(plan)
    again = recomputed_flops(plan, work)
    reachable = found.total * gpus * peak
    return replace(
        found,
        tokens_per_second=tokens / found.total,
        tokens_per_second_per_gpu=tokens / found.total / gpus,
        mfu=model / reachable,
        hfu=(model + again) / reachable,
        assumptions=notes,
    )
