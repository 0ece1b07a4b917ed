"""The kernels that transformers' gated delta nets call, as fake tensors follow them: stand-ins with the tensors of
flash-linear-attention 0.5.2 (``ops/gated_delta_rule/chunk.py``, ``chunk_fwd.py``, ``wy_fast.py``,
``ops/common/chunk_delta_h.py``, ``chunk_o.py``, ``modules/l2norm.py``) and causal_conv1d 1.6.1
(``causal_conv1d_interface.py``, ``cpp_functions.py``).

``tests/layers/megatron_core/test_gated_delta.py`` holds the recipe of the rule against the package's own Python.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

CHUNK = 64


class _Convolution(torch.autograd.Function):
    """``CausalConv1dFn``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        assert x.stride(1) == 1
        out = torch.zeros_like(x)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert gradients[0].stride(1) == 1
        dx = torch.zeros_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        dweight = dweight.type_as(weight)
        return dx, dweight


def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: None, *, activation: str, **_: Any) -> Any:
    assert bias is None
    assert activation == "silu"
    return _Convolution.apply(x, weight)  # type: ignore[no-untyped-call]


class _Rule(torch.autograd.Function):
    """``ChunkGatedDeltaRuleFunction``, whose arguments are copies of what is not contiguous (``input_guard``)."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        processed = [one.contiguous() for one in given]
        return _forward(ctx, *processed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, q_rstd, k, k_rstd, v, g, beta, a = ctx.saved_tensors
        assert gradients[0].is_contiguous()
        dq, dk, dv, db, dg = _back(q, k, v, g, beta, a, gradients[0])
        dq = _normed(q, q_rstd)[0]
        dk = _normed(k, k_rstd)[0]
        return dq, dk, dv, dg, db


def _forward(
    ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    q, q_rstd = _normed(q)
    k, k_rstd = _normed(k)
    g, o, a = _made(k, v, g)
    ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, a)
    return o


def _normed(x: torch.Tensor, rstd: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``l2norm_fwd``, and with ``rstd`` ``l2norm_bwd``."""
    out = torch.zeros_like(x)
    return out, torch.zeros(x.shape[:-1], dtype=torch.float32) if rstd is None else rstd


def _made(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``chunk_gated_delta_rule_fwd``."""
    g = torch.zeros_like(g)
    a = torch.zeros(*v.shape[:3], CHUNK, dtype=k.dtype)
    _w, u = k.new_zeros(*v.shape[:3], k.shape[-1]), torch.zeros_like(v)
    _h, v_new = _states(k, u)
    o = torch.zeros_like(v_new)
    return g, o, a


def _states(k: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``chunk_gated_delta_rule_fwd_h``."""
    b, t, heads, e = u.shape
    return k.new_zeros(b, -(-t // CHUNK), heads, k.shape[-1], e), torch.zeros_like(u)


def _back(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    do: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """``chunk_gated_delta_rule_bwd``."""
    b, t, heads, _ = v.shape
    group, d = k.shape[2], k.shape[3]
    w, u = k.new_zeros(b, t, heads, d), torch.zeros_like(v)
    _h, _v_new = _states(k, u)
    dv = torch.zeros_like(do)
    _dh = q.new_zeros(b, -(-t // CHUNK), heads, d, v.shape[-1])
    dv = torch.zeros_like(dv)
    dq, dk, _dw, dg = _dqkwg(q, k, g, w, heads)
    dk2 = k.new_zeros(b, t, heads, d)
    dv2, dg2, db = torch.zeros_like(v), torch.zeros_like(g), torch.zeros_like(beta)
    if group != heads:
        dk2 = dk2.view(b, t, group, heads // group, d).sum(3)
    dv = dv2
    dk.add_(dk2)
    dg.add_(dg2)
    dg = torch.zeros_like(dg)
    return dq, dk, dv, db, dg


def _dqkwg(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, w: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """``chunk_bwd_dqkwg``, on Hopper."""
    b, t, group, d = k.shape
    dq, dk = q.new_zeros(b, t, heads, d), k.new_zeros(b, t, heads, d)
    dg = torch.zeros(-(-d // 128), *g.shape, dtype=torch.float32)
    dw = torch.zeros_like(w)
    if group != heads:
        dq = dq.view(b, t, group, heads // group, d).sum(3)
        dk = dk.view(b, t, group, heads // group, d).sum(3)
    dg = dg.sum(0)
    return dq, dk, dw, dg


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> Any:
    assert use_qk_l2norm_in_kernel
    return _Rule.apply(q, k, v, g, beta), None  # type: ignore[no-untyped-call]


_OWN: dict[str, dict[str, Any]] = {}
"""What modules had before."""


def install(model: torch.nn.Module) -> None:
    """Both packages are there for the code of ``model``, until ``restore``, which follows each test."""
    module = sys.modules[type(model).__module__]
    instead = {"causal_conv1d_fn": causal_conv1d_fn, "torch_chunk_gated_delta_rule": chunk_gated_delta_rule}
    _OWN.setdefault(module.__name__, {name: vars(module)[name] for name in instead})
    vars(module).update(instead)


def restore() -> None:
    """transformers' modules have their own operators again."""
    while _OWN:
        name, own = _OWN.popitem()
        vars(sys.modules[name]).update(own)
