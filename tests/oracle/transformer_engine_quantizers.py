"""What the quantizers of Transformer Engine's C++ extension allocate, as functions on its Python's own classes.

``csrc/quantizer.cpp`` (``create_tensor``), ``csrc/extensions/cast.cpp`` (``quantize``, ``bgrad_quantize``,
``split_quantize``), ``transpose.cpp``, ``swizzle.cpp``. Single numbers (amaxes and scales of a whole tensor) are left
out by whoever compares.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from math import prod
from typing import Any

import torch

BYTE = torch.uint8


def _fresh(shape: Any, dtype: torch.dtype = BYTE) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda")


def _turns() -> bool:
    return torch.cuda.get_device_capability() < (10, 0)


def _class(module: str, name: str) -> Any:
    package = "transformer_engine.pytorch.tensor"
    for place in (f"{package}.storage.{module}_storage", f"{package}._internal.{module}_base", f"{package}.{module}"):
        try:
            found = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        for one in (f"{name}Storage", f"{name}Base"):
            if hasattr(found, one):
                return getattr(found, one)
    raise LookupError(name)


def create(quantizer: Any, shape: Any, dtype: Any = None) -> Any:
    """A quantised tensor; always the class without autograd, whose data nobody else sees."""
    kind, (*lead, k) = type(quantizer).__name__, tuple(shape)
    m, rows, columns = prod(lead), quantizer.rowwise_usage, quantizer.columnwise_usage
    common = {"fake_dtype": torch.bfloat16, "quantizer": quantizer, "fp8_dtype": quantizer.dtype}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        data = _fresh((*lead, k)) if rows or not _turns() else None
        turned = _fresh((k, *lead)) if columns and _turns() else None
        scale = _fresh((1,), torch.float32)
        return _class("float8_tensor", "Float8Tensor")(data=data, fp8_scale_inv=scale, data_transpose=turned, **common)
    scales, swizzled = quantizer.get_scale_shape, {}
    if kind == "Float8BlockQuantizer":
        module, name, wide, turn = "float8_blockwise_tensor", "Float8BlockwiseQTensor", torch.float32, True
        swizzled = {"is_2D_scaled": quantizer.block_scaling_dim == 2}
    else:
        assert kind == "MXFP8Quantizer", kind
        module, name, wide, turn = "mxfp8_tensor", "MXFP8Tensor", BYTE, False
        swizzled = {"with_gemm_swizzled_scales": getattr(quantizer, "optimize_for_gemm", False)}
    made: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if rows:
        made["rowwise_data"] = _fresh((*lead, k))
        made["rowwise_scale_inv"] = _fresh(scales((m, k), False), wide)
    if columns:
        made["columnwise_data"] = _fresh((k, *lead) if turn else (*lead, k))
        made["columnwise_scale_inv"] = _fresh(scales((m, k), True), wide)
    return _class(module, name)(**made, **common, **swizzled)


def outer(quantizer: Any, data: torch.Tensor) -> Any:
    """A tensor with one scale of the class that has autograd, which attention hands about."""
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    common = {"fp8_scale_inv": _fresh((1,), torch.float32), "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    return tensors.Float8Tensor(shape=data.shape, dtype=torch.bfloat16, data=data, device="cpu", **common)


def outer_mx(made: Any) -> Any:
    """Likewise of MXFP8."""
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer")
    parts = {name: getattr(made, f"_{name}") for name in names}
    data = made._rowwise_data if made._rowwise_data is not None else made._columnwise_data
    swizzled = made._with_gemm_swizzled_scales
    return tensors.MXFP8Tensor(
        shape=data.shape, dtype=torch.bfloat16, device="cpu", with_gemm_swizzled_scales=swizzled, **parts
    )


def transpose_to_bhsd(inputs: Any, original_format: str, outputs: Any = ()) -> list[Any]:
    """``multi_tensor_transpose_to_bhsd`` into ``outputs``, if there are any."""
    if outputs:
        return list(outputs)
    places = (1, 2, 0, 3) if original_format == "sbhd" else (0, 2, 1, 3)
    return [_fresh([one.shape[at] for at in places], one.dtype) for one in inputs]


def swizzle(tensors: list[Any], rows: bool, columns: bool) -> None:
    """``inplace_multi_tensor_swizzle_scales_for_gemm_impl``: a buffer for all that have scales, of which they get
    views."""
    name = "_rowwise_scale_inv" if rows else "_columnwise_scale_inv"
    scaled = [(one, tuple(getattr(one, name).shape)) for one in tensors if getattr(one, name) is not None]
    sizes = [-(-prod(like) // 16) * 16 for _, like in scaled]
    if not scaled:
        return
    whole, start = _fresh((sum(sizes),)), 0
    for (one, like), size in zip(scaled, sizes, strict=True):
        setattr(one, name, whole[start : start + prod(like)].view(like))
        start += size


def dequantize(x: Any, dtype: Any) -> torch.Tensor:
    return _fresh(x._data.shape, torch.float32 if getattr(dtype, "name", "") == "kFloat32" else torch.bfloat16)


def quantize(x: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    if output is not None:
        return output
    of_attention = not quantizer.internal and not quantizer.columnwise_usage
    per_tensor = type(quantizer).__name__ in ("Float8Quantizer", "Float8CurrentScalingQuantizer")
    if not quantizer.internal and type(quantizer).__name__ == "MXFP8Quantizer":
        return outer_mx(create(quantizer, x.shape))
    return outer(quantizer, _fresh(x.shape)) if of_attention and per_tensor else create(quantizer, x.shape)


def split_quantize(x: torch.Tensor, rows: list[int], quantizers: Any, **_: Any) -> list[Any]:
    """Of tensors with one scale: each member by itself (``cast.cpp``, where nothing is allocated in bulk)."""
    return [quantize(part, one) for part, one in zip(torch.split(x, rows), quantizers, strict=True)]


def bgrad_quantize(x: torch.Tensor, quantizer: Any) -> Any:
    """The gradient of the bias first (``bias.cpp``)."""
    grad_bias = _fresh(x.shape[-1:], x.dtype)
    return grad_bias, create(quantizer, x.shape)


def create_empty(quantizer: Any, shape: Any, *rest: Any) -> Any:
    return create(quantizer, shape)


def fp8_transpose(data: torch.Tensor, dtype: Any, out: Any = None, **_: Any) -> torch.Tensor:
    return _fresh((data.shape[-1], data.numel() // data.shape[-1])) if out is None else out


def swap_first_dims(x: torch.Tensor, out: Any = None) -> torch.Tensor:
    return _fresh(x.shape, x.dtype) if out is None else out


def ordered(operand: Any, columns: bool) -> list[torch.Tensor]:
    """``swizzle_scales_for_gemm``, and ``convert_block_scaling_to_mxfp8_tensor`` on Blackwell: what lives as long as
    the product."""
    name = type(operand).__name__
    side = "_columnwise" if columns else "_rowwise"
    if name.startswith("MXFP8"):
        if getattr(operand, "_with_gemm_swizzled_scales", False):
            return []
        scales = getattr(operand, f"{side}_scale_inv")
        return [_fresh(scales.shape)]
    if name.startswith("Float8Blockwise") and not _turns():
        data = getattr(operand, f"{side}_data")
        first, last = (data.shape[0], prod(data.shape[1:])) if columns else (prod(data.shape[:-1]), data.shape[-1])
        return [_fresh((-(-first // 128) * 128, -(-last // 128) * 4))]
    return []


def shape_of(operand: Any) -> tuple[int, ...]:
    """Logical shape of a tensor, quantised or not."""
    if isinstance(operand, torch.Tensor):
        return tuple(operand.shape)
    for rows in ("_rowwise_data", "_data"):
        data = getattr(operand, rows, None)
        if data is not None:
            return tuple(data.shape)
    turned = getattr(operand, "_transpose", None)
    columns = getattr(operand, "_columnwise_data", None)
    if turned is None and type(operand).__name__.startswith("MXFP8"):
        return tuple(columns.shape)
    first, *others = (turned if turned is not None else columns).shape
    return (*others, first)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "split_quantize": split_quantize,
    "quantize": quantize,
    "bgrad_quantize": bgrad_quantize,
    "dequantize": dequantize,
    "create_empty_quantized_tensor": create_empty,
    "fp8_transpose": fp8_transpose,
    "swap_first_dims": swap_first_dims,
    "multi_tensor_transpose_to_bhsd": transpose_to_bhsd,
    "multi_tensor_swizzle_scales_for_gemm_unchecked_": swizzle,
    "fused_amax_and_scale_update_after_reduction": lambda *_: None,
}
