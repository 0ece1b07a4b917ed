"""Transformer Engine's chain of grouped products on fake tensors: what kernels of cuDNN's front end
(``python/cudnn/grouped_gemm``: ``api.py`` of ``grouped_gemm_glu``, ``_srelu``, ``_dglu``, ``_dsrelu``, ``_quant``) and
functions of the C++ extension (``csrc/extensions/misc.cpp``, ``cast.cpp``, ``grouped_mlp_experimental.cpp``) allocate.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from . import transformer_engine_quantizers as quantizers

if TYPE_CHECKING:
    from tests.layers.megatron_core.te_cases import Case

BYTE, NARROW, WIDE = torch.uint8, torch.float8_e4m3fn, torch.bfloat16
PACKAGE = "transformer_engine.pytorch"


def _matrix(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided((m, n, 1), (n, 1, m * n), dtype=dtype)


def _scales(m: int, n: int) -> torch.Tensor:
    """Of m rows and n features."""
    blocks = (1, -(-m // 128), -(-n // 128), 32, 4, 4)
    return torch.empty(blocks, dtype=BYTE).view(torch.float8_e8m0fnu).permute(3, 4, 1, 5, 2, 0)


def _both(m: int, n: int, data: str) -> dict[str, torch.Tensor]:
    rows, columns = _matrix(m, n, NARROW), _matrix(m, n, NARROW)
    scaled = {"sfd_row_tensor": _scales(m, n), "sfd_col_tensor": _scales(n, m)}
    return {data: rows, "d_col_tensor": columns, **scaled}


def _forward(gated: bool) -> Callable[..., dict[str, Any]]:
    def kernel(a_tensor: torch.Tensor, n: int = 0, b_tensor: Any = None, **_: Any) -> dict[str, Any]:
        m, n = a_tensor.shape[0], n or b_tensor.shape[0]
        return {"c_tensor": _matrix(m, n, WIDE), **_both(m, n // (2 if gated else 1), "d_tensor")}

    return kernel


def _backward(gated: bool) -> Callable[..., dict[str, Any]]:
    def kernel(
        a_tensor: torch.Tensor,
        dprob_tensor: Any,
        n: int = 0,
        b_tensor: Any = None,
        use_dsrelu_reuse: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        m, n = a_tensor.shape[0], n or b_tensor.shape[0]
        made: dict[str, Any] = _both(m, n * (2 if gated else 1), "d_row_tensor") | {"dprob_tensor": dprob_tensor}
        if use_dsrelu_reuse:
            made |= {"d_srelu_tensor": _matrix(m, n, NARROW), "sfd_col_d_srelu_tensor": _scales(n, m)}
        return made

    return kernel


def _product(a_tensor: torch.Tensor, n: int, d_tensor: Any = None, **_: Any) -> dict[str, Any]:
    return {"d_tensor": _matrix(a_tensor.shape[0], n, WIDE) if d_tensor is None else d_tensor}


KERNELS: dict[str, Callable[..., Any]] = {
    "glu": _forward(True), "srelu": _forward(False), "dglu": _backward(True), "dsrelu": _backward(False),
    "quant": _product, "wgrad": lambda **_: None,
}  # fmt: skip


def _offsets(
    splits: torch.Tensor, device: Any, strides: Any, include_leading_zero: Any, dtypes: Any, **_: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``splits_to_offsets_multi``: one buffer."""
    sizes = [(splits.numel() + zero) * dtype.itemsize for zero, dtype in zip(include_leading_zero, dtypes, strict=True)]
    whole, start, parts = torch.empty(sum(-(-size // 16) * 16 for size in sizes), dtype=BYTE), 0, []
    for size, dtype in zip(sizes, dtypes, strict=True):
        parts.append(whole[start : start + size].view(dtype))
        start += -(-size // 16) * 16
    return splits, parts


def _quantized(x: torch.Tensor, quantizer: Any, count: int, splits: Any, tensor_offsets: Any = None, **_: Any) -> Any:
    """``MXFP8Quantizer::create_grouped_tensor``."""
    parts: dict[str, Any] = {}
    for wanted, columns, name in (
        (quantizer.rowwise_usage, False, ""),
        (quantizer.columnwise_usage, True, "columnwise_"),
    ):
        if wanted:
            parts[f"{name}data"] = torch.empty(x.numel(), dtype=BYTE)
            size = prod(quantizer.get_scale_shape(tuple(x.shape), columns))
            parts[f"{name}scale_inv"] = torch.empty(size, dtype=BYTE)
    storage: Any = importlib.import_module(f"{PACKAGE}.tensor.storage.grouped_tensor_storage")
    more = {"first_dims": splits, "tensor_offsets": tensor_offsets, "with_gemm_swizzled_scales": True}
    return storage.GroupedTensorStorage(
        shape=tuple(x.shape), dtype=WIDE, num_tensors=count, quantizer=quantizer, **parts, **more
    )


def _swizzle(one: Any) -> None:
    """``swizzle_scales_for_gemm_``: new scales of what there is."""
    if one._with_gemm_swizzled_scales:
        return
    for name in ("_rowwise_scale_inv", "_columnwise_scale_inv"):
        if getattr(one, name) is not None:
            setattr(one, name, torch.empty_like(getattr(one, name)))
    one._with_gemm_swizzled_scales = True


def _ordered(data: list[Any], scales: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(data)
    whole = torch.empty(count * -(-scales[0].numel() // 16) * 16, dtype=BYTE)
    pointers = torch.empty(2 * count, dtype=torch.int64)
    return pointers[:count], pointers[count:], whole


def _prepare() -> Any:
    """The operations, as on Blackwell with a front end of 1.27."""
    front: Any = types.ModuleType("cudnn")
    for name, kernel in KERNELS.items():
        setattr(front, f"grouped_gemm_{name}_wrapper_sm100", kernel)
    sys.modules["cudnn"] = front
    extension: Any = sys.modules["transformer_engine_torch"]
    extension.splits_to_offsets_multi, extension.group_quantize = _offsets, _quantized
    extension.swizzle_scales_for_gemm_ = _swizzle
    extension.copy_data_ptrs_to_device = lambda tensors, device: torch.empty(len(tensors), dtype=torch.int64)
    extension.grouped_mlp_experimental = types.SimpleNamespace(
        swizzle_scales_and_pack_ptrs_for_discrete_weights=_ordered
    )
    fused: Any = importlib.import_module(f"{PACKAGE}.ops.fused.grouped_mlp")
    if not hasattr(fused, "prepared"):
        fused.prepared = True
        fused._cudnn_frontend_version_at_least = lambda least: True
        fused._grouped_gemm_dsrelu_backward_supported = lambda: True
        for kind in (fused.GroupedMLP_CuTeGEMMGLU, fused.GroupedMLP_CuTeGEMMUnary):
            kind.is_supported = classmethod(lambda _: True)
        for fuse in (fused.fuse_ops, fused.fuse_srelu_ops):
            fused.register_forward_backward_fusion(fuse, prepend=True)
    return importlib.import_module(f"{PACKAGE}.ops")


def _weight(n: int, k: int) -> Any:
    tensors: Any = importlib.import_module(f"{PACKAGE}.tensor.mxfp8_tensor")
    quantizer = tensors.MXFP8Quantizer(sys.modules["transformer_engine_torch"].DType.kFloat8E4M3)
    return torch.nn.Parameter(quantizers.outer_mx(quantizers.create(quantizer, (n, k))))


def chain(
    case: Case, te: Any, recipe: Any, inner: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.nn.Parameter]]:
    """``TEGroupedMLP._make_fused_ops``."""
    ops, gated = _prepare(), case.activation == "swiglu"
    wide = 2 * inner if gated else inner
    common = {"bias": False, "device": "meta", "dtype": WIDE, "accumulate_into_main_grad": case.gradient_fusion}
    products, weights = [], []
    for k, n in ((case.h, wide), (inner, case.h)):
        products.append(ops.GroupedLinear(case.count, k, n, **common))
        for i in range(case.count):
            weights.append(_weight(n, k))
            setattr(products[-1], f"weight{i}", weights[-1])
    kind, given = (ops.ScaledSwiGLU, {"glu_interleave_size": 32}) if gated else (ops.ScaledSReLU, {})
    activation = kind(**given, activation_recompute_in_mlp=True) if case.again else kind(**given)
    activation._grouped_mlp_unit_activation_scale = case.count == 1
    operations = ops.Sequential(products[0], activation, products[1])
    scale = torch.empty(case.s * case.b) if case.count > 1 else torch.empty(1, dtype=WIDE)
    counts = torch.empty(case.count, dtype=torch.int64)

    def function(x: torch.Tensor) -> torch.Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return operations(x, counts, scale, counts)  # type: ignore[no-any-return]

    return function, weights
