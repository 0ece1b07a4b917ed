"""Tensor parallelism of torchtitan 0.2.2 on ``titan_models``, beside expert parallelism: ``apply_non_moe_tp`` of
``torchtitan/models/{qwen3,deepseek_v3}/infra/parallelize.py``, ``apply_moe_ep_tp`` of
``torchtitan/models/llama4/infra/parallelize.py``, and the classes that both take (``distributed/__init__.py``,
``distributed/expert_parallel.py``).

The fused norm is a stand-in on local tensors, with the placements that ``DTensor`` gives to its results
(``torch/distributed/tensor/_ops/_math_ops.py``, ``common_norm_forward_strategy`` and its backward): as the input's, and
a sum over ranks for the weight's gradient if the input is in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from memplan.trace.torchtitan import cross_entropy

from . import fsdp, pipelining, titan_experts, titan_loss, titan_models, torchtitan_tp
from .fsdp import Sharding, Steps, fake_ranks
from .megatron import FusedRMSNorm
from .titan_models import Sizes, Transformer, recomputed
from .torchtitan_tp import run_local


def waited(x: Any) -> Any:
    """The local tensor of a ``DTensor``, as a kernel is given it."""
    local: Any = x.to_local()
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local  # type: ignore[no-untyped-call]


class NormOfParts(torch.autograd.Function):
    """``FusedRMSNorm`` of ``DTensor``s."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any) -> Any:
        local = waited(input)
        out = torch.empty_like(local, memory_format=torch.contiguous_format)
        ctx.save_for_backward(input, weight, torch.empty((*local.shape[:-1], 1), dtype=torch.float32))
        return DTensor.from_local(out, input.device_mesh, input.placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        input, weight, _ = ctx.saved_tensors
        mesh, placements = input.device_mesh, input.placements
        if gradient.placements != placements:
            gradient = gradient.redistribute(placements=placements)
        waited(gradient)
        local = torch.empty_like(input.to_local(), memory_format=torch.contiguous_format)
        summed = [Partial() if isinstance(one, Shard) else Replicate() for one in placements]
        own = torch.empty_like(weight.to_local())
        of = partial(DTensor.from_local, run_check=False)
        return of(local, mesh, placements), of(own, mesh, summed)


def norm(self: titan_models.Norm, x: torch.Tensor) -> torch.Tensor:
    function: Any = NormOfParts if isinstance(x, DTensor) else FusedRMSNorm
    return function.apply(x, self.weight)  # type: ignore[no-any-return]


class NoParallel(ParallelStyle):
    """Of a module that every rank runs whole."""

    def __init__(self, *, local: bool = True) -> None:
        super().__init__()
        self.local = local

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
            if x.placements != (Replicate(),):
                x = x.redistribute(placements=(Replicate(),), async_op=True)
            return (x, *inputs[1:])

        def made(_: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
            if out.placements != (Replicate(),):
                out = out.redistribute(placements=(Replicate(),), async_op=True)
            return out.to_local() if self.local else out

        return distribute_module(module, mesh, None, given, made)


def block_plan(sizes: Sizes, block: Any) -> dict[str, ParallelStyle]:
    """``apply_non_moe_tp`` of both models."""
    whole, gathered = (Shard(1), Replicate()), (Replicate(), Replicate())
    plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=gathered),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
    }
    columns = partial(ColwiseParallel, use_local_output=False)
    if not sizes.latent:
        plan |= {f"attention.{name}": columns() for name in ("wq", "wk", "wv")}
        plan |= {f"attention.{name}": SequenceParallel(sequence_dim=2) for name in ("q_norm", "k_norm")}
    else:
        heads = (Shard(1),) * 3
        inner = PrepareModuleInput(input_layouts=heads, desired_input_layouts=heads, use_local_output=True)
        plan |= {f"attention.{name}": NoParallel(local=False) for name in ("wkv_a", "kv_norm")}
        plan |= {"attention.wkv_b": columns(), "attention.inner_attention": inner}
        if sizes.q_rank:
            plan |= {f"attention.{name}": NoParallel(local=False) for name in ("wq_a", "q_norm")}
            plan |= {"attention.wq_b": columns()}
        else:
            plan |= {"attention.wq": columns()}
    if not block.moe_enabled:
        plan |= {
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
    return plan


class Reorderer(ParallelStyle):
    """``ReordererSequenceParallel``."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            rows = inputs[0].shape[0] // mesh.size()
            at = rows * mesh.get_local_rank()
            return tuple(x[at : at + rows] for x in inputs)

        def made(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            scores, order, counts = outputs
            order = order + scores.shape[0] * mesh.get_local_rank()
            return scores, order, counts

        return distribute_module(module, mesh, None, given, made)


class Experts(ParallelStyle):
    """``TensorParallel`` of grouped experts, whose rows every rank has."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def partition(_: str, module: Any, mesh: DeviceMesh) -> None:
            for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
                placed = distribute_tensor(getattr(module, name), mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(placed))

        def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            rows, counts = inputs
            return DTensor.from_local(rows, mesh, (Replicate(),)).to_local(grad_placements=(Partial(),)), counts

        return distribute_module(module, mesh, partition, given)


class ExchangedParts(titan_experts.Exchange):
    """``ExpertTensorParallel``; its meshes are cut out of the whole one outside of fake tensors."""

    def __init__(self, together: DeviceMesh, parts: DeviceMesh) -> None:
        self.together, self.parts = together, parts

    def partition(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
            placed = distribute_tensor(getattr(module, name), mesh, [Shard(0), Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed))

    def dispatch(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        rows, counts = inputs
        rows = DTensor.from_local(rows, self.parts, (Replicate(),)).to_local(grad_placements=(Partial(),))
        return super().dispatch(module, (rows, counts), self.together)

    def combine(self, module: nn.Module, out: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return super().combine(module, out, self.together)


def moe_plan(moe: titan_models.MoE, *, apart: bool) -> dict[str, ParallelStyle]:
    """``apply_moe_ep_tp``; ``apart``: ranks of tensor parallelism have other experts."""
    plan: dict[str, ParallelStyle] = {
        "moe": PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Partial(),),
            desired_output_layouts=(Shard(1),),
        ),
        "moe.router.gate": NoParallel(),
    }
    if apart:
        plan["moe.reorderer"] = Reorderer()
    if moe.shared_experts is not None:
        plan |= {
            "moe.shared_experts.w1": ColwiseParallel(),
            "moe.shared_experts.w2": RowwiseParallel(output_layouts=Partial()),
            "moe.shared_experts.w3": ColwiseParallel(),
        }
    return plan


def apply_tp(model: Transformer, sizes: Sizes, mesh: DeviceMesh, sparse: Any, *, parallel_loss: bool) -> None:
    """``sparse``: the meshes of ranks with other experts, of those with parts of them, and of both."""
    together, parts, both = sparse
    output = Shard(-1) if parallel_loss else Replicate()
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=output, use_local_output=not parallel_loss)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"tok_embeddings": embedding, "norm": SequenceParallel(), "output": head}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        parallelize_module(block, mesh, block_plan(sizes, block))
        if not block.moe_enabled:
            continue
        moe: Any = block.moe
        parallelize_module(block, mesh, moe_plan(moe, apart=together is not None and parts is None))
        if together is None:
            parallelize_module(moe.experts, mesh, Experts())
        elif parts is None:
            titan_experts.Exchange().apply(moe.experts, together)
        else:
            ExchangedParts(together, parts).apply(moe.experts, both)


