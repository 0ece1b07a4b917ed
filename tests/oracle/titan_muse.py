"""torchtitan's Muse Glimmer in plain PyTorch: reference modules whose operators, saved tensors and names are those of
``torchtitan/models/muse_glimmer/model.py`` and ``torchtitan/models/common`` of 21 August 2026 (commit b5bcd76), and
what ``parallelize.py``, ``activation_checkpoint.py`` and ``fsdp.py`` do to them.

``varlen_attn`` is PyTorch's own; the fused norm is a stand-in. Shapes: n tokens of a micro-batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn

from memplan.trace.torchtitan import cross_entropy

from . import titan_loss
from .fsdp import Sharding, undivided
from .megatron import FusedRMSNorm
from .titan_gpt_oss import Gathered, Metadata, contexts, kept
from .titan_models import feed_forward


@dataclass(frozen=True)
class Sizes:
    """Of one model and one micro-batch."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int
    b: int
    s: int
    interval: int = 4
    """Every so many layers one has no positions."""

    @property
    def n(self) -> int:
        return self.b * self.s


class _WithoutWeight(torch.autograd.Function):
    """``_fused_rms_norm`` as CUDA runs it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(x, torch.empty((*x.shape[:-1], 1), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format)


class Scaleless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WithoutWeight.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class GainNorm(nn.Module):
    """``RMSGainCenterNorm``."""

    def __init__(self, width: int, center: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.center = center

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight + self.center
        return FusedRMSNorm.apply(x, w)  # type: ignore[no-any-return, no-untyped-call]


class RoPE(nn.Module):
    """``ComplexRoPE``."""

    cache: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        table = torch.empty(sizes.s, sizes.head_dim // 2, dtype=torch.complex64)
        self.register_buffer("cache", table, persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prepared = self.prepared(positions)
        return self.applied(q, k, prepared)

    def prepared(self, positions: torch.Tensor) -> torch.Tensor:
        torch._assert_async(torch.all(positions <= self.cache.shape[0] - 1))
        rows = self.cache[positions]
        return rows.view(positions.shape[0], 1, self.cache.shape[-1])

    @staticmethod
    def applied(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        xq_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        xk_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        xq_out = torch.view_as_real(xq_ * cache).flatten(-2)
        xk_out = torch.view_as_real(xk_ * cache).flatten(-2)
        return xq_out.type_as(q), xk_out.type_as(k)


class QKV(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.wq = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = x.shape[0]
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq, xk, xv = (one.view(n, -1, self.head_dim) for one in (xq, xk, xv))
        return xq, xk, xv


class Varlen(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, masks: Metadata) -> torch.Tensor:
        result: Any = varlen_attn(
            q.to(torch.bfloat16),
            k.to(torch.bfloat16),
            v.to(torch.bfloat16),
            masks.places,
            masks.places,
            masks.longest,
            masks.longest,
            scale=0.125,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        return result.to(q.dtype)  # type: ignore[no-any-return]


class Attention(nn.Module):
    across: Any = None
    """Ranks of context parallelism."""

    def __init__(self, sizes: Sizes, *, turns: bool) -> None:
        super().__init__()
        self.turns = turns
        self.rope = RoPE(sizes)
        self.qkv_linear = QKV(sizes)
        self.wo = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.inner_attention = Varlen()
        self.q_norm = Scaleless()
        self.k_norm = Scaleless()
        self.o_gate = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=False)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        xq, xk, xv = self.qkv_linear(x)
        xq = self.q_norm(xq) * 5.47
        xk = self.k_norm(xk)
        if self.turns:
            xq, xk = self.rope(xq, xk, positions)
        if self.across is not None:
            output = self.gathering(xq, xk, xv, masks)
        else:
            output = self.inner_attention(xq, xk, xv, masks=masks).contiguous()
        output = output.view(n, -1)
        output = output * torch.sigmoid(self.o_gate(x))
        return self.wo(output)  # type: ignore[no-any-return]

    def gathering(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Metadata) -> torch.Tensor:
        every: Any = Gathered.apply(k, self.across), Gathered.apply(v, self.across)  # type: ignore[no-untyped-call]
        return self.inner_attention(q, *every, masks=masks).contiguous()  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.attention = Attention(sizes, turns=(sizes.layers - layer - 1) % sizes.interval != 0)
        self.feed_forward = feed_forward(sizes.hidden, sizes.ffn)
        self.attention_norm = GainNorm(sizes.hidden)
        self.ffn_norm = GainNorm(sizes.hidden)
        self.post_attention_norm = GainNorm(sizes.hidden)
        self.post_ffn_norm = GainNorm(sizes.hidden)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        h = x + self.post_attention_norm(self.attention(self.attention_norm(x), masks, positions))
        out = h + self.post_ffn_norm(self.feed_forward(self.ffn_norm(h)))
        return out  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


class Head(nn.Linear):
    """``SoftCappedLinear``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input).float()
        logits = 20.0 * torch.tanh(logits * 0.196 / 20.0)
        return logits  # noqa: RET504 (a variable, as there)


