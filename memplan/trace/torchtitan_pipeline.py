"""An iteration of one rank of a pipeline of torchtitan's Llama: ``train.py`` and ``pipeline_llama.py`` of December
2024 (commit 9dec370), on ``torch.distributed.pipelining``'s own schedules."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel

from ..tape import Category
from .dtensors import FollowLocal
from .job import Job
from .models import DTYPES
from .pipelining import PassPlaces, communication, received, schedule_of
from .recording import BACKWARD, FORWARD, LOSS, Recording
from .step import optimizer_of
from .torchtitan_model import Transformer, cross_entropy
from .torchtitan_parallel import layer_numbers, made
from .torchtitan_settings import Stages, Torchtitan
from .torchtitan_step import batch, followed, given_tensors, inner, mark_gradients, mark_states, outline, rank_of
from .traced import EMBEDDING, HEAD, Traced


def traced_stage(job: Job, settings: Torchtitan, stages: Stages, *, sums_in_place: bool) -> Traced:
    """The second iteration: the first has made optimizer states, and the buffers that stages receive in."""
    with rank_of(job, settings) as mesh, communication():
        numbers = layer_numbers()
        data, tensor = inner(job, mesh), mesh["tp"] if settings.tensor > 1 else None
        models = [made(job, settings, stages.part(at), numbers, data, tensor) for at in stages.numbers]
        recording = Recording()
        places = PassPlaces(models, _openings(stages), recording)
        with followed(recording, places, sums_in_place) as follow:
            _run(job, settings, stages, models, mesh, follow, places)
    passes = tuple(places.passes)
    return Traced(recording.categorised(settings.scores), outline(models), passes=passes)


def _openings(stages: Stages) -> dict[tuple[str, int], str]:
    """What runs first in each pass of each stage."""
    found = {}
    for stage in stages.numbers:
        part = stages.part(stage)
        low, high = (f"layer.{part.low}", f"layer.{part.high - 1}") if part.low < part.high else (HEAD, EMBEDDING)
        found[FORWARD, stage] = EMBEDDING if part.first else low
        found[BACKWARD, stage] = HEAD if part.last else high
        found[LOSS, stage] = HEAD
    return found


def _run(
    job: Job,
    settings: Torchtitan,
    stages: Stages,
    models: Sequence[Transformer],
    mesh: DeviceMesh,
    follow: FollowLocal,
    places: PassPlaces,
) -> None:
    parameters = [given_tensors(model, follow) for model in models]
    parts = [
        places.watched(_stage(job, settings, stages, model, at, mesh))
        for model, at in zip(models, stages.numbers, strict=True)
    ]
    tokens, labels = batch(job, stages.microbatches, follow)
    first, last = not stages.rank, stages.count - 1 in stages.numbers
    loss = places.watched_loss(cross_entropy, stages.count - 1)
    schedule = schedule_of(stages.schedule, parts, stages.microbatches, loss)
    optimizers = [optimizer_of(job, own) for own in parameters]
    inputs = (tokens,) if first else ()

    def step() -> None:
        losses: list[torch.Tensor] | None = [] if last else None
        target = labels if last else None
        with loss_parallel() if settings.parallel_loss else nullcontext():
            schedule.step(*inputs, target=target, losses=losses, return_outputs=stages.return_outputs)

    gc.collect()
    step()
    _update(job, optimizers, follow)
    for optimizer in optimizers:
        mark_states(job, optimizer, follow)
    for part in parts:
        for buffer in received(part):
            follow.mark(buffer, Category.COMMUNICATION_BUFFERS)
    gc.collect()
    places.starts()
    step()
    for own in parameters:
        mark_gradients(own, follow)
    places.steps()
    _update(job, optimizers, follow)
    gc.collect()
    follow.close()


def _stage(
    job: Job, settings: Torchtitan, stages: Stages, model: Transformer, number: int, mesh: DeviceMesh
) -> PipelineStage:
    """A stage that knows the shapes of what it receives and sends."""
    dtype = DTYPES[job.dtype]
    hidden = torch.empty(job.b, job.s // settings.tensor, settings.hidden, dtype=dtype, requires_grad=True)
    tokens = torch.zeros(job.b, job.s, dtype=torch.int64)
    logits = torch.empty(job.b, job.s, settings.vocab, dtype=dtype, requires_grad=True)
    return PipelineStage(
        model,
        number,
        stages.count,
        torch.device("cpu"),
        input_args=hidden if number else tokens,
        output_args=hidden if number < stages.count - 1 else logits,
        group=mesh.get_group("pp"),
    )


def _update(job: Job, optimizers: Sequence[torch.optim.Optimizer], follow: FollowLocal) -> None:
    """``OptimizersContainer``: one optimizer for each stage's model, all stepping before gradients end."""
    follow.host = job.implementation != "fused"
    for optimizer in optimizers:
        optimizer.step()
    follow.host = False
    for optimizer in optimizers:
        optimizer.zero_grad()
