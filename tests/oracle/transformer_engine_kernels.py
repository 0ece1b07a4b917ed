"""What Transformer Engine's C++ extension and flash-attn 2 allocate, as functions that return fresh tensors.

In the order in which ``csrc/extensions/*.cpp`` and ``flash_api.cpp`` make them; workspaces of kernels are left out.
Shapes: s sequence, b micro-batch, a heads, d head size.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import transformer_engine_quantizers as quantizers

DType = enum.IntEnum(
    "DType",
    "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    start=0,
)

BACKENDS = ["NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"]

DTYPES: dict[Any, torch.dtype] = {}
"""The extension's dtypes as PyTorch's."""


class Value:
    """A member of one of the extension's enumerations."""

    def __init__(self, enum: str, name: str) -> None:
        self.enum, self.name = enum, name

    def __repr__(self) -> str:
        return f"{self.enum}.{self.name}"

    def __int__(self) -> int:
        return sum(map(ord, self.name))


class Enum(type):
    """An enumeration whose members come to be when they are named."""

    def __getattr__(cls, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Value(cls.__name__, name)
        setattr(cls, name, value)
        return value


def fresh(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda")


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def generic_gemm(a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, *rest: Any, **_: Any) -> Any:
    """``gemm.cpp``: the output, then the gradient of the bias in the output's dtype, then ordered scales."""
    out_dtype, bias, _bias_dtype, _gelu, _gelu_in, grad = rest[:6]
    left, right = quantizers.shape_of(a), quantizers.shape_of(b)
    columns = left[0] if transa else left[-1]
    rows: tuple[int, ...] = (right[-1],) if transb else right[:-1]
    if out is None:
        out = fresh((*rows, columns), DTYPES[out_dtype])
    bias_grad = fresh((right[-1],), out.dtype) if grad and bias is not None else None
    _scratch = [*quantizers.ordered(a, not transa), *quantizers.ordered(b, transb)]
    return out, bias_grad, None, None


def layernorm_fwd(x: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any = None, *rest: Any) -> Any:
    """``normalization.cpp``: mean, reciprocal deviation, output."""
    mean, rsigma = fresh((_rows(x),), torch.float32), fresh((_rows(x),), torch.float32)
    return _normed(x, out, quantizer), mean, rsigma


def _normed(x: torch.Tensor, out: Any, quantizer: Any) -> Any:
    """Quantised from a tensor in 16 bits, unless scales are known before."""
    if quantizer is None:
        return torch.empty_like(x) if out is None else out
    made = quantizers.create(quantizer, x.shape)
    if type(quantizer).__name__ != "Float8Quantizer":
        _unquantised = torch.empty_like(x)
    return made


def rmsnorm_fwd(x: Any, weight: Any, eps: float, out: Any, quantizer: Any = None, *rest: Any) -> Any:
    rsigma = fresh((_rows(x),), torch.float32)
    return _normed(x, out, quantizer), None, rsigma


def layernorm_bwd(dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, *rest: Any) -> Any:
    dz = dz.contiguous()
    return torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)


def rmsnorm_bwd(dz: Any, x: Any, rsigma: Any, gamma: Any, *rest: Any) -> Any:
    dz = dz.contiguous()
    return torch.empty_like(x), torch.empty_like(gamma)


def fused_rope_forward(x: Any, *rest: Any) -> Any:
    """``apply_rope.cpp``: contiguous, of the input's shape."""
    return fresh(x.shape, x.dtype)


def softmax_forward(x: Any, *rest: Any) -> Any:
    """``softmax.cpp``: a fresh result forwards; backward writes over the incoming gradient."""
    return torch.empty_like(x)


def softmax_backward(grad: Any, *rest: Any) -> Any:
    return grad.contiguous()


def fused_attn_fwd(*args: Any) -> list[torch.Tensor]:
    """``attention.cpp``: output, random state, softmax statistics (b, a, s, 1), and the sinks that it was given."""
    q, _k, v = _operands(args)
    layout, *formats = _named(args, "Layout", "Format")
    s, b, a, _d = (q.shape[at] for at in _places(layout))
    like = [(s, b, a, v.shape[-1])[_places(formats[0] if formats else layout).index(at)] for at in range(4)]
    out = _of_attention(args, [like])[0]
    rng_state = fresh((2,), torch.int64)
    statistics = fresh((b, a, s, 1), torch.float32)
    sinks = [arg for arg in args if _learns_sinks(args) and isinstance(arg, torch.Tensor) and arg.shape[2:] == (1, 1)]
    return [out, statistics, rng_state, *sinks]


def fused_attn_bwd(*args: Any) -> list[torch.Tensor | None]:
    """``attention.cpp``: three gradients, views of one tensor where the layout of the inputs is one (``SBH3D``)."""
    layouts = _named(args, "Layout")
    made = [[x.shape[at] for at in _places(layouts[0])] for x in _operands(args)]
    likes = [[one[_places(layouts[-1]).index(at)] for at in range(4)] for one in made]
    if layouts[-1].endswith("H3D"):
        like = likes[0]
        gradients = _of_attention(args, [(*like[:-1], 3, like[-1])], unbound=True)
    else:
        assert layouts[-1].count("_") == 3, layouts  # NVTE_SBHD_SBHD_SBHD
        gradients = _of_attention(args, likes)
    a = made[0][2]
    return [*gradients, None, fresh((1, a, 1, 1), torch.float32) if _learns_sinks(args) else None]


def _learns_sinks(args: Any) -> bool:
    return "NVTE_LEARNABLE_SOFTMAX" in _named(args, "Softmax")


def _operands(args: Any) -> list[Any]:
    """Queries, keys and values; a wrapper of quantised data may have other dimensions than these."""
    return [arg for arg in args if isinstance(arg, torch.Tensor) and len(arg.shape) == 4][:3]


def _named(args: Any, *kinds: str) -> list[str]:
    """The members of enumerations of these kinds, in order."""
    return [arg.name for arg in args if isinstance(arg, Value) and any(kind in arg.enum for kind in kinds)]


def _places(layout: str) -> tuple[int, int, int, int]:
    """Where sequence, micro-batch, heads and features are in a tensor of a layout."""
    first = layout.split("_")[1]
    return (2, 0, 1, 3) if first == "BHSD" else (0, 1, 2, 3) if first.startswith("SB") else (1, 0, 2, 3)


def _of_attention(args: Any, shapes: Sequence[Any], *, unbound: bool = False) -> list[Any]:
    """What the kernel writes: in 8 bits where the last quantizer is of delayed scaling, else in 16."""
    last = next((arg for arg in reversed(args) if type(arg).__name__.endswith("Quantizer")), None)
    narrow = type(last).__name__ == "Float8Quantizer"
    made = [fresh(shape, torch.uint8 if narrow else torch.bfloat16) for shape in shapes]
    parts = [part for one in made for part in one.unbind(-2)] if unbound else made
    return [quantizers.outer(last, part) for part in parts] if narrow else parts


def fa_prepare_fwd(q: torch.Tensor) -> torch.Tensor:
    """``attention.cpp``: (s, b, a, 3 d), of which ``q`` is the first third, as (3, b, s, a, d)."""
    s, b, a, d = q.shape
    return fresh((3, b, s, a, d), q.dtype)


def fa_prepare_bwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, s, a, d = q.shape
    return fresh((s, b, a, 3 * d), q.dtype)


class FlashAttention(torch.autograd.Function):
    """``flash_attn_interface.py``, ``FlashAttnFunc``, with what ``flash_api.cpp`` allocates but its accumulators.

    Queries, keys and values are (b, s, a, d).
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, s, a, _ = q.shape
        out = torch.empty_like(q)
        logsumexp = fresh((b, a, s), torch.float32)
        rng_state = fresh((2,), torch.int64)
        ctx.save_for_backward(q, k, v, out, logsumexp, rng_state)
        return out[..., : q.shape[-1]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        b, s, a, _ = q.shape
        _softmax_d = fresh((b, a, -(-s // 128) * 128), torch.float32)
        return dq[..., : q.shape[-1]], dk, dv


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **_: Any) -> torch.Tensor:
    return FlashAttention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **_: Any) -> Any:
    """``_flash_attn_forward``: output, log-sum-exp, nothing, random state."""
    b, s, a, _d = q.shape
    out, logsumexp = torch.empty_like(q), fresh((b, a, s), torch.float32)
    return out, logsumexp, fresh((0,), q.dtype), fresh((2,), torch.int64)


def flash_attn_backward(grad: torch.Tensor, q: torch.Tensor, *rest: Any, **_: Any) -> torch.Tensor:
    """``_flash_attn_backward`` into gradients that are there: Σ dO·O."""
    b, s, a, _d = q.shape
    return fresh((b, a, -(-s // 128) * 128), torch.float32)


def get_fused_attn_backend(*args: Any) -> Any:
    kinds = sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend
    narrow = any(getattr(arg, "name", "").startswith("kFloat8") for arg in args)
    return kinds.NVTE_FP8 if narrow else kinds.NVTE_F16_arbitrary_seqlen


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "te_general_grouped_gemm": lambda *given: [None] * len(given[0]),
    "generic_gemm": generic_gemm,
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "fused_rope_forward": fused_rope_forward,
    "fused_rope_backward": fused_rope_forward,
    "scaled_softmax_forward": softmax_forward,
    "scaled_masked_softmax_forward": softmax_forward,
    "scaled_upper_triang_masked_softmax_forward": softmax_forward,
    "scaled_aligned_causal_masked_softmax_forward": softmax_forward,
    "scaled_softmax_backward": softmax_backward,
    "scaled_masked_softmax_backward": softmax_backward,
    "scaled_upper_triang_masked_softmax_backward": softmax_backward,
    "scaled_aligned_causal_masked_softmax_backward": softmax_backward,
    "fused_attn_fwd": fused_attn_fwd,
    "fused_attn_bwd": fused_attn_bwd,
    "fa_prepare_fwd": fa_prepare_fwd,
    "fa_prepare_bwd": fa_prepare_bwd,
    "get_fused_attn_backend": get_fused_attn_backend,
    "get_cublasLt_version": lambda: 130000,
    "get_cudnn_version": lambda: 92200,
    "get_num_cublas_streams": lambda: 4,
    **quantizers.FUNCTIONS,
}

FLASH: dict[str, Callable[..., Any]] = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_func,
    "_flash_attn_forward": flash_attn_forward,
    "_flash_attn_backward": flash_attn_backward,
    "_flash_attn_varlen_forward": flash_attn_forward,
    "_flash_attn_varlen_backward": flash_attn_backward,
}
"""Functions of ``flash_attn_interface.py`` that Transformer Engine imports."""
