"""One rank of torchtitan's Llama under ``torch.distributed.pipelining`` and ``fully_shard``, on fake tensors.

The schedules and stages are PyTorch's own; only what crosses ranks is replaced: sends and receives move
nothing, and what they return holds on to its tensor as NCCL's does (``ProcessGroupNCCL::pointToPoint`` keeps it in
``WorkNCCL::outputs_``; a batch of both kinds is one coalesced work, which keeps none behind ``wait``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.stage import InferenceMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from memplan.trace.collectives import clear_caches
from memplan.trace.job import Part
from memplan.trace.torchtitan import apply_tp, cross_entropy

from . import titan_loss
from .fsdp import ResizedFollow, Sharding, run, undivided
from .torchtitan import Sizes, llama, recomputed
from .torchtitan_tp import run_local
from .tracer import Trace
from .training_step import DTYPES

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
}


@dataclass(frozen=True)
class Pipeline:
    """The layers of every stage (edges), ranks, and how they are scheduled."""

    edges: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    ranks: int
    schedule: str = "1f1b"
    microbatches: int = 4
    return_outputs: bool = False
    tensor: int = 1
    parallel_loss: bool = False
    chunks: int = 0
    """Of the loss, if it has some."""
    packed: bool = False
    """Stages exchange rows of tokens, and every micro-batch has its positions."""
    context: bool = False
    """All shards share sequences, of which each has a part."""

    @property
    def stages(self) -> int:
        return len(self.edges) - 1


def part(
    sizes: Sizes, pipeline: Pipeline, stage: int, sharding: Sharding, mode: str, meshes: Meshes, *, ends_apart: bool
) -> Any:
    """``parallelize_llama.py`` for one stage's model, with pipeline parallelism."""
    low, high = pipeline.edges[stage : stage + 2]
    model: Any = llama(sizes, Part(low, high, not stage, stage == pipeline.stages - 1))
    mesh = meshes.data
    if meshes.tensor is not None:
        apply_tp(model, meshes.tensor, parallel_loss=pipeline.parallel_loss)
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": sharding.policy, "reshard_after_forward": False}
    if ends_apart and model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **common)
    if ends_apart and model.output is not None:
        fully_shard([model.norm, model.output], **common)
    for name, block in list(model.layers.items()):
        model.layers[name] = recomputed(block, sizes, mode)
        fully_shard(model.layers[name], **common)
    fully_shard(model, **common)
    undivided(model, sharding)
    return model


@dataclass(frozen=True)
class Meshes:
    """Ranks that ``fully_shard`` sees, and those of tensor parallelism."""

    data: DeviceMesh
    tensor: DeviceMesh | None
    of_experts: DeviceMesh | None = None
    """Ranks that have the same experts,"""
    together: DeviceMesh | None = None
    """and those that share them."""