@contextmanager
def surroundings(ranks: int) -> Iterator[None]:
    """As with experts alone; without experts apart they keep their own padding."""
    grouped = titan_experts.forward if ranks > 1 else padded
    with (
        titan_experts.surroundings(),
        patch.object(titan_models.Norm, "forward", norm),
        patch.object(titan_models.GroupedExperts, "forward", grouped),
    ):
        yield


def padded(self: titan_models.GroupedExperts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``GroupedExperts.forward`` of parts: padding is there unless the mesh is that of expert parallelism."""
    w1, w2, w3 = (one.to_local() if isinstance(one, DTensor) else one for one in (self.w1, self.w2, self.w3))
    return self.padded(w1, w2, w3, x, counts)


class Headless(Transformer):
    """Hidden states (n, h) leave the model, on every rank all (``Decoder.forward`` with ``_skip_lm_head``)."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.table)
        h = torchtitan_tp.Headless.everywhere(self.norm(h))
        return h.view(-1, h.shape[-1])


def traced(
    sizes: Sizes,
    sharding: Sharding,
    tp: int,
    modes: Sequence[str],
    *,
    ranks: int = 1,
    etp: int = 1,
    parallel_loss: bool = True,
    chunks: int = 0,
) -> Steps:
    """An iteration with tensor parallelism, and experts that ``ranks`` ranks share; ``chunks`` of the loss."""
    shards = sharding.shards
    world = shards * tp

    def meshes(_: Sharding) -> Any:
        dense = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("fsdp", "tp"))
        if ranks == 1:
            return dense["fsdp"], dense["tp"], dense["fsdp"], (None, None, None)
        if etp == 1:
            sparse = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("efsdp", "ep"))
            return dense["fsdp"], dense["tp"], sparse["efsdp"], (sparse["ep"], None, None)
        sparse = init_device_mesh("cpu", (world // ranks // etp, ranks, etp), mesh_dim_names=("efsdp", "ep", "etp"))
        both = (sparse["ep"], sparse["etp"], sparse["ep", "etp"])
        return dense["fsdp"], dense["tp"], sparse["efsdp"], both

    def build(mesh: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
        dense, parts, of_experts, sparse = mesh
        model = Transformer(sizes)
        apply_tp(model, sizes, parts, sparse, parallel_loss=parallel_loss)
        if chunks:
            torchtitan_tp.without_head(model, Headless)
        blocks: list[Any] = list(model.layers.values())
        common: dict[str, Any] = {"mp_policy": sharding.policy}
        for name, block in enumerate(blocks):
            model.layers[str(name)] = recomputed(block, sizes, modes[name])
        fully_shard(model.tok_embeddings, mesh=dense, **common)
        placed = (lambda _: Shard(1)) if world // etp > sizes.experts else None
        for wrapped, block in zip(model.layers.values(), blocks, strict=True):
            if block.moe_enabled and ranks > 1:
                fully_shard(block.moe.experts, mesh=of_experts, shard_placement_fn=placed, **common)
            fully_shard(wrapped, mesh=dense, **common)
        fully_shard([model.norm, model.output], mesh=dense, **common, reshard_after_forward=False)
        fully_shard(model, mesh=dense, **common)
        for module in model.modules():
            if isinstance(module, FSDPModule) and ranks > 1:
                module.set_gradient_divide_factor(1.0)
        if ranks > 1:
            titan_experts._prefetching(model)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.b, sizes.s)) for _ in range(2))

        def loss() -> torch.Tensor:
            logits = model(tokens)
            if chunks:
                return titan_loss.chunked(logits, labels.view(-1), model.output, chunks, parts.get_group())
            result = cross_entropy(logits, labels)
            del logits
            return result

        return model, loss

    with (
        surroundings(ranks),
        patch.object(fsdp, "mesh_of", meshes),
        patch.object(fsdp, "fake_ranks", lambda _: fake_ranks(world)),
        loss_parallel() if parallel_loss and not chunks else nullcontext(),
    ):
        return fsdp.traced(build, sharding)


def traced_stages(
    sizes: Sizes, pipeline: Any, rank: int, sharding: Sharding, mode: str, ranks: int
) -> pipelining.Marks:
    """The last iteration of one pipeline rank, with experts that ``ranks`` ranks share, and tensor parallelism."""

    def share(model: Transformer, meshes: Any) -> None:
        apply_tp(model, sizes, meshes.tensor, (meshes.together, None, None), parallel_loss=pipeline.parallel_loss)
        if model.skips_head:
            torchtitan_tp.without_head(model, Headless)

    make = partial(titan_experts.stage, share=share)
    with surroundings(ranks), patch.object(pipelining, "run_local", run_local):
        return pipelining.traced_pipeline(
            sizes, pipeline, rank, sharding, mode, ends_apart=True, make=make, expert_ranks=ranks
        )
