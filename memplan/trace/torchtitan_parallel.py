"""What torchtitan does to its Llama before it is trained: tensor parallelism, recompute, sharding, in that order.

``torchtitan/parallelisms/parallelize_llama.py`` of December 2024 (commit 9dec370); units of their own for embedding,
and for norm and head, as ``apply_fsdp`` of July 2025 has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .job import Job
from .models import DTYPES
from .torchtitan_model import Transformer
from .torchtitan_settings import Part, Torchtitan

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""Operators whose outputs selective recompute keeps; of products every second (``_get_custom_policy``). cuDNN's
attention, which PyTorch takes on Hopper and Blackwell by now, is in torchtitan's list since then, too."""


def made(
    job: Job, settings: Torchtitan, part: Part, numbers: Iterator[int], data: DeviceMesh, tensor: DeviceMesh | None
) -> Transformer:
    """A stage's model on ``meta``, sharded over ``data`` (and ``tensor``, the tensor-parallel ranks). ``numbers`` count
    the layers of a rank, from 0."""
    before = torch.get_default_dtype()
    assert job.fsdp is not None
    torch.set_default_dtype(DTYPES[job.fsdp.parameters])
    try:
        with torch.device("meta"):
            model = Transformer(settings, job.s, part).train()
    finally:
        torch.set_default_dtype(before)
    if tensor is not None:
        apply_tp(model, tensor, parallel_loss=settings.parallel_loss)
    for name, block in list(model.layers.items()):
        model.layers[name] = recomputed(block, settings, next(numbers))
    apply_fsdp(job, settings, model, data)
    return model


def layer_numbers() -> Iterator[int]:
    """``ptd_checkpoint._count``: blocks are counted through all stages of a rank."""
    return count()


def apply_tp(model: Transformer, mesh: DeviceMesh, *, parallel_loss: bool) -> None:
    """``apply_tp``, with sequence parallelism. A stage has not every module of the plan."""
    output = Shard(-1) if parallel_loss else Replicate()
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=output, use_local_output=not parallel_loss)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"tok_embeddings": embedding, "norm": SequenceParallel(), "output": head}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        parallelize_module(block, mesh, _block_plan())


def _block_plan() -> dict[str, Any]:
    whole, gathered = (Shard(1), None), (Replicate(), None)
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=gathered),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def recomputed(block: nn.Module, settings: Torchtitan, number: int) -> nn.Module:
    """``_apply_ac_to_transformer_block``."""
    wrap: Any = checkpoint_wrapper
    if settings.recompute == "op":
        return wrap(block, context_fn=_per_operator, preserve_rng_state=False)  # type: ignore[no-any-return]
    if settings.recompute == "full" and (number + 1) % settings.every == 0:
        return wrap(block, preserve_rng_state=False)  # type: ignore[no-any-return]
    return block


def _per_operator() -> Any:
    """Contexts that keep attention and every second matrix product, beginning with the first."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def apply_fsdp(job: Job, settings: Torchtitan, model: Transformer, mesh: DeviceMesh) -> None:
    """``apply_fsdp``: every block is a unit, and so is the model; the last block stays whole behind forward, unless
    the ends are units of their own. Nothing is resharded in a pipeline. That gradients are not divided
    (``disable_fsdp_gradient_division``, of January 2026) is seen where one rank has them all: torchtitan shards there
    since April 2026."""
    assert job.fsdp is not None
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=DTYPES[job.fsdp.reduce])
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    reshard = job.fsdp.reshard
    if settings.ends_apart and model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **common, reshard_after_forward=reshard)
    if settings.ends_apart and model.norm is not None and model.output is not None:
        fully_shard([model.norm, model.output], **common, reshard_after_forward=False)
    for name, block in model.layers.items():
        kept = not settings.ends_apart and int(name) == settings.layers - 1
        fully_shard(block, **common, reshard_after_forward=reshard and not kept)
    if settings.stages is not None:
        common["reshard_after_forward"] = False
    fully_shard(model, **common)
    if job.fsdp.shards == 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
