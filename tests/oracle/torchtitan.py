"""torchtitan's Llama (``memplan.trace.torchtitan``: the reference modules) sharded as ``parallelize_llama.py``
does, with dtypes and recompute that no plan has, too; followed by the tests' own tracer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from memplan.trace.job import Checkpointing, Part, Torchtitan
from memplan.trace.torchtitan import Transformer, cross_entropy, recomputed as recomputed_as

from .fsdp import Sharding


@dataclass(frozen=True)
class Sizes:
    """Of one model and one micro-batch."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    layers: int
    b: int
    s: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def settings_of(sizes: Sizes) -> Torchtitan:
    return Torchtitan(
        sizes.hidden,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.ffn,
        sizes.vocab,
        sizes.layers,
        recompute="none",
        every=1,
        tensor=1,
        parallel_loss=False,
        ends_apart=False,
    )


def llama(sizes: Sizes, part: Part | None = None) -> Transformer:
    """The model, or a stage's part of it."""
    whole = Part(0, sizes.layers, first=True, last=True)
    return Transformer(settings_of(sizes), sizes.s, part or whole).train()


def recomputed(block: nn.Module, sizes: Sizes, mode: str) -> nn.Module:
    modes: dict[str, Checkpointing] = {"none": "none", "full": "full", "op": "op"}
    return recomputed_as(block, replace(settings_of(sizes), recompute=modes[mode]), 0)


def builder(
    sizes: Sizes,
    sharding: Sharding,
    modes: Sequence[str],
    *,
    ends_apart: bool,
    reshard_ends: bool = False,
    convert: Callable[[nn.Module], object] = lambda _: None,
) -> Callable[[DeviceMesh], tuple[Any, Callable[[], torch.Tensor]]]:
    """What makes the model; ``modes``: recompute of each block; ``ends_apart``: embedding, and norm with head,
    are units of their own, as later releases have it, and norm with head is resharded (``reshard_ends``) where all
    units are; ``convert``: what becomes of the model before."""

    def build(mesh: DeviceMesh) -> tuple[Any, Callable[[], torch.Tensor]]:
        model = llama(sizes)
        convert(model)
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": sharding.policy}
        if ends_apart:
            fully_shard(model.tok_embeddings, **common)
            fully_shard([model.norm, model.output], **common, reshard_after_forward=reshard_ends)
        for name, block in list(model.layers.items()):
            kept = not ends_apart and int(name) == sizes.layers - 1
            model.layers[name] = recomputed(block, sizes, modes[int(name)])
            fully_shard(model.layers[name], **common, reshard_after_forward=not kept)
        fully_shard(model, **common)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.b, sizes.s)) for _ in range(2))

        def loss() -> torch.Tensor:
            logits = model(tokens)
            result = cross_entropy(logits, labels)
            del logits
            return result

        return model, loss

    return build
