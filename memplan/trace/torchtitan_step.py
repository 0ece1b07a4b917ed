"""One training step of torchtitan's Llama on fake tensors, as the first rank of a stage runs it: of the whole model, or
of a rank's stages in a pipeline.

Sends and receives move nothing, and what they return holds on to its tensor as NCCL's does
(``ProcessGroupNCCL::pointToPoint`` keeps it in ``WorkNCCL::outputs_``; a batch of both kinds is one coalesced
work, which keeps none behind ``wait``).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel

from ..tape.events import Category
from . import collectives, substitutions
from .collectives import FollowLocal, PassPlaces, communication, on_devices, received, schedule_of
from .distributed import Replica, categories_of_fsdp
from .job import Job, Part, Stages, Torchtitan
from .models import DTYPES
from .places import HookedPlaces
from .recording import (
    BACKWARD,
    EMBEDDING,
    FORWARD,
    HEAD,
    ITERATION,
    LOSS,
    OPTIMIZER,
    Outline,
    Recording,
    Traced,
)
from .step import Marking, Training, Watch, counting, mark_gradients, mark_states, optimizer_of, update
from .storages import local, resizes_followed
from .surroundings import FAKE, Surroundings
from .torchtitan import Transformer, cross_entropy, inner, layer_numbers, made, rank_of, with_tensors

SUBSTITUTIONS = (
    *substitutions.SUBSTITUTIONS,
    *collectives.SUBSTITUTIONS,
)
BLOCKS, NORM = ("layers",), "norm"


def traced_torchtitan(job: Job, *, sums_in_place: bool = True, within: Surroundings = FAKE) -> Traced:
    """The step after the first applied one: optimizer states exist, gradients do not. Models are made and sharded on
    ``meta``, with real meshes, and get their tensors once tensors are fake."""
    settings = job.torchtitan
    assert settings is not None
    if settings.stages is not None:
        return traced_stage(job, settings, settings.stages, sums_in_place=sums_in_place, within=within)
    with rank_of(job, settings, within) as mesh:
        tensor = mesh["tp"] if settings.tensor > 1 else None
        whole = Part(0, settings.layers, first=True, last=True)
        model = made(job, settings, whole, layer_numbers(), inner(job, mesh), tensor)
        recording, places = Recording(), HookedPlaces([model])
        with followed(recording, places, sums_in_place, within) as follow:
            _run(job, settings, model, follow, places, within)
    return Traced(recording.categorised(settings.scores), outline([model]))


@contextmanager
def followed(
    recording: Recording, places: HookedPlaces, sums_in_place: bool, within: Surroundings = FAKE
) -> Iterator[FollowLocal]:
    """Tensors, as on a GPU, whose storages are written down."""
    with warnings.catch_warnings(), within.tensors():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        follow = FollowLocal(recording, places, sums_in_place=sums_in_place, device=within.device, fake=within.fake)
        with follow, resizes_followed(follow), on_devices(follow), categories_of_fsdp(follow), places.followed():
            follow.calibrate()
            yield follow


def outline(models: Sequence[Transformer]) -> Outline:
    return Outline(BLOCKS, NORM, sum(one.numel() for model in models for one in model.parameters()))


def given_tensors(model: Transformer, follow: FollowLocal, within: Surroundings) -> list[torch.nn.Parameter]:
    """Gives a model on ``meta`` its tensors; its parameters."""
    with_tensors(model, within)
    parameters = list(model.parameters())
    for parameter in parameters:
        follow.adopt(parameter, "parameter", Category.PARAMETERS)
    for buffer in model.buffers():
        follow.adopt(buffer, "buffer", Category.BUFFERS)
    return parameters


def batch(job: Job, count: int, vocab: int, within: Surroundings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of ``count`` micro-batches, the same on all ranks."""
    tokens, labels = (torch.zeros(count * job.b, job.s, dtype=torch.int64) for _ in range(2))
    if not within.fake:
        torch.manual_seed(0)
        tokens.random_(0, vocab)
        labels.copy_(tokens)
    return tokens, labels


def adopt_batch(tokens: torch.Tensor, labels: torch.Tensor, follow: FollowLocal) -> None:
    for name, tensor in (("tokens", tokens), ("labels", labels)):
        follow.adopt(tensor, name, Category.INPUTS)


class TitanTraining(Training):
    """A model of one stage, its optimizer and a micro-batch, with tensors already."""

    def __init__(
        self,
        job: Job,
        settings: Torchtitan,
        model: Transformer,
        within: Surroundings,
        follow: FollowLocal | None = None,
    ) -> None:
        self.job, self.within, self.follow, self.replica, self.scaler = job, within, follow, Replica(job, model), None
        self.parameters = list(model.parameters())
        self.optimizer = optimizer_of(job, self.parameters)
        self.tokens, self.labels = batch(job, 1, settings.vocab, within)
        self.parallel_loss = settings.parallel_loss

    def synced(self, microbatch: int) -> AbstractContextManager[object]:
        return loss_parallel() if self.parallel_loss else nullcontext()

    def loss(self) -> torch.Tensor:
        return cross_entropy(self.replica.inner(self.tokens), self.labels)

    def evaluate(self) -> None:
        """A forward pass and the loss, as torchtitan's ``Validator`` (``components/validate.py``)."""
        with self.synced(0):
            self.loss()


def _run(
    job: Job,
    settings: Torchtitan,
    model: Transformer,
    follow: FollowLocal,
    places: HookedPlaces,
    within: Surroundings,
) -> None:
    given_tensors(model, follow, within)
    training = TitanTraining(job, settings, model, within, follow)
    adopt_batch(training.tokens, training.labels, follow)
    if within.fake:
        for parameter in training.parameters:
            parameter.grad = torch.empty_like(parameter)
        update(job, training.optimizer, follow)
    else:
        training.replica.settle(lambda: training.iterate(Watch()), within.warmup)
    mark_states(job, training.optimizer, follow)
    gc.collect()
    training.iterate(Marking(places, follow))
    gc.collect()
    follow.close()


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


@contextmanager
def torchtitan_training_of(job: Job, within: Surroundings) -> Iterator[TitanTraining | PipelineTraining]:
    """The job's model or stages before the first iteration; nothing looks on. Models are made and sharded on ``meta``,
    and get their tensors, with values, on the device."""
    settings = job.torchtitan
    assert settings is not None
    if settings.stages is None:
        yield from _whole(job, settings, within)
        return
    with stages_of(job, settings, settings.stages, within) as (mesh, models), within.tensors():
        for part in models:
            with_tensors(part, within)
        places = PassPlaces(models, openings(settings.stages), Recording())
        yield PipelineTraining(job, settings.stages, models, mesh, places, within)


def _whole(job: Job, settings: Torchtitan, within: Surroundings) -> Iterator[TitanTraining]:
    with rank_of(job, settings, within) as mesh, within.tensors():
        tensor = mesh["tp"] if settings.tensor > 1 else None
        whole = Part(0, settings.layers, first=True, last=True)
        model = made(job, settings, whole, layer_numbers(), inner(job, mesh), tensor)
        with_tensors(model, within)
        yield TitanTraining(job, settings, model, within)