class Held:
    """A point-to-point operation's work, and the tensor it keeps."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        return


def exchanged(operations: list[Any], desc: str | None = None) -> list[Held]:
    for operation in operations:
        if isinstance(operation.tensor, AsyncCollectiveTensor):
            operation.tensor = operation.tensor.trigger_wait()
    if len({operation.op for operation in operations}) > 1:
        return [Held(None)]
    return [Held(operation.tensor) for operation in operations]


@contextmanager
def communication() -> Iterator[None]:
    """Nothing is sent, meshes are real tensors, and stages know shapes, as they do from the second iteration on."""

    def known(self: Any, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    init: Any = FSDPParam._init_shard_mesh

    def meshed(self: Any, *args: Any) -> Any:
        with _disable_current_modes():
            return init(self, *args)

    with (
        patch.object(FSDPParam, "_init_shard_mesh", meshed),
        patch.object(schedules, "_batch_p2p", exchanged),
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", known),
    ):
        yield


@dataclass
class Marks:
    """What was held when each pass of an iteration began, and the most until the next one did."""

    before: int = 0
    names: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    end: int = 0

    def cut(self, trace: Trace, name: str) -> None:
        live, peak = self.levels[-1] if self.levels else self.before, 0
        for change in trace.changes:
            live += change.sign * change.bytes
            peak = max(peak, live)
        if self.levels:
            self.peaks.append(max(peak, self.levels[-1]))
        assert live == trace.live
        self.names.append(name)
        self.levels.append(live)
        trace.changes = []


def traced_pipeline(
    sizes: Any,
    pipeline: Pipeline,
    rank: int,
    sharding: Sharding,
    mode: str = "none",
    *,
    ends_apart: bool = False,
    iterations: int = 2,
    make: Callable[..., Any] = part,
    expert_ranks: int = 1,
) -> Marks:
    """The last iteration of pipeline rank ``rank`` (first of its shards) with AdamW (foreach)."""
    marks = Marks()
    count = pipeline.microbatches

    def body(trace: Trace, follow: ResizedFollow) -> None:
        numbers = range(rank, pipeline.stages, pipeline.ranks)
        models = [make(sizes, pipeline, at, sharding, mode, meshes, ends_apart=ends_apart) for at in numbers]
        stages = [
            _watched(_stage(sizes, pipeline, model, at, mesh, sharding), trace, marks)
            for model, at in zip(models, numbers, strict=True)
        ]
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        batch = (count * sizes.b * sizes.s,) if pipeline.packed else (count * sizes.b, sizes.s)
        tokens, labels = (torch.randint(0, sizes.vocab, batch) for _ in range(2))
        others = [models[0].given() for _ in range(count * pipeline.packed)]
        whole = (meshes.data.size() * len(tokens),)
        others += [tuple(torch.randint(0, sizes.vocab, whole) for _ in range(2)) for _ in range(pipeline.context)]
        for model in models[: len(models) * pipeline.packed]:
            model.take(*others[0])
        for tensor in (*tensors, tokens, labels, *(one for own in others for one in own)):
            follow.adopt(tensor, "state")
        many = pipeline.schedule == "interleaved"
        group = meshes.tensor.get_group() if meshes.tensor is not None else None
        schedule = SCHEDULES[pipeline.schedule](
            stages if many else stages[0], count, loss_fn=_loss_of(pipeline, models[-1], group)
        )
        optimizers = [torch.optim.AdamW(list(model.parameters()), foreach=True) for model in models]
        arguments = (tokens,) if not rank else ()
        last = pipeline.stages - 1 in numbers
        gc.collect()
        for _ in range(iterations):
            trace.changes = []
            marks.__init__(trace.live)  # type: ignore[misc]
            losses: list[torch.Tensor] | None = [] if last else None
            marks.cut(trace, "begin")
            with loss_parallel() if pipeline.parallel_loss and not pipeline.chunks else nullcontext():
                schedule.step(
                    *arguments,
                    target=labels if last else None,
                    losses=losses,
                    return_outputs=pipeline.return_outputs,
                )
            del losses
            marks.cut(trace, "step")
            _update(optimizers, trace)
            marks.cut(trace, "end")
            marks.end = trace.live

    dims = {"pp": pipeline.ranks, "replicate": sharding.replicas, "shard": sharding.shards, "tp": pipeline.tensor}
    ranks = prod(dims.values())
    dims = {name: size for name, size in dims.items() if size > 1 or name == "shard"}
    dist.init_process_group("fake", rank=rank * (ranks // pipeline.ranks), world_size=ranks, store=FakeStore())
    clear_caches()
    try:
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        data = mesh["shard"] if sharding.replicas == 1 else mesh["replicate", "shard"]
        meshes = Meshes(data, mesh["tp"] if pipeline.tensor > 1 else None)
        if expert_ranks > 1:
            sizes_of = (pipeline.ranks, ranks // pipeline.ranks // expert_ranks, expert_ranks)
            sparse = init_device_mesh("cpu", sizes_of, mesh_dim_names=("pp", "efsdp", "ep"))
            meshes = replace(meshes, of_experts=sparse["efsdp"], together=sparse["ep"])
        with communication():
            run(body) if pipeline.tensor == expert_ranks == 1 and not pipeline.context else run_local(body)
    finally:
        dist.destroy_process_group()
        clear_caches()
    return marks


def _loss_of(pipeline: Pipeline, model: Any, group: Any) -> Callable[..., torch.Tensor]:
    if not pipeline.chunks and pipeline.packed:
        return lambda logits, labels: cross_entropy(logits.unsqueeze(0), labels.unsqueeze(0))
    if not pipeline.chunks:
        return cross_entropy

    def chunked(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return titan_loss.chunked(hidden, labels.view(-1), model.output, pipeline.chunks, group)

    return chunked


def _stage(
    sizes: Any, pipeline: Pipeline, model: Any, stage: int, mesh: DeviceMesh, sharding: Sharding
) -> PipelineStage:
    dtype = DTYPES[sharding.param_dtype or sharding.original]
    hidden = torch.empty(sizes.b, sizes.s // pipeline.tensor, sizes.hidden, dtype=dtype, requires_grad=True)
    tokens = torch.zeros(sizes.b, sizes.s, dtype=torch.int64)
    logits = torch.empty(sizes.b, sizes.s, sizes.vocab, dtype=dtype, requires_grad=True)
    if pipeline.packed:
        tokens = torch.zeros(sizes.b * sizes.s, dtype=torch.int64)
        hidden, logits = hidden.detach().flatten(0, 1), logits.detach().flatten(0, 1)
        hidden, logits = hidden.requires_grad_(), logits.requires_grad_()
    if pipeline.chunks:
        logits = torch.empty(sizes.b * sizes.s, sizes.hidden, dtype=dtype, requires_grad=True)
    return PipelineStage(
        model,
        stage,
        pipeline.stages,
        torch.device("cpu"),
        input_args=hidden if stage else tokens,
        output_args=hidden if stage < pipeline.stages - 1 else logits,
        group=mesh.get_group("pp"),
    )


def _watched(stage: PipelineStage, trace: Trace, marks: Marks) -> PipelineStage:
    """``stage``, whose passes are marked as they begin."""

    def marked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            number = f"{args[0]}" if name != "R" else ""
            marks.cut(trace, f"{name}{stage.stage_index}.{number}")
            return method(*args, **kwargs)

        return called

    one: Any = stage
    one.forward_one_chunk = marked("F", stage.forward_one_chunk)
    one.backward_one_chunk = marked("B", stage.backward_one_chunk)
    one.perform_reduce_grad = marked("R", stage.perform_reduce_grad)
    return stage


def _update(optimizers: Sequence[torch.optim.Optimizer], trace: Trace) -> None:
    """``OptimizersContainer``: one optimizer for each stage's model, all stepping before gradients end."""
    trace.host = True
    for optimizer in optimizers:
        optimizer.step()
    trace.host = False
    for optimizer in optimizers:
        optimizer.zero_grad()
