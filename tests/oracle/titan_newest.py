"""torchtitan's Llama and Qwen 3 in plain PyTorch: reference modules whose operators, saved tensors and names are those
of ``torchtitan/models/llama3/model.py``, ``qwen3/model.py`` and ``models/common`` of 21 August 2026 (b5bcd76)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


class Attention(nn.Module):
    """``GQAttention``."""

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
        out = self.inner_attention(xq, xk, xv, masks=masks).contiguous()
        out_of_tokens = out.view(out.shape[0], -1)
        return self.wo(out_of_tokens)  # type: ignore[no-any-return]


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
