"""One training step of torchtitan's Llama on fake tensors, as the first rank of a stage runs it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ..tape import Category
from . import dtensors, pipelining, substitutions
from .dtensors import FollowLocal, clear_caches, on_devices
from .fsdp_categories import categories_of_fsdp
from .hooked_places import HookedPlaces
from .job import Job
from .recording import BACKWARD, FORWARD, OPTIMIZER, Recording
from .step import is_followed, optimizer_of, update
from .storages import resizes_followed
from .substitutions import cuda_behaviour
from .torchtitan_model import Transformer, cross_entropy
from .torchtitan_parallel import layer_numbers, made
from .torchtitan_settings import Part, Torchtitan
from .traced import Outline, Traced

SUBSTITUTIONS = (*substitutions.SUBSTITUTIONS, *dtensors.SUBSTITUTIONS, *pipelining.SUBSTITUTIONS)
BLOCKS, NORM = ("layers",), "norm"


def traced_torchtitan(job: Job, *, sums_in_place: bool = True) -> Traced:
    """The step after the first applied one: optimizer states exist, gradients do not. Models are made and sharded on
    ``meta``, with real meshes, and get their tensors once tensors are fake."""
    settings = job.torchtitan
    assert settings is not None
    if settings.stages is not None:
        from .torchtitan_pipeline import traced_stage

        return traced_stage(job, settings, settings.stages, sums_in_place=sums_in_place)
    with rank_of(job, settings) as mesh:
        tensor = mesh["tp"] if settings.tensor > 1 else None
        whole = Part(0, settings.layers, first=True, last=True)
        model = made(job, settings, whole, layer_numbers(), inner(job, mesh), tensor)
        recording, places = Recording(), HookedPlaces([model])
        with followed(recording, places, sums_in_place) as follow:
            _run(job, settings, model, follow, places)
    return Traced(recording.categorised(settings.scores), outline([model]))


@contextmanager
def rank_of(job: Job, settings: Torchtitan) -> Iterator[DeviceMesh]:
    """The mesh of all ranks, of which this process is the first of its stage: pipeline, replicas, shards, and
    tensor parallelism, each where there is any."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

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
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    finally:
        dist.destroy_process_group()
        clear_caches()


def inner(job: Job, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that ``fully_shard`` shards and replicates across."""
    assert job.fsdp is not None
    return mesh["shard"] if job.fsdp.replicas == 1 else mesh["replicate", "shard"]


@contextmanager
def followed(recording: Recording, places: HookedPlaces, sums_in_place: bool) -> Iterator[FollowLocal]:
    """Fake tensors, as on a GPU, whose storages are written down."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), cuda_behaviour():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        follow = FollowLocal(recording, places, sums_in_place=sums_in_place)
        with follow, resizes_followed(follow), on_devices(follow), categories_of_fsdp(follow), places.followed():
            follow.calibrate()
            yield follow


def outline(models: Sequence[Transformer]) -> Outline:
    return Outline(BLOCKS, NORM, sum(one.numel() for model in models for one in model.parameters()))


def given_tensors(model: Transformer, follow: FollowLocal) -> list[torch.nn.Parameter]:
    """Gives a model on ``meta`` its tensors; its parameters."""
    model.to_empty(device="cpu")
    parameters = list(model.parameters())
    for parameter in parameters:
        follow.adopt(parameter, "parameter", Category.PARAMETERS)
    for buffer in model.buffers():
        follow.adopt(buffer, "buffer", Category.BUFFERS)
    return parameters


def mark_states(job: Job, optimizer: torch.optim.Optimizer, follow: FollowLocal) -> None:
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and is_followed(job, tensor):
                follow.mark(tensor, Category.OPTIMIZER_STATES)


def mark_gradients(parameters: Sequence[torch.nn.Parameter], follow: FollowLocal) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            follow.mark(parameter.grad, Category.GRADIENTS)


def batch(job: Job, count: int, follow: FollowLocal) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of ``count`` micro-batches."""
    tokens, labels = (torch.zeros(count * job.b, job.s, dtype=torch.int64) for _ in range(2))
    for name, tensor in (("tokens", tokens), ("labels", labels)):
        follow.adopt(tensor, name, Category.INPUTS)
    return tokens, labels


def _run(job: Job, settings: Torchtitan, model: Transformer, follow: FollowLocal, places: HookedPlaces) -> None:
    sharded: Any = model
    assert job.fsdp is not None
    parameters = given_tensors(model, follow)
    optimizer = optimizer_of(job, parameters)
    tokens, labels = batch(job, 1, follow)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    update(job, optimizer, follow)
    mark_states(job, optimizer, follow)
    gc.collect()
    for microbatch in range(job.microbatches):
        places.microbatch, places.phase = microbatch, FORWARD
        sharded.set_requires_gradient_sync(job.fsdp.syncs_each or microbatch == job.microbatches - 1)
        with loss_parallel() if settings.parallel_loss else nullcontext():
            logits = model(tokens)
            loss = cross_entropy(logits, labels)
            del logits
            places.phase = BACKWARD
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        mark_gradients(parameters, follow)
    places.phase = OPTIMIZER
    update(job, optimizer, follow)
    gc.collect()
    follow.close()
