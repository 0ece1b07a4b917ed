"""One training step of torchtitan's Llama on fake tensors, as the first rank of a stage runs it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ..tape import Category
from . import dtensors, pipelining, substitutions
from .dtensors import FollowLocal, clear_caches, on_devices
from .fsdp_categories import categories_of_fsdp
from .hooked_places import HookedPlaces
from .job import Job
from .materialised import initialise
from .recording import BACKWARD, FORWARD, OPTIMIZER, Recording
from .step import Marking, Watch, is_followed, optimizer_of, update
from .storages import local, resizes_followed
from .surroundings import FAKE, Surroundings
from .torchtitan_model import Transformer, cross_entropy
from .torchtitan_parallel import layer_numbers, made
from .torchtitan_settings import Part, Torchtitan
from .traced import Outline, Traced

SUBSTITUTIONS = (*substitutions.SUBSTITUTIONS, *dtensors.SUBSTITUTIONS, *pipelining.SUBSTITUTIONS)
BLOCKS, NORM = ("layers",), "norm"


def traced_torchtitan(job: Job, *, sums_in_place: bool = True, within: Surroundings = FAKE) -> Traced:
    """The step after the first applied one: optimizer states exist, gradients do not. Models are made and sharded on
    ``meta``, with real meshes, and get their tensors once tensors are fake."""
    settings = job.torchtitan
    assert settings is not None
    if settings.stages is not None:
        from .torchtitan_pipeline import traced_stage

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
def rank_of(job: Job, settings: Torchtitan, within: Surroundings = FAKE) -> Iterator[DeviceMesh]:
    """The mesh of all ranks, of which this process, where it is alone, is the first of its stage: pipeline, replicas,
    shards, and tensor parallelism, each where there is any."""
    assert job.fsdp is not None
    stages = settings.stages
    sizes = {
        "pp": stages.ranks if stages is not None else 1,
        "replicate": job.fsdp.replicas,
        "shard": job.fsdp.shards,
        "tp": settings.tensor,
    }
    dims = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    world, after = 1, 1
    for name, size in sizes.items():
        world *= size
        after *= 1 if name == "pp" else size
    rank = after * stages.rank if stages is not None else 0
    clear_caches()
    try:
        with within.group(rank, world):
            yield init_device_mesh(within.device, tuple(dims.values()), mesh_dim_names=tuple(dims))
    finally:
        clear_caches()


def inner(job: Job, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that ``fully_shard`` shards and replicates across."""
    assert job.fsdp is not None
    return mesh["shard"] if job.fsdp.replicas == 1 else mesh["replicate", "shard"]


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


def with_tensors(model: Transformer, within: Surroundings) -> None:
    """Gives a model on ``meta`` its tensors, and values if they are real."""
    model.to_empty(device=within.device)
    if not within.fake:
        initialise(model, seed=dist.get_rank())
        model.fill_frequencies()


def mark_states(job: Job, optimizer: torch.optim.Optimizer, follow: FollowLocal) -> None:
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and is_followed(job, tensor):
                follow.mark(tensor, Category.OPTIMIZER_STATES)


def mark_gradients(parameters: Sequence[torch.nn.Parameter], follow: FollowLocal) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            follow.mark(parameter.grad, Category.GRADIENTS)


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


class TitanTraining:
    """A model of one stage, its optimizer and a micro-batch, with tensors already."""

    def __init__(
        self,
        job: Job,
        settings: Torchtitan,
        model: Transformer,
        within: Surroundings,
        follow: FollowLocal | None = None,
    ) -> None:
        self.job, self.settings, self.model, self.within, self.follow = job, settings, model, within, follow
        self.parameters = list(model.parameters())
        self.optimizer = optimizer_of(job, self.parameters)
        self.tokens, self.labels = batch(job, 1, settings.vocab, within)

    def iterate(self, watch: Watch) -> None:
        """Every micro-batch and the step."""
        with self.within.iteration():
            self._iterate(watch)

    def _iterate(self, watch: Watch) -> None:
        sharded: Any = self.model
        job = self.job
        assert job.fsdp is not None
        last = job.microbatches - 1
        for microbatch in range(job.microbatches):
            watch.begins(FORWARD, microbatch)
            sharded.set_requires_gradient_sync(job.fsdp.syncs_each or microbatch == last)
            with loss_parallel() if self.settings.parallel_loss else nullcontext():
                logits = self.model(self.tokens)
                loss = cross_entropy(logits, self.labels)
                del logits
                watch.begins(BACKWARD, microbatch)
                loss.backward()  # type: ignore[no-untyped-call]
            if self.within.lost is not None:
                self.within.lost(local(loss.detach()))
            del loss
            watch.accumulated(self.parameters)
        watch.begins(OPTIMIZER, last)
        update(job, self.optimizer, self.follow)

    def evaluate(self) -> None:
        """A forward pass of the model alone."""
        self.model(self.tokens)


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
        for _ in range(within.warmup):
            training.iterate(Watch())
    mark_states(job, training.optimizer, follow)
    gc.collect()
    training.iterate(Marking(places, follow))
    gc.collect()
    follow.close()
