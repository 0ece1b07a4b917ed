"""Seconds of one training step: entries' times into stages, stages into a pipeline, and what a step does once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...plan import count
from ...plan.plan import Plan
from .efficiency import Efficiency
from .ends import EntryTimes, entry_times
from .pipeline import Stage, seconds
from .rates import rates_of
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
    """Sums of a chunk; of ``sends``, forward and backward."""

    __slots__ = ("backward", "forward", "parallel", "recompute", "send")

    def __init__(self, times: EntryTimes, work: StageWork, sends: tuple[bool, bool], send: float) -> None:
        parts = [(times.layer, work.layers)]
        parts += [(times.embedding, 1)] if work.embedding else []
        parts += [(times.final_norm, 1)] if work.final_norm else []
        parts += [(times.head, 1)] if work.head else []
        self.forward = sum(n * part.forward for part, n in parts)
        self.recompute = work.recomputed * times.layer.recompute
        self.backward = sum(n * part.backward for part, n in parts) + self.recompute
        self.parallel = sum(n * part.parallel for part, n in parts)
        self.parallel += work.recomputed * times.layer.recomputed_parallel
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
    recompute = microbatches * sum(chunk.recompute for chunk in counted)
    parallel = microbatches * sum(chunk.parallel for chunk in counted)
    sent = microbatches * sum(chunk.send for chunk in counted)
    busy = microbatches * sum(chunk.forward + chunk.backward for chunk in counted)
    again = recompute - microbatches * times.layer.recomputed_parallel * _recomputed(stages, wholes, pipelined)
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


def _recomputed(stages: Sequence[Sequence[StageWork]], wholes: Sequence[float], pipelined: bool) -> int:
    counted = [stages[list(wholes).index(max(wholes))]] if pipelined else stages
    return sum(chunk.recomputed for stage in counted for chunk in stage)


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
    """What ``pipeline.seconds`` adds to the slowest stage's passes, the first stage of group ``at``."""
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
    layer = times.layer
    total = chunk.layers * (layer.forward + layer.backward) + chunk.recomputed * layer.recompute
    if chunk.embedding:
        total += times.embedding.forward + times.embedding.backward
    if chunk.final_norm:
        total += times.final_norm.forward + times.final_norm.backward
    if chunk.head:
        total += times.head.forward + times.head.backward
    return total


def _first_forward(times: EntryTimes, chunk: StageWork, send: float) -> float:
    """Of a stage's first chunk, which is not the model's last."""
    return chunk.layers * times.layer.forward + (times.embedding.forward if chunk.embedding else 0.0) + send


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
    return _with_rates(found, plan, work, rates.peak, rates_notes(plan, efficiency))


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


def model_flops(plan: Plan) -> float:
    """FLOPs of a step's products, forward and backward: 6 for each weight of a matrix and token, 12 for each layer,
    feature and score (arXiv 2205.05198, appendix A)."""
    spec, batch = plan.model, plan.batch
    assert batch.gbs is not None
    assert batch.seq is not None
    head = spec.vocab * spec.hidden
    matrices = spec.layers * matrix_elements(plan) + head
    attended = 12.0 * spec.layers * spec.attention_features * batch.seq
    return batch.gbs * batch.seq * (6.0 * matrices + attended)


def matrix_elements(plan: Plan) -> int:
    """Weights of a layer's products."""
    spec = plan.model
    biases = (count.attention(spec) - spec.hidden * (spec.qkv_features + spec.attention_features)) + 0
    mlp = (3 if spec.gated else 2) * spec.hidden * spec.ffn
    return count.attention(spec) - biases + mlp


def recomputed_flops(plan: Plan, work: Sequence[Sequence[StageWork]]) -> float:
    """FLOPs of products that backward computes again."""
    spec, batch = plan.model, plan.batch
    assert batch.gbs is not None
    assert batch.seq is not None
    layers = sum(chunk.recomputed for stage in work for chunk in stage)
    scores = 4.0 * spec.attention_features * batch.seq
    if plan.fsdp.per_operator:
        each = float(matrix_elements(plan))
    elif plan.recompute.mode == "selective":
        modules = plan.recompute.modules or ("core_attn",)
        each = (scores if "core_attn" in modules else 0.0) + (
            2.0 * (3 if spec.gated else 2) * spec.hidden * spec.ffn if "mlp" in modules else 0.0
        )
    else:
        each = 2.0 * matrix_elements(plan) + scores
    return batch.gbs * batch.seq * layers * each


def rates_notes(plan: Plan, efficiency: Efficiency | None) -> tuple[str, ...]:
    """What was assumed of machine and kernels."""
    from ...gpus import GPUS
    from .efficiency import default
    from .hardware import SPEEDS

    assert plan.hardware.gpu is not None
    gpu, notes = plan.hardware.gpu, []
    speed = SPEEDS[gpu]
    nodes = (plan.hardware.gpus or 1) > plan.hardware.gpus_per_node
    if nodes and plan.hardware.network is None and speed.system is not None:
        notes.append(f"network adapters of a {speed.system} (--network gives others)")
    parts = efficiency or default(gpu, GPUS[gpu].compute_capability, fused_kernels=plan.framework == "megatron")
    notes += [f"sustained: {source}" for source in parts.sources]
    return tuple(notes)


__all__ = ["StepTime", "assemble", "model_flops", "step_seconds", "step_time"]
