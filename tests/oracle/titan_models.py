"""torchtitan's Qwen 3 and DeepSeek V3 in plain PyTorch: reference modules whose operators, saved tensors and names are
those of ``torchtitan/models/{moe,qwen3,deepseek_v3}`` of release 0.2.2, and what ``parallelize.py`` does to them.

Stand-ins: two kernels of CUDA that fake tensors of the CPU do not have (``histc`` of int64, Triton's that fills
indices), the fused norm, and cuDNN's attention where values have heads of another size, asked for by its name.
Shapes: b micro-batch, s sequence, h hidden, a heads, E experts of all ranks, e of this one.
"""

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

from memplan.trace.torchtitan import FeedForward as _FeedForward, cross_entropy

from . import titan_loss
from .fsdp import Sharding, undivided
from .megatron import FusedRMSNorm

ALIGNED = 8


@dataclass(frozen=True)
class Sizes:
    """Of one model and one micro-batch."""

    hidden: int
    heads: int
    ffn: int
    vocab: int
    layers: int
    b: int
    s: int
    kv_heads: int = 0
    head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    plain: int = 0
    turned: int = 0
    width: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared: int = 0
    dense: int = 0
    """Layers, the first ones, without experts."""
    score: str = "softmax"
    normed: bool = True
    groups: int = 0
    group_top_k: int = 0
    score_first: bool = False
    tied: bool = False
    """Embedding and head share a weight."""

    @property
    def n(self) -> int:
        return self.b * self.s

    @property
    def latent(self) -> bool:
        return self.kv_rank > 0


class Norm(nn.Module):
    """``nn.RMSNorm`` as one kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedRMSNorm.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Widths:
    """What a feed-forward needs to know."""

    hidden: int
    ffn: int


def feed_forward(hidden: int, ffn: int) -> nn.Module:
    """As torchtitan's Llama has it."""
    return _FeedForward(Widths(hidden, ffn))  # type: ignore[arg-type]


# -- experts ----------------------------------------------------------------------------------------


