"""A Llama whose operators are those of torchtitan's (``torchtitan/models/llama/model.py`` of December 2024),
recomputed and sharded as ``parallelize_llama.py`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .fsdp import Sharding

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


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


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._normed(x.float()).type_as(x)
        return out * self.weight


def turned(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (b, s, a, d) turned by complex numbers (s, d / 2)."""
    q_complex = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_complex = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    table = table.view(1, table.shape[0], 1, table.shape[1])
    q_out = torch.view_as_real(q_complex * table).flatten(3)
    k_out = torch.view_as_real(k_complex * table).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
    b, s, heads, d = x.shape
    return x if n == 1 else x.unsqueeze(3).expand(b, s, heads, n, d).reshape(b, s, heads * n, d)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        keys = sizes.kv_heads * sizes.head_dim
        self.wq = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.wk = nn.Linear(sizes.hidden, keys, bias=False)
        self.wv = nn.Linear(sizes.hidden, keys, bias=False)
        self.wo = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        d, n = self.sizes.head_dim, self.sizes.heads // self.sizes.kv_heads
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = q.view(b, s, -1, d), k.view(b, s, -1, d), v.view(b, s, -1, d)
        q, k = turned(q, k, table)
        keys, values = repeated(k, n), repeated(v, n)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).contiguous().view(b, s, -1)
        return self.wo(out)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.attention_norm, self.ffn_norm = Norm(sizes.hidden), Norm(sizes.hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), table)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Llama(nn.Module):
    table: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.hidden)
        self.register_buffer("table", torch.empty(sizes.s, sizes.head_dim // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.layers)})
        self.norm = Norm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.table)
        h = self.norm(h)
        return self.output(h)  # type: ignore[no-any-return]


def per_operator() -> Any:
    """Contexts that keep attention and every second matrix product, beginning with the first."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def recomputed(block: nn.Module, mode: str) -> nn.Module:
    wrap: Any = checkpoint_wrapper
    if mode == "full":
        return wrap(block, preserve_rng_state=False)  # type: ignore[no-any-return]
    if mode == "op":
        return wrap(block, context_fn=per_operator, preserve_rng_state=False)  # type: ignore[no-any-return]
    return block


def builder(
    sizes: Sizes, sharding: Sharding, modes: Sequence[str], *, ends_apart: bool
) -> Callable[[DeviceMesh], tuple[Any, Callable[[], torch.Tensor]]]:
    """What makes the model; ``modes``: recompute of each block; ``ends_apart``: embedding, and norm with head,
    are units of their own, as later releases have it."""

    def build(mesh: DeviceMesh) -> tuple[Any, Callable[[], torch.Tensor]]:
        model = Llama(sizes).train()
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": sharding.policy}
        if ends_apart:
            fully_shard(model.tok_embeddings, **common)
            fully_shard([model.norm, model.output], **common, reshard_after_forward=False)
        for name, block in list(model.layers.items()):
            kept = not ends_apart and int(name) == sizes.layers - 1
            model.layers[name] = recomputed(block, modes[int(name)])
            fully_shard(model.layers[name], **common, reshard_after_forward=not kept)
        fully_shard(model, **common)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.b, sizes.s)) for _ in range(2))

        def loss() -> torch.Tensor:
            logits = model(tokens)
            result = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
            del logits
            return result

        return model, loss

    return build
