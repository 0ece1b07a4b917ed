"""torchtitan's Qwen 3.5 in plain PyTorch: reference modules whose operators, saved tensors and names are those of
``torchtitan/models/qwen3_5`` and ``torchtitan/models/common`` of 21 August 2026 (commit b5bcd76), without the vision
tower.

Left out: tables of sequences and their chunks, of a few KiB. Stand-ins: the convolution and the rule of
flash-linear-attention, which are Triton's; ``tests/layers/megatron_core/test_gated_delta.py`` holds the recipe of both
against the package's own Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import titan_gpt_oss, titan_muse, titan_newest
from .titan_gpt_oss import Metadata, RoPE
from .titan_models import feed_forward

CHUNK = 64


@dataclass(frozen=True)
class _Delta:
    rotary: int = 16
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 64
    shared: int = 0
    """Features of the expert that takes every token."""


@dataclass(frozen=True)
class Sizes(_Delta, titan_muse.Sizes):
    """Of a dense model."""


@dataclass(frozen=True)
class MoESizes(_Delta, titan_gpt_oss.Sizes):
    interval: int = 2


class OffsetNorm(nn.Module):
    """``OffsetRMSNorm``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        input_dtype = x.dtype
        x = x.float()
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return ((1.0 + self.weight.float()) * x).to(input_dtype)


class GatedNorm(nn.Module):
    """``RMSNormGated``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        input_dtype = x.dtype
        x = x.float()
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        x = (self.weight.float() * x).to(input_dtype)
        x = x * functional.silu(gate.float())
        return x.to(input_dtype)


class Attention(nn.Module):
    """``Qwen35Attention``."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = sizes.head_dim, sizes.rotary
        d = sizes.head_dim
        self.wq = nn.Linear(sizes.hidden, 2 * sizes.heads * d, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * d, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * d, bias=False)
        self.wo = nn.Linear(sizes.heads * d, sizes.hidden, bias=False)
        turned: Any = _Turned(sizes.s, sizes.rotary)
        self.rope = RoPE(turned)
        self.q_norm = OffsetNorm(d)
        self.k_norm = OffsetNorm(d)
        self.inner_attention = titan_muse.Varlen()

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        both = self.wq(x).view(n, -1, self.head_dim * 2)
        xq, gate = both.chunk(2, dim=-1)
        xk = self.wk(x).view(n, -1, self.head_dim)
        xv = self.wv(x).view(n, -1, self.head_dim)
        xq = self.q_norm(xq)
        xk = self.k_norm(xk)
        xq_turned, xq_passed = xq[..., : self.rotary_dim], xq[..., self.rotary_dim :]
        xk_turned, xk_passed = xk[..., : self.rotary_dim], xk[..., self.rotary_dim :]
        xq_turned, xk_turned = self.rope(xq_turned, xk_turned, positions)
        xq = torch.cat([xq_turned, xq_passed], dim=-1)
        xk = torch.cat([xk_turned, xk_passed], dim=-1)
        out = self.inner_attention(xq, xk, xv, masks=masks).contiguous()
        out = out * torch.sigmoid(gate)
        out_of_tokens = out.view(n, -1)
        return self.wo(out_of_tokens)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Turned:
    s: int
    head_dim: int


class _Convolution(torch.autograd.Function):
    """``CausalConv1dFunction`` (fla 0.6, ``modules/conv/triton/ops.py``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunks: int) -> Any:
        ctx.chunks = chunks
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx, dw = _convolved_back(x, weight, ctx.chunks)
        return dx, dw, None


def _convolved_back(x: torch.Tensor, weight: torch.Tensor, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(x)
    dx = torch.empty_like(x)
    dw = weight.new_empty(chunks, *weight.shape, dtype=torch.float)
    dw = dw.sum(0).to(weight)
    del y
    return dx, dw


class _Rule(torch.autograd.Function):
    """``ChunkGatedDeltaRuleFunction`` (``ops/gated_delta_rule/chunk.py``), which norms queries and keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunks: int,
    ) -> torch.Tensor:
        ctx.chunks = chunks
        q, q_rstd = _normed(q)
        k, k_rstd = _normed(k)
        g, o, a = _rule(k, v, g, chunks)
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, a)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, _q_rstd, k, _k_rstd, v, g, beta, _a = ctx.saved_tensors
        dq, dk, dv, db, dg = _rule_back(q, k, v, g, beta, ctx.chunks)
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        return dq, dk, dv, dg, db, None


