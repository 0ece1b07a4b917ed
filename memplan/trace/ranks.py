"""One rank of as many as are asked for, in one process: torch's fake process group, and ``fully_shard`` over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from .job import Job, Sharded
from .models import DTYPES
from .outline import outline_of
from .surroundings import FAKE, Surroundings


@contextmanager
def rank_of(job: Job, within: Surroundings = FAKE) -> Iterator[DeviceMesh | None]:
    """The mesh of the job's ranks, of which this process, where it is alone, is the first, or the one that a replica
    names; made of real tensors, whose elements are known, and so before a fake mode is entered. Replicas need none."""
    if job.fsdp is not None:
        rank, size = 0, job.fsdp.shards * job.fsdp.replicas
    elif job.ddp is not None:
        rank, size = job.ddp.rank, job.ddp.ranks
    else:
        yield None
        return
    with within.group(rank, size), _real_meshes():
        yield _mesh_of(job.fsdp, within.device) if job.fsdp is not None else None


def _mesh_of(sharded: Sharded, device: str) -> DeviceMesh:
    if sharded.replicas == 1:
        return init_device_mesh(device, (sharded.shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (sharded.replicas, sharded.shards), mesh_dim_names=("replicate", "shard"))


@contextmanager
def _real_meshes() -> Iterator[None]:
    """The mesh of an integer ``reshard_after_forward`` is made later, of real tensors too."""
    module: Any = _fully_shard
    make = module._get_post_forward_mesh_info

    def made(*args: Any) -> Any:
        with _disable_current_modes():
            return make(*args)

    with patch.object(_fully_shard, "_get_post_forward_mesh_info", made):
        yield


def shard(job: Job, model: torch.nn.Module, mesh: DeviceMesh | None) -> None:
    """Every layer is a unit, and so is the model; in place."""
    if job.fsdp is None:
        return
    given = job.fsdp
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=DTYPES[given.reduce])
    for path in outline_of(model).blocks:
        layers: Any = model.get_submodule(path)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=given.reshard)
    if given.reshard_root:
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    else:
        fully_shard(model, mesh=mesh, mp_policy=policy)
