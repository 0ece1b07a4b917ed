"""Expert parallelism of torchtitan 0.2.2 on ``titan_models``: ``torchtitan/distributed/expert_parallel.py``
(``ExpertParallel``), and units and prefetches of ``torchtitan/models/llama4/infra/parallelize.py`` (``apply_fsdp``).

Every rank sends as many rows to any other. Selective recompute runs what it does not find among what it has kept, as
PyTorch did before 2.13, which raises an error where ``fully_shard`` gathers within a recomputed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.utils import checkpoint

from memplan.trace.torchtitan import cross_entropy

from . import fsdp, pipelining, titan_models, torchtitan_tp
from .fsdp import ResizedFollow, Sharding, Steps
from .titan_models import (
    EXCHANGED,
    Block,
    GroupedExperts,
    Sizes,
    Transformer,
    grouped,
    permuted,
    recomputed,
    unpermuted,
)

MESH = 16
"""Numbers of ranks in a mesh are fewer."""


class Exchange:
    """``ExpertParallel`` of one layer."""

    places: torch.Tensor | None = None
    shape: torch.Size
    splits: list[int]

    def partition(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed))

    def dispatch(self, _: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        x, counts = inputs
        ranks = mesh.shape[0]
        e = counts.shape[0] // ranks
        with torch.no_grad():
            group = all_to_all_single(counts, None, None, group=mesh.get_group())
            group = torch.ops._c10d_functional.wait_tensor(group)
            splits = [each.view(ranks, -1).sum(dim=1) for each in (counts, group)]
            splits.clear()
            self.splits = [x.shape[0] // ranks] * ranks
        x = all_to_all_single_autograd(x, self.splits, self.splits, mesh.get_group())
        self.shape, x, self.places, group = permuted(x, group, ranks, e)
        return x, group

    def combine(self, _: nn.Module, out: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        assert self.places is not None
        out = unpermuted(out, self.shape, self.places)
        return all_to_all_single_autograd(out, self.splits, self.splits, mesh.get_group())

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        distribute_module(module, mesh, self.partition, self.dispatch, self.combine)  # type: ignore[arg-type]


def forward(self: GroupedExperts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``GroupedExperts.forward`` of parameters that ranks share."""
    w1, w2, w3 = self.w1, self.w2, self.w3
    assert isinstance(w1, DTensor)
    assert isinstance(w2, DTensor)
    assert isinstance(w3, DTensor)
    return grouped(w1.to_local(), w2.to_local(), w3.to_local(), x, counts)


class Follow(torchtitan_tp.LocalFollow):  # type: ignore[no-untyped-call]
    """Follows int32, too, but for meshes."""

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.dtype is not torch.int32 or tensor.numel() > MESH:
            ResizedFollow.adopt(self, tensor, op)