class Embedding(nn.Module):
    """``EmbeddingWithNorm``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.norm = Scaleless()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embedding(tokens))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(sizes)
        self.layers = nn.ModuleDict({str(layer): Block(sizes, layer) for layer in range(sizes.layers)})
        self.norm = GainNorm(sizes.hidden, 0.0)
        self.lm_head = Head(sizes.hidden, sizes.vocab, bias=False)
        self.skips_head = False

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, masks: Metadata) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, masks, positions)
        h = self.norm(h)
        if self.skips_head:
            return h  # type: ignore[no-any-return]
        return self.lm_head(h)  # type: ignore[no-any-return]


def recomputed(block: nn.Module, mode: str) -> nn.Module:
    wrap: Any = checkpoint_wrapper
    common: dict[str, Any] = {"preserve_rng_state": False, "early_stop": False}
    common |= {"context_fn": contexts(kept(), set())} if mode == "op" else {}
    return block if mode == "none" else wrap(block, **common)


def builder(
    sizes: Sizes,
    sharding: Sharding,
    modes: Sequence[str],
    chunks: int = 0,
    decoder: type[Decoder] = Decoder,
    *,
    context: bool = False,
) -> Callable[[DeviceMesh], tuple[Any, Callable[[], torch.Tensor]]]:
    """What makes the model; ``modes``: recompute of each block; ``chunks`` of the loss, if it has some.
    ``context``: all ranks share sequences, of which each has ``sizes.s`` tokens."""

    def build(mesh: DeviceMesh) -> tuple[Any, Callable[[], torch.Tensor]]:
        ranks = mesh.size() if context else 1
        model = decoder(replace(sizes, s=ranks * sizes.s))
        for block in model.layers.values() if context else ():
            attention: Any = block.attention
            attention.across = mesh.get_group()
        model.skips_head = chunks > 0
        given = sharding.policy
        policy = MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype, cast_forward_inputs=False)
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for name, block in list(model.layers.items()):
            model.layers[name] = recomputed(block, modes[int(name)])
        fully_shard(model.tok_embeddings, **common)
        fully_shard([model.norm, model.lm_head], **common, reshard_after_forward=False)
        for block in model.layers.values():
            fully_shard(block, **common)
        fully_shard(model, **common)
        undivided(model, sharding)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.n,)) for _ in range(2))
        positions = torch.arange(sizes.n)
        places = torch.zeros(2, dtype=torch.int32)
        read = [torch.randint(0, sizes.vocab, (ranks * sizes.n,)) for _ in range(2 * context)]

        def loss(_: Sequence[torch.Tensor] = read) -> torch.Tensor:
            logits = model(tokens, positions, Metadata(places, sizes.s))
            if chunks:
                return titan_loss.chunked(logits, labels, model.lm_head, chunks)
            result = cross_entropy(logits.unsqueeze(0), labels.unsqueeze(0))
            del logits
            return result

        return model, loss

    return build
