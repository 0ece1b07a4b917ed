"""Training steps of a real transformers model under PyTorch's ``fully_shard``, followed on fake tensors.

Collectives go through torch's fake process group, so one process is rank 0 of as many as are asked
for. FSDP frees and allocates unsharded parameters by resizing their storages; ``ResizedFollow``
follows those as ends and beginnings.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import fsdp_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memplan.trace.collectives import clear_caches

from .tracer import Change, Follow, Trace, cuda_behaviour
from .training_step import DTYPES, IDLE, _model, _quiet, _unpacked, begin, update
from .tuned_step import Tune, _apply, blocks

ADAM = {f"aten::_foreach_{name}" for name in ("mul_", "lerp_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_", "zero_")}
"""The operators of AdamW on lists of tensors, element by element."""
_wrap: Any = DTensor


class ResizedFollow(Follow):  # type: ignore[no-untyped-call]
    """Also follows local tensors of ``DTensor`` and storages that are resized.

    The optimizer's operators on lists run on local tensors: ``DTensor`` comes to the same, after a search for the
    placements of each parameter that takes a third of a trace (``tests/frameworks/test_fsdp_optimizers.py`` compares).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ADAM and isinstance(args[0][0], DTensor) and _placed_alike(args):
            local = tree_map_only(DTensor, lambda one: one._local_tensor, args)
            out = super().__torch_dispatch__(func, types, local, kwargs)
            return out and [_wrap(one, like._spec, requires_grad=False) for one, like in zip(out, args[0], strict=True)]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        super().adopt(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, op)

    def freed(self, tensor: torch.Tensor) -> None:
        """``tensor``'s storage was resized to nothing."""
        finalizer = self.seen.get(tensor.untyped_storage()._cdata)
        if finalizer is not None:
            finalizer()


def _placed_alike(args: Any) -> bool:
    """Whether the lists of an operator have the same placements, one by one."""
    lists = [one for one in args if isinstance(one, (list, tuple)) and isinstance(one[0], DTensor)]
    placed = [[one._spec.placements for one in each] for each in lists]
    return all(one == placed[0] for one in placed)


@contextmanager
def resizing(follow: ResizedFollow) -> Iterator[None]:
    """FSDP's ``alloc_storage`` and ``free_storage`` reported to ``follow``."""
    alloc, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def allocated(tensor: torch.Tensor) -> None:
        alloc(tensor)
        follow.adopt(tensor, "fsdp.unsharded")

    def freed(tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size():
            follow.freed(tensor)
        free(tensor)

    with (
        patch.object(_fsdp_param, "alloc_storage", allocated),
        patch.object(_fsdp_param, "free_storage", freed),
        patch.object(_fsdp_param_group, "alloc_storage", allocated),
    ):
        yield


@contextmanager
def real_meshes() -> Iterator[None]:
    """The mesh of an integer ``reshard_after_forward`` made of real tensors."""
    module: Any = _fully_shard
    make = module._get_post_forward_mesh_info

    def made(*args: Any) -> Any:
        with _disable_current_modes():
            return make(*args)

    with patch.object(_fully_shard, "_get_post_forward_mesh_info", made):
        yield


@contextmanager
def fake_ranks(n: int) -> Iterator[None]:
    """A default process group of ``n`` ranks, the first of them played by this process. ``DTensor`` keeps results for
    meshes that are equal, with the names of their groups, which a later mesh may not have: they are forgotten."""
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    clear_caches()
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_caches()


@dataclass(frozen=True)
class Sharding:
    """How the model is sharded: ``replicas`` times ``shards`` ranks."""

    shards: int = 8
    replicas: int = 1
    reshard_after_forward: bool | int = True
    """Of the layers; the root has PyTorch's default unless ``root_reshard`` says otherwise."""
    root_reshard: bool | None = None
    original: str = "fp32"
    param_dtype: str | None = "bf16"
    reduce_dtype: str | None = "fp32"
    ends_apart: bool = False
    """As Accelerate shards since 1.14: embedding and head are units of their own."""
    synced: tuple[bool, ...] = (True,)
    """Of each micro-batch, whether its gradients are reduced (``set_requires_gradient_sync``)."""

    @property
    def policy(self) -> MixedPrecisionPolicy:
        compute, reduce = (None if name is None else DTYPES[name] for name in (self.param_dtype, self.reduce_dtype))
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


@dataclass
class Steps:
    """The changes of one iteration, stretch by stretch, and the bytes held before."""

    before: int = 0
    end: int = 0
    stretches: list[list[Change]] = field(default_factory=list)
    """Forward and backward of each micro-batch, then the step."""

    def peaks(self) -> list[int]:
        """The most that was held in each stretch."""
        live, result = self.before, []
        for stretch in self.stretches:
            peak = live
            for change in stretch:
                live += change.sign * change.bytes
                peak = max(peak, live)
            result.append(peak)
        return result

    def levels(self) -> list[int]:
        """What was held after each stretch."""
        live, result = self.before, []
        for stretch in self.stretches:
            live += sum(change.sign * change.bytes for change in stretch)
            result.append(live)
        return result


def undivided(model: torch.nn.Module, sharding: Sharding) -> None:
    """As torchtitan has it where one rank has all shards (``disable_fsdp_gradient_division``)."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and sharding.shards == 1:
            module.set_gradient_divide_factor(1.0)


def mesh_of(sharding: Sharding) -> DeviceMesh:
    """Made outside of fake tensors, whose elements are not known."""
    if sharding.replicas == 1:
        return init_device_mesh("cpu", (sharding.shards,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (sharding.replicas, sharding.shards), mesh_dim_names=("replicate", "shard"))


def _as_it_is(model: Any) -> Any:
    return model


def sharded_model(
    config: transformers.PreTrainedConfig,
    sharding: Sharding,
    mesh: DeviceMesh,
    *,
    flash: bool,
    recompute: bool,
    tune: Tune = _as_it_is,
) -> Any:
    """``tune`` wraps the model before it is sharded."""
    whole = _model(config, sharding.original, "sdpa" if flash else "eager")
    if recompute:
        whole.activation_checkpointing_enable()
    model = tune(whole)
    policy = sharding.policy
    for layer in blocks(whole):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.reshard_after_forward)
    if sharding.ends_apart:
        shard_ends(model, {"mesh": mesh, "mp_policy": policy}, sharding.reshard_after_forward)
    if sharding.root_reshard is None:
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.root_reshard)
    return model


def shard_ends(model: Any, how: dict[str, Any], reshard: bool | int) -> None:
    """Embedding and head, as ``fsdp2_prepare_model`` of accelerate 1.15 shards them, with its own search for the norm
    (``_find_final_norm``, private)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, **how, reshard_after_forward=reshard)
    norm = fsdp_utils._find_final_norm(model)
    tail = (norm, embedding, head) if tied else (norm, head)
    if found := [one for one in tail if one is not None]:
        fully_shard(found, **how, reshard_after_forward=False)


