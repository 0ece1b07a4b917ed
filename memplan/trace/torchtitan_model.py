"""torchtitan's Llama 3 in plain PyTorch: a reference module whose operators, saved tensors and names are those of
``torchtitan/models/llama/model.py`` and ``norms.py`` of December 2024 (commit 9dec370).

Shapes: b micro-batch, s sequence, h hidden, a heads, d features of a head, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .torchtitan_settings import Part, Torchtitan

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