@contextmanager
def surroundings() -> Iterator[None]:
    cached: Any = checkpoint._CachedTorchDispatchMode.__torch_dispatch__

    def run_if_absent(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return cached(self, func, types, args, kwargs)
        except RuntimeError as error:
            if "not found in" not in str(error):
                raise
            return func(*args, **(kwargs or {}))

    with (
        patch.object(checkpoint._CachedTorchDispatchMode, "__torch_dispatch__", run_if_absent),
        patch.object(torchtitan_tp, "LocalFollow", Follow),
        patch.object(torchtitan_tp, "COLLECTIVES", (*torchtitan_tp.COLLECTIVES, EXCHANGED)),
        patch.object(titan_models.GroupedExperts, "forward", forward),
        patch.object(fsdp, "run", torchtitan_tp.run_local),
    ):
        yield


def _prefetching(model: Transformer) -> None:
    """``apply_fsdp``: what each unit gathers ahead."""
    ends: list[Any] = [model.norm, model.output] if model.norm is not None else []
    first: list[Any] = [model.tok_embeddings] if model.tok_embeddings is not None else []
    blocks: list[Any] = list(model.layers.values())

    def of(block: Any) -> list[Any]:
        return [block, block.moe.experts] if block.moe_enabled else [block]

    for embedding in first if blocks else ():
        embedding.set_modules_to_forward_prefetch(blocks[:1])
    for block, after in zip(blocks, [*map(of, blocks[1:]), ends], strict=False):
        if after:
            block.set_modules_to_forward_prefetch(after)
    for head in ends[1:] if blocks else ():
        head.set_modules_to_backward_prefetch(blocks[-1:])
    for block, before in zip(blocks, [first, *map(of, blocks[:-1])], strict=False):
        if before:
            block.set_modules_to_backward_prefetch(before)


def traced(sizes: Sizes, sharding: Sharding, ranks: int, modes: Sequence[str]) -> Steps:
    """An iteration with experts that ``ranks`` ranks share."""
    shards = sharding.shards

    def meshes(_: Sharding) -> Any:
        dense = init_device_mesh("cpu", (shards,), mesh_dim_names=("fsdp",))
        sparse = init_device_mesh("cpu", (shards // ranks, ranks), mesh_dim_names=("efsdp", "ep"))
        return dense, sparse["efsdp"], sparse["ep"]

    def build(mesh: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
        dense, of_experts, together = mesh
        model = Transformer(sizes)
        blocks: list[Block] = list(model.layers.values())  # type: ignore[arg-type]
        for block in blocks:
            if block.moe_enabled:
                Exchange().apply(block.moe.experts, together)
        common: dict[str, Any] = {"mp_policy": sharding.policy}
        for name, block in enumerate(blocks):
            model.layers[str(name)] = recomputed(block, sizes, modes[name])
        fully_shard(model.tok_embeddings, mesh=dense, **common)
        placed = (lambda _: Shard(1)) if shards > sizes.experts else None
        for wrapped, block in zip(model.layers.values(), blocks, strict=True):
            if block.moe_enabled:
                fully_shard(block.moe.experts, mesh=of_experts, shard_placement_fn=placed, **common)
            fully_shard(wrapped, mesh=dense, **common)
        fully_shard([model.norm, model.output], mesh=dense, **common, reshard_after_forward=False)
        fully_shard(model, mesh=dense, **common)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        _prefetching(model)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.b, sizes.s)) for _ in range(2))

        def loss() -> torch.Tensor:
            logits = model(tokens)
            result = cross_entropy(logits, labels)
            del logits
            return result

        return model, loss

    with surroundings(), patch.object(fsdp, "mesh_of", meshes):
        return fsdp.traced(build, sharding)


def shared(model: Transformer, meshes: Any) -> None:
    """``apply_moe_ep_tp`` without tensor parallelism."""
    for block in model.layers.values():
        if block.moe_enabled:
            Exchange().apply(block.moe.experts, meshes.together)


def stage(
    sizes: Sizes,
    pipeline: Any,
    at: int,
    sharding: Sharding,
    mode: str,
    meshes: Any,
    *,
    ends_apart: bool,
    share: Callable[[Transformer, Any], None] = shared,
) -> Any:
    """One stage's model whose experts ranks ``share``; see ``titan_models.stage``."""
    assert ends_apart
    low, high = pipeline.edges[at : at + 2]
    model = Transformer(sizes)
    first, last = not at, at == pipeline.stages - 1
    for name in list(model.layers):
        if not low <= int(name) < high:
            del model.layers[name]
    model.tok_embeddings = model.tok_embeddings if first else None
    model.norm, model.output = (model.norm, model.output) if last else (None, None)
    model.skips_head = last and pipeline.chunks > 0
    blocks: dict[str, Any] = dict(model.layers.items())
    share(model, meshes)
    for name, block in blocks.items():
        model.layers[name] = recomputed(block, sizes, mode)
    common: dict[str, Any] = {"mp_policy": sharding.policy, "reshard_after_forward": False}
    if first:
        fully_shard(model.tok_embeddings, mesh=meshes.data, **common)
    placed = (lambda _: Shard(1)) if sharding.shards * pipeline.tensor > sizes.experts else None
    for name, block in blocks.items():
        if block.moe_enabled:
            fully_shard(block.moe.experts, mesh=meshes.of_experts, shard_placement_fn=placed, **common)
        fully_shard(model.layers[name], mesh=meshes.data, **common)
    if last:
        fully_shard([model.norm, model.output], mesh=meshes.data, **common)
    fully_shard(model, mesh=meshes.data, **common)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    _prefetching(model)
    return model


def traced_stages(
    sizes: Sizes, pipeline: Any, rank: int, sharding: Sharding, mode: str, ranks: int
) -> pipelining.Marks:
    """The last iteration of one pipeline rank, with experts that ``ranks`` ranks share."""
    with surroundings(), patch.object(pipelining, "run_local", torchtitan_tp.run_local):
        return pipelining.traced_pipeline(
            sizes, pipeline, rank, sharding, mode, ends_apart=True, make=stage, expert_ranks=ranks
        )
