"""An iteration of one rank of a pipeline of torchtitan's Llama: ``train.py`` and ``pipeline_llama.py`` of December
2024 (commit 9dec370), on ``torch.distributed.pipelining``'s own schedules."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel

from ..tape import Category
from .dtensors import FollowLocal
from .job import Job
from .models import DTYPES
from .pipelining import PassPlaces, communication, received, schedule_of
from .recording import BACKWARD, FORWARD, ITERATION, LOSS, OPTIMIZER, Recording
from .step import Watch, counting, optimizer_of
from .storages import local
from .surroundings import FAKE, Surroundings
from .torchtitan_model import Transformer, cross_entropy
from .torchtitan_parallel import layer_numbers, made
from .torchtitan_settings import Stages, Torchtitan
from .torchtitan_step import (
    adopt_batch,
    batch,
    followed,
    given_tensors,
    inner,
    mark_gradients,
    mark_states,
    outline,
    rank_of,
)
from .traced import EMBEDDING, HEAD, Traced


def traced_stage(
    job: Job, settings: Torchtitan, stages: Stages, *, sums_in_place: bool, within: Surroundings = FAKE
) -> Traced:
    """The second iteration: the first has made optimizer states, and the buffers that stages receive in."""
    with stages_of(job, settings, stages, within) as (mesh, models):
        recording = Recording()
        places = PassPlaces(models, openings(stages), recording)
        with followed(recording, places, sums_in_place, within) as follow:
            _trace(job, stages, models, mesh, follow, places, within)
    passes = tuple(places.passes)
    return Traced(recording.categorised(settings.scores), outline(models), passes=passes)


@contextmanager
def stages_of(
    job: Job, settings: Torchtitan, stages: Stages, within: Surroundings
) -> Iterator[tuple[DeviceMesh, list[Transformer]]]:
    """All ranks, and the models of this one's stages on ``meta``."""
    with rank_of(job, settings, within) as mesh, communication() if within.alone else nullcontext():
        numbers = layer_numbers()
        data, tensor = inner(job, mesh), mesh["tp"] if settings.tensor > 1 else None
        yield mesh, [made(job, settings, stages.part(at), numbers, data, tensor) for at in stages.numbers]


def openings(stages: Stages) -> dict[tuple[str, int], str]:
    """What runs first in each pass of each stage."""
    found = {}
    for stage in stages.numbers:
        part = stages.part(stage)
        low, high = (f"layer.{part.low}", f"layer.{part.high - 1}") if part.low < part.high else (HEAD, EMBEDDING)
        found[FORWARD, stage] = EMBEDDING if part.first else low
        found[BACKWARD, stage] = HEAD if part.last else high
        found[LOSS, stage] = HEAD
    return found


class PipelineTraining:
    """A rank's stages, with tensors already, their optimizers, and all micro-batches of an iteration."""

    def __init__(
        self,
        job: Job,
        stages: Stages,
        models: Sequence[Transformer],
        mesh: DeviceMesh,
        places: PassPlaces,
        within: Surroundings,
        follow: FollowLocal | None = None,
    ) -> None:
        assert job.torchtitan is not None
        self.job, self.settings, self.stages, self.models = job, job.torchtitan, stages, models
        self.places, self.within, self.follow = places, within, follow
        self.parameters = [list(model.parameters()) for model in models]
        self.parts = [
            places.watched(_stage(job, self.settings, stages, model, at, mesh, within))
            for model, at in zip(models, stages.numbers, strict=True)
        ]
        self.tokens, self.labels = batch(job, stages.microbatches, self.settings.vocab, within)
        self.is_last = stages.count - 1 in stages.numbers
        loss = places.watched_loss(cross_entropy, stages.count - 1)
        self.schedule = schedule_of(stages.schedule, self.parts, stages.microbatches, loss)
        self.optimizers = [optimizer_of(job, own) for own in self.parameters]

    def iterate(self, watch: Watch) -> None:
        """The schedule with every micro-batch, and the step."""
        with self.within.iteration():
            watch.begins(ITERATION, 0)
            self._run()
            watch.accumulated([one for own in self.parameters for one in own])
            watch.begins(OPTIMIZER, 0)
            self._update()

    def _run(self) -> None:
        losses: list[torch.Tensor] | None = [] if self.is_last else None
        target = self.labels if self.is_last else None
        inputs = () if self.stages.rank else (self.tokens,)
        with loss_parallel() if self.settings.parallel_loss else nullcontext():
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=self.stages.return_outputs)
        if self.within.lost is not None:
            for loss in losses or ():
                self.within.lost(local(loss.detach()))

    def _update(self) -> None:
        """``OptimizersContainer``: one optimizer for each stage's model, all stepping before gradients end."""
        with counting(self.job, self.follow):
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class _Marking(Watch):
    """Tells a trace what is a pass, a step, a gradient."""

    def __init__(self, places: PassPlaces, follow: FollowLocal) -> None:
        self.places, self.follow = places, follow

    def begins(self, phase: str, microbatch: int) -> None:
        if phase == ITERATION:
            self.places.starts()
        else:
            self.places.steps()

    def accumulated(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        mark_gradients(parameters, self.follow)


def _trace(
    job: Job,
    stages: Stages,
    models: Sequence[Transformer],
    mesh: DeviceMesh,
    follow: FollowLocal,
    places: PassPlaces,
    within: Surroundings,
) -> None:
    for model in models:
        given_tensors(model, follow, within)
    training = PipelineTraining(job, stages, models, mesh, places, within, follow)
    adopt_batch(training.tokens, training.labels, follow)
    gc.collect()
    for _ in range(1 if within.fake else within.warmup):
        training.iterate(Watch())
    for optimizer in training.optimizers:
        mark_states(job, optimizer, follow)
    for part in training.parts:
        for buffer in received(part):
            follow.mark(buffer, Category.COMMUNICATION_BUFFERS)
    gc.collect()
    training.iterate(_Marking(places, follow))
    gc.collect()
    follow.close()


def _stage(
    job: Job,
    settings: Torchtitan,
    stages: Stages,
    model: Transformer,
    number: int,
    mesh: DeviceMesh,
    within: Surroundings,
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
        torch.device(within.device),
        input_args=hidden if number else tokens,
        output_args=hidden if number < stages.count - 1 else logits,
        group=mesh.get_group("pp"),
    )
