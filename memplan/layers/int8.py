"""bitsandbytes' 8-bit weights (LLM.int8, ``load_in_8bit``) under adapters: rows of inputs are quantised, too.

bitsandbytes 0.50: ``nn/modules.py`` (``Linear8bitLt.forward``), ``autograd/_functions.py`` (``MatMul8bitLt``),
``backends/cuda/ops.py`` and ``backends/default/ops.py`` (``int8_vectorwise_quant``, ``int8_mixed_scaled_mm``,
``int8_mm_dequant``). peft: ``tuners/lora/bnb.py`` (``Linear8bitLt.forward``). Shapes: x (…, k), weight (n, k), N rows.

Inputs are kept in an attribute of the function's context, which lives until the graph ends, recomputed or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..tape.events import rounded
from ..values import dataclass
from . import ops, work
from .autograd import ITEMSIZE, Gradients, Recorder, Shape, Tensor, size_of
from .tuning import Packed, delta

if TYPE_CHECKING:
    from .tuning import Adapters, Layer


@dataclass(frozen=True, slots=True)
class Int8(Packed):
    """Rows of a weight in int8 (``CB``), with a scale each (``SCB``); products are made for fp16."""

    def packed(self, shape: Shape) -> tuple[int, ...]:
        return (prod(shape),)

    def beside(self, shape: Shape) -> Mapping[str, int]:
        return {"scales": rounded(size_of((shape[0],), "fp32"))}

    def linear(self, r: Recorder, x: Tensor, layer: Layer) -> Tensor:
        """``MatMul8bitLt``, no column of whose inputs reaches the threshold: backward makes the whole weight."""
        k, shape, dtype, name, n = x.shape[-1], x.shape, x.dtype, layer.name, layer.n
        r.quantised(f"{name}.weight", (n, k), self)
        if layer.bias:
            r.parameter(f"{name}.bias", (n,), dtype)
        rows = prod(shape[:-1])
        codes, scales = _rows_quantised(r, x, rows, name)
        out = _product(r, rows, n, dtype, name).view(*shape[:-1], n)
        r.keeps_in_context(x)
        context = [x] if x.node is not None else []
        del codes, scales

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            weight = r.empty((n, k), dtype, f"{name}_dequantised")
            scales = r.empty((n, 1), "fp32", f"{name}_scales")
            del scales
            grad_x = r.empty(shape, dtype, f"grad_{name}_input")
            del weight
            context.clear()
            return [grad_x.view(*shape)]

        moved = work.Stream((1 + ITEMSIZE["fp16"]) * rows * k + (4 + ITEMSIZE[dtype]) * rows * n, 3)
        forward = work.Product(rows, n, k, element=1)
        unpacked = work.Stream((1 + ITEMSIZE[dtype]) * n * k)
        product = work.linear(rows, n, k, dtype, needs_weight=False)
        done = work.Operator((moved, forward), (unpacked, *(product.backward or ())))
        out.node = r.node((x,), (), backward, work=done)
        return ops.copied_gradient(r, out, name) if layer.strided else out

    def adapted(self, r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
        """``lora.Linear8bitLt.forward``."""
        result = self.linear(r, x, layer)
        converts = r.autocast is None
        if converts:
            x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
        output = delta(r, x, layer, adapters)
        if converts:
            output = ops.cast(r, output, result.dtype, f"{layer.name}_lora_cast")
        return ops.add(r, result, output, f"{layer.name}_with_lora")


def _rows_quantised(r: Recorder, x: Tensor, rows: int, name: str) -> tuple[Tensor, Tensor]:
    """``int8_vectorwise_quant(A.to(torch.float16), threshold)``: int8, where columns of outliers, here none, are set to
    nought, and scales of rows."""
    k = x.shape[-1]
    half = x if x.dtype == "fp16" else r.empty((rows, k), "fp16", f"{name}_input_fp16")
    scales = r.empty((rows,), "fp32", f"{name}_row_scales")
    made = r.empty((rows, k), "uint8", f"{name}_input_int8")
    sizes = r.empty((rows, k), "fp16", f"{name}_input_sizes")
    outliers = r.empty((rows, k), "bool", f"{name}_outliers")
    del sizes
    some = r.empty((), "bool", f"{name}_any_outlier")
    del some
    nought = r.empty((), "uint8", f"{name}_nought")
    del nought, outliers, half
    return made, scales


def _product(r: Recorder, rows: int, n: int, dtype: str, name: str) -> Tensor:
    """``int8_scaled_mm``: sums in int32, in fp16, and in the inputs' dtype."""
    sums = r.empty((rows, n), "int32", f"{name}_int32")
    out = r.empty((rows, n), "fp16", f"{name}_fp16")
    if dtype != "fp16":
        out = r.empty((rows, n), dtype, name)
    del sums
    return out