Loss = Callable[[], torch.Tensor]
Build = Callable[[DeviceMesh], tuple[Any, Loss]]
"""Makes a sharded model, and what runs its forward."""
Meshes = Callable[[Sharding], DeviceMesh]
"""Ranks by what they share."""


def traced_steps(
    config: transformers.PreTrainedConfig,
    b: int,
    s: int,
    sharding: Sharding = Sharding(),
    *,
    flash: bool = True,
    recompute: bool = False,
    tune: Tune = _as_it_is,
) -> Steps:
    """An iteration of ``ForCausalLM`` on ids (b, s)."""

    def build(mesh: DeviceMesh) -> tuple[Any, Loss]:
        model = sharded_model(config, sharding, mesh, flash=flash, recompute=recompute, tune=tune)
        ids = torch.randint(0, config.vocab_size, (b, s))
        return model, lambda: model(input_ids=ids, labels=ids).loss

    with (
        _quiet(),
        _unpacked(),
        patch.object(torch.nn.Module, "_apply", _apply) if tune is not _as_it_is else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return traced(build, sharding, warm=False)


def traced(
    build: Build, sharding: Sharding, *, warm: bool = True, keeps_gradients: bool = False, of: Meshes | None = None
) -> Steps:
    """An iteration with AdamW (foreach), whose states exist by then; and so do gradients, where a step keeps them
    (``zero_grad(set_to_none=False)``). Where it is ``warm`` another one was before it: torchtitan's models keep some
    tensors from then on."""
    steps = Steps()

    def body(trace: Trace, follow: ResizedFollow) -> None:
        model, loss_of = build(mesh)
        for tensor in (*model.parameters(), *model.buffers()):
            follow.adopt(tensor, "state")
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=True)
        idle = [parameter for name, parameter in model.named_parameters() if IDLE in name]
        for parameter in optimizer.param_groups[0]["params"]:
            if any(parameter is one for one in idle):
                continue
            begin(optimizer, parameter, trace)
        gc.collect()
        for _ in range(1 + warm):
            trace.changes = []
            steps.before, steps.stretches = trace.live, []
            for sync in sharding.synced:
                model.set_requires_gradient_sync(sync)
                loss = loss_of()
                _cut(trace, steps)
                loss.backward()  # type: ignore[no-untyped-call]
                _cut(trace, steps)
                del loss
            update(optimizer, trace, keeps_gradients=keeps_gradients)
            _cut(trace, steps)
            steps.end = trace.live

    with real_meshes(), fake_ranks(sharding.shards * sharding.replicas):
        mesh = (of or mesh_of)(sharding)
        run(body)
    return steps


def _cut(trace: Trace, steps: Steps) -> None:
    """Ends a stretch."""
    steps.stretches.append(trace.changes)
    trace.changes = []


def run(body: Callable[[Trace, ResizedFollow], None]) -> Trace:
    """As ``tracer.run``, with storages that are resized."""
    trace = Trace()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        cuda_behaviour(),
        ResizedFollow(trace) as follow,
        resizing(follow),
    ):
        body(trace, follow)
    return trace
