"""torchtitan's Llama 3 in plain PyTorch: a reference module whose operators, saved tensors and names are those of
``torchtitan/models/llama/model.py`` and ``norms.py`` of December 2024 (commit 9dec370).

Shapes: b micro-batch, s sequence, h hidden, a heads, d features of a head, v vocabulary.

What torchtitan does to it before it is trained follows, in its order: tensor parallelism, recompute, sharding.

``torchtitan/parallelisms/parallelize_llama.py`` of December 2024 (commit 9dec370); units of their own for embedding,
and for norm and head, as ``apply_fsdp`` of July 2025 has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .collectives import clear_caches
from .job import Job, Part, Torchtitan
from .models import DTYPES
from .storages import initialise
from .surroundings import FAKE, Surroundings

THETA = 500_000.0
"""Base of rotary embeddings: Llama 3's."""


class RMSNorm(nn.Module):
    """In fp32 inside; the product with the weight is in the input's dtype."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._normed(x.float()).type_as(x)
        return out * self.weight


def rotated(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``apply_rotary_emb``: queries and keys (b, s, a, d) times complex numbers (s, d / 2)."""
    q_complex = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_complex = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    table = table.view(1, table.shape[0], 1, table.shape[1])
    q_out = torch.view_as_real(q_complex * table).flatten(3)
    k_out = torch.view_as_real(k_complex * table).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
    """``repeat_kv``: (b, s, a / n, d) as (b, s, a, d)."""
    b, s, heads, d = x.shape
    return x if n == 1 else x.unsqueeze(3).expand(b, s, heads, n, d).reshape(b, s, heads * n, d)


class Attention(nn.Module):
    def __init__(self, sizes: Torchtitan) -> None:
        super().__init__()
        self.head_dim, self.repeats = sizes.head_dim, sizes.heads // sizes.kv_heads
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.wq = nn.Linear(sizes.hidden, queries, bias=False)
        self.wk = nn.Linear(sizes.hidden, keys, bias=False)
        self.wv = nn.Linear(sizes.hidden, keys, bias=False)
        self.wo = nn.Linear(queries, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (one.view(b, s, -1, self.head_dim) for one in (q, k, v))
        q, k = rotated(q, k, table)
        keys, values = repeated(k, self.repeats), repeated(v, self.repeats)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).contiguous().view(b, s, -1)
        return self.wo(out)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, sizes: Torchtitan) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    def __init__(self, sizes: Torchtitan) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.attention_norm, self.ffn_norm = RMSNorm(sizes.hidden), RMSNorm(sizes.hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), table)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Some layers, in the first stage behind the embedding, in the last before norm and head; modules of
    other stages are ``None`` (``pipeline_llama.py``, ``pipeline_llama_manual_split``)."""

    freqs_cis: torch.Tensor

    def __init__(self, sizes: Torchtitan, s: int, part: Part) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.hidden) if part.first else None
        self.register_buffer("freqs_cis", torch.empty(s, sizes.head_dim // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(sizes) for layer in range(part.low, part.high)})
        self.norm = RMSNorm(sizes.hidden) if part.last else None
        self.output = nn.Linear(sizes.hidden, sizes.vocab, bias=False) if part.last else None

    def fill_frequencies(self) -> None:
        """``precompute_freqs_cis``: of position and pair of features, in place."""
        s, pairs = self.freqs_cis.shape
        device = self.freqs_cis.device
        turns = 1.0 / (THETA ** (torch.arange(0, pairs, device=device).float() / pairs))
        angles = torch.outer(torch.arange(s, device=device).float(), turns)
        self.freqs_cis.copy_(torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(b, s) tokens, or another stage's (b, s, h), as (b, s, v) logits or (b, s, h)."""
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``loss_fn`` of ``train.py``: of (b, s, v) logits in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
}
"""Operators whose outputs selective recompute keeps; of products every second (``_get_custom_policy``). cuDNN's
attention, which PyTorch takes on Hopper and Blackwell by now, is in torchtitan's list since then, too; maxima are those
of tensors that float8 scales."""


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


def with_tensors(model: Transformer, within: Surroundings) -> None:
    """Gives a model on ``meta`` its tensors, and values if they are real."""
    model.to_empty(device=within.device)
    if not within.fake:
        initialise(model, seed=dist.get_rank())
        model.fill_frequencies()