class Router(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.sizes = sizes

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        scores = self.gate(x)
        if sizes.score == "sigmoid":
            scores = torch.sigmoid(scores.to(torch.float32))
        else:
            scores = functional.softmax(scores.to(torch.float32), dim=1)
        choice = scores + bias
        if sizes.groups:
            choice = self.within_groups(choice)
        _values, chosen = torch.topk(choice, k=sizes.top_k, dim=-1, sorted=False)
        top = scores.gather(dim=1, index=chosen)
        if sizes.normed:
            total = top.sum(dim=-1, keepdim=True) + 1e-20
            top = top / total
        top = top * 1.0
        return top, chosen, counted(sizes)

    def within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        grouped = choice.view(-1, sizes.groups, sizes.experts // sizes.groups)
        two, _places = grouped.topk(2, dim=-1)
        best = two.sum(dim=-1)
        _places, chosen = torch.topk(best, k=sizes.group_top_k, dim=-1, sorted=False)
        mask = torch.ones(best.shape, dtype=torch.bool)  # ``ones_like``, by which the gradient of the loss is known
        mask.scatter_(1, chosen, False)
        return grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).view(-1, sizes.experts)


def counted(sizes: Sizes) -> torch.Tensor:
    """``histc`` of int64."""
    return torch.empty(sizes.experts, dtype=torch.int64)


class TokenReorderer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, top: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = counted(self.sizes)
        order = torch.argsort(chosen.view(-1), stable=True)
        scores = top.view(-1)[order]
        return scores, order, counts


def permute_indices(
    counts: torch.Tensor, e: int, ranks: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``generate_permute_indices``."""
    _starts = torch.cumsum(counts, 0) - counts  # what a kernel reads
    total = counts.view(ranks, -1).sum(0)
    total = torch.clamp_min(total, ALIGNED)
    sizes = ((total + ALIGNED - 1) // ALIGNED * ALIGNED).to(torch.int32)
    ends = torch.cumsum(sizes, 0)
    _begins = ends - sizes  # what a kernel reads
    places = torch.full((length,), -1, dtype=torch.int32)
    return places, sizes, ends.to(torch.int32)


def permuted(
    x: torch.Tensor, counts: torch.Tensor, ranks: int, e: int
) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_permute``."""
    length = -(-(x.shape[0] + e * ALIGNED) // ALIGNED) * ALIGNED
    with torch.no_grad():
        places, counts, _ends = permute_indices(counts, e, ranks, length)
    x = torch.vstack((x, x.new_zeros(x.shape[-1])))
    shape = x.shape
    x = x[places, :]
    return shape, x, places, counts


def unpermuted(out: torch.Tensor, shape: torch.Size, places: torch.Tensor) -> torch.Tensor:
    """``_unpermute``."""
    whole = out.new_empty(shape)
    whole[places, :] = out
    return whole[:-1]


def grouped(
    w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, x: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """``_run_experts_grouped_mm``."""
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    multiply: Any = torch._grouped_mm
    h = functional.silu(multiply(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=offsets))
    h = h * multiply(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=offsets)
    return multiply(h, w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)  # type: ignore[no-any-return]


class GroupedExperts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        e, h, f = sizes.experts, sizes.hidden, sizes.expert_ffn
        self.w1 = nn.Parameter(torch.empty(e, f, h))
        self.w2 = nn.Parameter(torch.empty(e, h, f))
        self.w3 = nn.Parameter(torch.empty(e, f, h))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = self.w1, self.w2, self.w3
        return self.padded(w1, w2, w3, x, counts)

    @staticmethod
    def padded(
        w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, x: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """``indices_padding_wrapper``."""
        shape, x, places, counts = permuted(x, counts, 1, w1.shape[0])
        out = grouped(w1, w2, w3, x, counts)
        return unpermuted(out, shape, places)


class MoE(nn.Module):
    expert_bias: torch.Tensor
    tokens_per_expert: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.experts = GroupedExperts(sizes)
        self.router = Router(sizes)
        self.reorderer = TokenReorderer(sizes)
        self.shared_experts = feed_forward(sizes.hidden, sizes.shared) if sizes.shared else None
        self.sizes = sizes
        self.register_buffer("expert_bias", torch.zeros(sizes.experts))
        self.register_buffer("tokens_per_expert", torch.zeros(sizes.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        b, s, h = x.shape
        x = x.view(-1, h)
        top, chosen, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        scores, order, counts = self.reorderer(top, chosen)
        routed = x[order // sizes.top_k]
        if sizes.score_first:
            routed = (routed.to(torch.float32) * scores.reshape(-1, 1)).to(x.dtype)
        given = self.experts(routed, counts)
        out = self.shared_experts(x) if self.shared_experts is not None else None
        unsorted = torch.zeros((b * s * sizes.top_k, h), dtype=given.dtype)
        unsorted[order] = given
        unsorted = unsorted.reshape(-1, sizes.top_k, h)
        if sizes.score_first:
            summed = unsorted.sum(dim=1)
        else:
            summed = torch.bmm(top.reshape(-1, 1, sizes.top_k), unsorted.float()).to(x.dtype).squeeze(1)
        if out is None:
            return summed.reshape(b, s, h)
        return (out + summed).reshape(b, s, h)  # type: ignore[no-any-return]


# -- attention --------------------------------------------------------------------------------------


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def by_cosines(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``apply_rotary_emb`` of Qwen 3."""
    d = q.shape[-1]
    table = table[0 : q.shape[1]].view(-1, q.shape[1], 1, 2 * d)
    cos = table[..., :d].to(dtype=q.dtype)
    sin = table[..., d:].to(dtype=q.dtype)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out.type_as(q), k_out.type_as(k)


class InnerAttention(nn.Module):
    """``ScaledDotProductAttentionWrapper``, of values with as many features as keys, or with others."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool = False) -> torch.Tensor:
        if q.shape[-1] == v.shape[-1]:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(q, k, v, None, torch.is_grad_enabled(), 0.0, True, False, scale=1.0)[0]  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Of Qwen 3."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.d = sizes.head_dim
        self.q_norm, self.k_norm = Norm(self.d), Norm(self.d)
        self.wq = nn.Linear(sizes.hidden, sizes.heads * self.d, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * self.d, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * self.d, bias=False)
        self.wo = nn.Linear(sizes.heads * self.d, sizes.hidden, bias=False)
        self.inner_attention = InnerAttention()
        self.enable_gqa = sizes.heads > sizes.kv_heads

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(b, s, -1, self.d)
        k = k.view(b, s, -1, self.d)
        v = v.view(b, s, -1, self.d)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = by_cosines(q, k, table)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        out = self.inner_attention(q, k, v, enable_gqa=self.enable_gqa).transpose(1, 2).contiguous()
        out = out.view(b, s, -1)
        return self.wo(out)  # type: ignore[no-any-return]


def by_complex(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``apply_rotary_emb`` of DeepSeek V3."""
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    table = table[0 : x.shape[1]].view(1, x.shape[1], 1, x.shape[-1])
    y = torch.view_as_real(x * table).flatten(3)
    return y.to(dtype)


class LatentAttention(nn.Module):
    """Of DeepSeek V3."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        a, h, features = sizes.heads, sizes.hidden, sizes.plain + sizes.turned
        if not sizes.q_rank:
            self.wq = nn.Linear(h, a * features, bias=False)
        else:
            self.wq_a = nn.Linear(h, sizes.q_rank, bias=False)
            self.q_norm = Norm(sizes.q_rank)
            self.wq_b = nn.Linear(sizes.q_rank, a * features, bias=False)
        self.wkv_a = nn.Linear(h, sizes.kv_rank + sizes.turned, bias=False)
        self.kv_norm = Norm(sizes.kv_rank)
        self.wkv_b = nn.Linear(sizes.kv_rank, a * (sizes.plain + sizes.width), bias=False)
        self.wo = nn.Linear(a * sizes.width, h, bias=False)
        self.inner_attention = InnerAttention()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        b, s, _ = x.size()
        if not sizes.q_rank:
            q = self.wq(x)
        else:
            q = self.wq_a(x)
            q = self.wq_b(self.q_norm(q))
        q = q.view(b, s, -1, sizes.plain + sizes.turned)
        q_plain, q_turned = torch.split(q, [sizes.plain, sizes.turned], dim=-1)
        q_turned = by_complex(q_turned, table)
        q = torch.cat([q_plain, q_turned], dim=-1)
        kv = self.wkv_a(x)
        kv, k_turned = torch.split(kv, [sizes.kv_rank, sizes.turned], dim=-1)
        k_turned = by_complex(k_turned.unsqueeze(2), table)
        kv = self.wkv_b(self.kv_norm(kv))
        kv = kv.view(b, s, -1, sizes.plain + sizes.width)
        k_plain, v = torch.split(kv, [sizes.plain, sizes.width], dim=-1)
        k = torch.cat([k_plain, k_turned.expand(-1, -1, sizes.heads, -1)], dim=-1)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        out = self.inner_attention(q, k, v)
        out = out.transpose(1, 2).contiguous()
        out = out.view(b, s, -1)
        return self.wo(out)  # type: ignore[no-any-return]


# -- the model --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.attention: nn.Module = LatentAttention(sizes) if sizes.latent else Attention(sizes)
        latent_norms = (Norm(sizes.hidden), Norm(sizes.hidden)) if sizes.latent else None
        self.moe_enabled = sizes.experts > 0 and layer >= sizes.dense
        if latent_norms is not None:
            self.attention_norm, self.ffn_norm = latent_norms
        if self.moe_enabled:
            self.moe = MoE(sizes)
        else:
            self.feed_forward = feed_forward(sizes.hidden, sizes.ffn)
        if latent_norms is None:
            self.attention_norm, self.ffn_norm = Norm(sizes.hidden), Norm(sizes.hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.moe(self.ffn_norm(x)) if self.moe_enabled else x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    table: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings: Any = nn.Embedding(sizes.vocab, sizes.hidden)
        if sizes.latent:
            table = torch.empty(sizes.s, sizes.turned // 2, dtype=torch.complex64)
        else:
            table = torch.empty(sizes.s, 2 * sizes.head_dim)
        self.register_buffer("table", table)
        self.layers = nn.ModuleDict({str(layer): Block(sizes, layer) for layer in range(sizes.layers)})
        self.norm: Any = Norm(sizes.hidden)
        self.output: Any = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.skips_head = False
        if sizes.tied:
            self.tok_embeddings.weight = self.output.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.table)
        h = self.norm(h) if self.norm is not None else h
        if self.skips_head:
            return h.view(-1, h.shape[-1])
        return self.output(h) if self.output is not None else h


# -- recompute and sharding -------------------------------------------------------------------------

aten: Any = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.max.default,
}
"""``_op_sac_save_list`` of both models; of products every second is kept."""
EXCHANGED = torch.ops._c10d_functional.all_to_all_single.default
"""In that of DeepSeek V3 alone."""


def contexts(kept: set[Any]) -> Callable[[], Any]:
    """``_apply_op_sac``."""

    def made() -> Any:
        products = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if operator is aten.mm.default:
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return made


def recomputed(block: nn.Module, sizes: Sizes, mode: str) -> nn.Module:
    """``_apply_ac_to_transformer_block``, which recomputes to the end (``early_stop``)."""
    wrap: Any = checkpoint_wrapper
    kept = KEPT | ({EXCHANGED} if sizes.latent else set())
    if mode == "op":
        return wrap(block, context_fn=contexts(kept), preserve_rng_state=False, early_stop=False)  # type: ignore[no-any-return]
    if mode == "full":
        return wrap(block, preserve_rng_state=False, early_stop=False)  # type: ignore[no-any-return]
    return block


def builder(
    sizes: Sizes,
    sharding: Sharding,
    modes: Sequence[str],
    chunks: int = 0,
    *,
    convert: Callable[[nn.Module], object] = lambda _: None,
) -> Callable[[DeviceMesh], tuple[Any, Callable[[], torch.Tensor]]]:
    """What makes the model; ``modes``: recompute of each block; ``chunks`` of the loss, if it has some; ``convert``:
    what becomes of the model before.

    A weight that embedding and head share makes one unit of both and the norm, before the layers
    (``apply_fsdp_to_decoder`` of August 2026)."""

    def build(mesh: DeviceMesh) -> tuple[Any, Callable[[], torch.Tensor]]:
        model = Transformer(sizes)
        model.skips_head = chunks > 0
        convert(model)
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": sharding.policy}
        for name, block in list(model.layers.items()):
            model.layers[name] = recomputed(block, sizes, modes[int(name)])
        if sizes.tied:
            fully_shard([model.tok_embeddings, model.norm, model.output], **common, reshard_after_forward=False)
        else:
            fully_shard(model.tok_embeddings, **common)
        for block in model.layers.values():
            fully_shard(block, **common)
        if not sizes.tied:
            fully_shard([model.norm, model.output], **common, reshard_after_forward=False)
        fully_shard(model, **common)
        undivided(model, sharding)
        tokens, labels = (torch.randint(0, sizes.vocab, (sizes.b, sizes.s)) for _ in range(2))

        def loss() -> torch.Tensor:
            logits = model(tokens)
            if chunks:
                return titan_loss.chunked(logits, labels.view(-1), model.output, chunks)
            result = cross_entropy(logits, labels)
            del logits
            return result

        return model, loss

    return build


def stage(sizes: Sizes, pipeline: Any, at: int, sharding: Sharding, mode: str, meshes: Any, *, ends_apart: bool) -> Any:
    """One stage's model (``pipeline_module_split``, which leaves out what is another's; ``apply_fsdp`` with pipeline
    parallelism)."""
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
    common: dict[str, Any] = {"mesh": meshes.data, "mp_policy": sharding.policy, "reshard_after_forward": False}
    for name, block in list(model.layers.items()):
        model.layers[name] = recomputed(block, sizes, mode)
    if first:
        fully_shard(model.tok_embeddings, **common)
    for block in model.layers.values():
        fully_shard(block, **common)
    if last:
        fully_shard([model.norm, model.output], **common)
    fully_shard(model, **common)
    undivided(model, sharding)
    return model