def _normed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``l2norm_fwd``."""
    return torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)


def _rule(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, chunks: int) -> tuple[torch.Tensor, ...]:
    """``chunk_gated_delta_rule_fwd``."""
    g = torch.empty_like(g)
    a = torch.zeros(*v.shape[:3], CHUNK, dtype=k.dtype)
    _w, u = torch.empty_like(k), torch.empty_like(v)
    _h, _v_new = _states(k, u, chunks)
    o = torch.empty_like(v)
    return g, o, a


def _states(k: torch.Tensor, u: torch.Tensor, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``chunk_gated_delta_rule_fwd_h``."""
    return k.new_empty(1, chunks, *u.shape[2:3], k.shape[-1], u.shape[-1]), torch.empty_like(u)


def _rule_back(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: int
) -> tuple[torch.Tensor, ...]:
    """``chunk_gated_delta_rule_bwd``."""
    w, u = torch.empty_like(k), torch.empty_like(v)
    _h, v_new = _states(k, u, chunks)
    dv = torch.empty_like(v_new)
    _dh = q.new_empty(1, chunks, v.shape[2], k.shape[-1], v.shape[-1])
    dv = torch.empty_like(dv)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg = torch.empty(-(-k.shape[-1] // 128), *g.shape, dtype=torch.float32)
    _dw = torch.empty_like(w)
    dg = dg.sum(0)
    dk2, dv, dg2, db = torch.empty_like(k), torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    dk.add_(dk2)
    dg.add_(dg2)
    dg = torch.empty_like(dg)
    return dq, dk, dv, db, dg


class Kernel(nn.Module):
    """``GatedDeltaKernel``."""

    def forward(
        self,
        xq: torch.Tensor,
        xk: torch.Tensor,
        xv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        chunks: int,
    ) -> torch.Tensor:
        if xq.shape[1] != xv.shape[1]:
            repeat = xv.shape[1] // xq.shape[1]
            xq = xq.repeat_interleave(repeat, dim=1)
            xk = xk.repeat_interleave(repeat, dim=1)
        xq_rows = xq.unsqueeze(0)
        xk_rows = xk.unsqueeze(0)
        xv_rows = xv.unsqueeze(0)
        g_rows = g.unsqueeze(0)
        beta_rows = beta.unsqueeze(0)
        result: Any = _Rule.apply(xq_rows, xk_rows, xv_rows, g_rows, beta_rows, chunks)  # type: ignore[no-untyped-call]
        return result.squeeze(0)  # type: ignore[no-any-return]


class Inner(nn.Module):
    """``InnerGatedDeltaNet``."""

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self.kernel = Kernel()
        self.sequences = sequences

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_q: torch.Tensor,
        conv_k: torch.Tensor,
        conv_v: torch.Tensor,
        log: torch.Tensor,
        bias: torch.Tensor,
        *,
        key_dim: int,
        value_dim: int,
    ) -> torch.Tensor:
        n = query.shape[0]
        chunks = self.sequences * -(-n // self.sequences // CHUNK)

        def causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out: Any = _Convolution.apply(x.unsqueeze(0), weight.squeeze(1), chunks)  # type: ignore[no-untyped-call]
            return out.squeeze(0)  # type: ignore[no-any-return]

        xq = causal_conv(query, conv_q).reshape(n, -1, key_dim)
        xk = causal_conv(key, conv_k).reshape(n, -1, key_dim)
        xv = causal_conv(value, conv_v).reshape(n, -1, value_dim)
        g = -torch.exp(log.float()) * functional.softplus(a.float() + bias)
        beta = torch.sigmoid(b)
        return self.kernel(xq, xk, xv, g, beta, chunks=chunks)  # type: ignore[no-any-return]


class DeltaNet(nn.Module):
    """``GatedDeltaNet``."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        h, keys = sizes.hidden, sizes.key_heads * sizes.key_dim
        heads, values = sizes.value_heads, sizes.value_heads * sizes.value_dim
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.sequences = sizes.b
        self.in_proj_q = nn.Linear(h, keys, bias=False)
        self.in_proj_k = nn.Linear(h, keys, bias=False)
        self.in_proj_v = nn.Linear(h, values, bias=False)
        self.in_proj_z = nn.Linear(h, values, bias=False)
        self.in_proj_a = nn.Linear(h, heads, bias=False)
        self.in_proj_b = nn.Linear(h, heads, bias=False)
        self.conv_q = nn.Conv1d(keys, keys, 4, groups=keys, bias=False)
        self.conv_k = nn.Conv1d(keys, keys, 4, groups=keys, bias=False)
        self.conv_v = nn.Conv1d(values, values, 4, groups=values, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = GatedNorm(sizes.value_dim)
        self.out_proj = nn.Linear(values, h, bias=False)
        self.inner_gated_delta_net = Inner(sizes.b)

    def forward(self, x: torch.Tensor, masks: Metadata) -> torch.Tensor:
        n = x.shape[0]
        query = self.in_proj_q(x)
        key = self.in_proj_k(x)
        value = self.in_proj_v(x)
        gate = self.in_proj_z(x)
        a = self.in_proj_a(x)
        b = self.in_proj_b(x)
        output = self.inner_gated_delta_net(
            query,
            key,
            value,
            a,
            b,
            self.conv_q.weight,
            self.conv_k.weight,
            self.conv_v.weight,
            self.A_log,
            self.dt_bias,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )
        gate_of_heads = gate.view(n, -1, self.value_dim)
        output = self.norm(output, gate_of_heads)
        out = output.reshape(n, -1)
        return self.out_proj(out)  # type: ignore[no-any-return]


class SharedExpert(nn.Module):
    """``SigmoidGatedFeedForward``."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)
        self.gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fed_forward(x)
        return torch.sigmoid(self.gate(x)) * out

    def fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class MoE(titan_newest.MoE):
    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.shared_experts = SharedExpert(sizes.hidden, sizes.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, chosen, scores = self.router(x, self.expert_bias)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        counts = routing_map.sum(dim=0)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        out = self.routed_experts(x, top, chosen, counts)
        shared = self.shared_experts(x)
        out = out + shared
        return out  # type: ignore[no-any-return]  # noqa: RET504 (a variable, as there)


class Block(nn.Module):
    """``Qwen35TransformerBlock``."""

    mixes = False

    def __init__(self, sizes: Any, layer: int) -> None:
        super().__init__()
        self.full_attn = (layer + 1) % sizes.interval == 0
        self.attn: Any = Attention(sizes) if self.full_attn else DeltaNet(sizes)
        if self.mixes:
            self.moe = MoE(sizes)
        else:
            self.feed_forward = feed_forward(sizes.hidden, sizes.ffn)
        self.attention_norm = OffsetNorm(sizes.hidden)
        self.ffn_norm = OffsetNorm(sizes.hidden)

    def forward(self, x: torch.Tensor, masks: Metadata, positions: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        h = self.attn(h, masks, positions) if self.full_attn else self.attn(h, masks)
        x = x + h
        h = self.ffn_norm(x)
        x = x + self.moe(h) if self.mixes else x + self.feed_forward(h)
        return x  # noqa: RET504 (a variable, as there)


class MoEBlock(Block):
    mixes = True


class Qwen35(titan_newest.Decoder):
    block = Block

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.norm = OffsetNorm(sizes.hidden)


class Qwen35MoE(Qwen35):
    block = MoEBlock
