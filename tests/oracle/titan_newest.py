"""torchtitan's Llama and Qwen 3 in plain PyTorch: reference modules whose operators, saved tensors and names are those
of ``torchtitan/models/llama3/model.py``, ``qwen3/model.py`` and ``models/common`` of 21 August 2026 (b5bcd76)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional

from . import titan_gpt_oss, titan_muse
from .titan_gpt_oss import Metadata
from .titan_models import Norm, feed_forward
from .titan_muse import Sizes


class FusedQKV(titan_gpt_oss.FusedQKV):
    def __init__(self, sizes: Sizes) -> None:
        given: Any = sizes
        super().__init__(given)
        features = self.wqkv.out_features
        self.wqkv = nn.Linear(sizes.hidden, features, bias=False)


def _waited(x: torch.Tensor) -> torch.Tensor:
    wait: Any = funcol.wait_tensor
    return wait(x)  # type: ignore[no-any-return]


class Gathered(torch.autograd.Function):
    """``_AllGatherShard`` of spmd_types 0.3.1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _waited(funcol.all_gather_tensor(x, 0, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return _waited(funcol.reduce_scatter_tensor(gradient, "sum", 0, ctx.group)), None


class Attention(nn.Module):
    """``GQAttention``."""

    across: Any = None
    """Ranks of context parallelism."""

    def __init__(self, sizes: Sizes, *, norms: bool) -> None:
        super().__init__()
        given: Any = sizes
        self.rope = titan_gpt_oss.RoPE(given) if norms else titan_muse.RoPE(sizes)
        self.qkv_linear = FusedQKV(sizes)
        self.wo = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.inner_attention = titan_muse.Varlen()
        self.q_norm = Norm(sizes.head_dim) if norms else None
        self.k_norm = Norm(sizes.head_dim) if norms else None

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        xq, xk, xv = self.qkv_linear(x)
        if self.q_norm is not None or self.k_norm is not None:
            assert self.q_norm is not None
            assert self.k_norm is not None
            xq = self.q_norm(xq)
            xk = self.k_norm(xk)
        xq, xk = self.rope(xq, xk, positions)
        if self.across is not None:
            out = self.gathering(xq, xk, xv, masks)
        else:
            out = self.inner_attention(xq, xk, xv, masks=masks).contiguous()
        out_of_tokens = out.view(out.shape[0], -1)
        return self.wo(out_of_tokens)  # type: ignore[no-any-return]

    def gathering(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Metadata) -> torch.Tensor:
        """``set_gqa_inner_attention_local_map``."""
        every: Any = Gathered.apply(k, self.across), Gathered.apply(v, self.across)  # type: ignore[no-untyped-call]
        return self.inner_attention(q, *every, masks=masks).contiguous()  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, sizes: Sizes, *, norms: bool) -> None:
        super().__init__()
        self.attention = Attention(sizes, norms=norms)
        self.feed_forward = feed_forward(sizes.hidden, sizes.ffn)
        self.attention_norm = Norm(sizes.hidden)
        self.ffn_norm = Norm(sizes.hidden)


class LlamaBlock(_Block):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__(sizes, norms=False)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), masks, positions)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


class Qwen3Block(_Block):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__(sizes, norms=True)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        x = x + self.feed_forward(self.ffn_norm(x))
        return x  # noqa: RET504 (a variable, as there)


class Decoder(titan_muse.Decoder):
    """With blocks of another kind, and a plain norm, head and embedding."""

    block: type[nn.Module]

    def __init__(self, sizes: Sizes) -> None:
        nn.Module.__init__(self)
        self.tok_embeddings: Any = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleDict({str(layer): self.block(sizes, layer) for layer in range(sizes.layers)})
        self.norm: Any = Norm(sizes.hidden)
        self.lm_head: Any = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.skips_head = False


class Llama(Decoder):
    block = LlamaBlock


class Qwen3(Decoder):
    block = Qwen3Block


class Router(titan_gpt_oss.Router):
    """``TokenChoiceTopKRouter`` whose gate has no bias."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.gate = nn.Linear(sizes.hidden, sizes.experts, bias=False)

    def wide(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        weight = self.gate.weight.float()
        return x.float(), weight


class GroupedExperts(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        e, h, f = sizes.experts, sizes.hidden, sizes.expert_ffn
        self.w1 = nn.Parameter(torch.empty(e, f, h))
        self.w2 = nn.Parameter(torch.empty(e, h, f))
        self.w3 = nn.Parameter(torch.empty(e, f, h))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = self.w1, self.w2, self.w3
        multiply: Any = torch._grouped_mm
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = functional.silu(multiply(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * multiply(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=offsets)
        return multiply(h, w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)  # type: ignore[no-any-return]


class RoutedExperts(titan_gpt_oss.RoutedExperts):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.inner_experts: Any = GroupedExperts(sizes)

    def shared_among(self, sizes: Any, group: Any) -> None:
        super().shared_among(sizes, group)
        self.inner_experts = GroupedExperts(replace(sizes, experts=sizes.experts // dist.get_world_size(group)))


class MoE(titan_gpt_oss.MoE):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.routed_experts = RoutedExperts(sizes)
        self.router = Router(sizes)


class Qwen3MoeBlock(nn.Module):
    def __init__(self, sizes: Any, layer: int) -> None:
        super().__init__()
        self.attention = Attention(sizes, norms=True)
        self.moe = MoE(sizes)
        self.attention_norm = Norm(sizes.hidden)
        self.ffn_norm = Norm(sizes.hidden)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        x = x + self.moe(self.ffn_norm(x))
        return x  # noqa: RET504 (a variable, as there)


class Qwen3Moe(Decoder):
    block = Qwen3MoeBlock
