"""Frozen weights of a base model that are kept quantised under adapters: GPTQ's, LLM.int8's and AWQ's.

GPTQ's weights: packed to 4 bits, with a scale and a zero for every group of inputs.

auto_gptq 0.7, and its copy in fms-acceleration: ``nn_modules/qlinear/qlinear_tritonv2.py`` (``QuantLinear``),
``nn_modules/triton_utils/dequant.py`` (``dequant248``, ``QuantLinearFunction``). peft: ``tuners/lora/gptq.py``
(``GPTQLoraLinear.forward``). Shapes: x (…, k), weight (n, k), g groups.

bitsandbytes' 8-bit weights (LLM.int8, ``load_in_8bit``) under adapters: rows of inputs are quantised, too.

bitsandbytes 0.50: ``nn/modules.py`` (``Linear8bitLt.forward``), ``autograd/_functions.py`` (``MatMul8bitLt``),
``backends/cuda/ops.py`` and ``backends/default/ops.py`` (``int8_vectorwise_quant``, ``int8_mixed_scaled_mm``,
``int8_mm_dequant``). peft: ``tuners/lora/bnb.py`` (``Linear8bitLt.forward``). Shapes: x (…, k), weight (n, k), N rows.

Inputs are kept in an attribute of the function's context, which lives until the graph ends, recomputed or not.

AWQ's weights: packed to 4 bits, with a scale and a zero for every group of inputs.

autoawq 0.2.9: ``awq/modules/linear/gemm.py`` (``WQLinear_GEMM``, ``WQLinearMMFunction``); its kernels: autoawq_kernels,
``awq_ext/quantization/gemm_cuda_gen.cu`` (``gemm_forward_cuda``, ``dequantize_weights_cuda``), or
``awq/modules/triton/gemm.py``, which allocate the same. peft to 0.18: ``tuners/lora/awq.py``
(``AwqLoraLinear.forward``). Shapes: x (b, s, k), weight (n, k), g groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from ..tape.events import rounded
from ..values import dataclass
from . import ops, work
from .autograd import ITEMSIZE, Gradients, Recorder, Shape, Tensor, incoming, size_of
from .fused_lora import Functions
from .tuning import Adapters, Layer, Packed, delta, unscaled


@dataclass(frozen=True, slots=True)
class Gptq(Packed):
    """Weights in int32, eight of a column in each; whole weights are in fp16."""

    group: int
    """Inputs under one scale."""
    casts: bool
    """An adapter's input is cast to its dtype under autocast, too, and the sum is a tensor of its own (peft from
    0.16)."""
    flushed: int = 0
    """Bytes that Triton's autotuner writes between launches (``do_bench``)."""

    def packed(self, shape: Shape) -> tuple[int, ...]:
        """``qweight``, (k / 8, n), and ``qzeros``, (g, n / 8), both int32."""
        n, k = shape
        return n * k // 2, self._groups(k) * n // 2

    def beside(self, shape: Shape) -> Mapping[str, int]:
        n, k = shape
        return {"scales": rounded(size_of((self._groups(k), n), "fp16")), "g_idx": rounded(size_of((k,), "int32"))}

    @property
    def sent(self) -> int:
        """``scales`` and ``g_idx``."""
        return 2

    def _groups(self, k: int) -> int:
        return -(-k // self.group)

    def dequantised(self, r: Recorder, n: int, k: int, name: str, kernel: str = "dequant248") -> Tensor:
        """``dequant248``, whose kernel is tuned for every number of elements (``dequant_kernel_248``)."""
        weight = r.empty((k, n), self.dtype, f"{name}_dequantised")
        r.tunes(f"{kernel}/{n * k}", self.flushed)
        return weight

    @property
    def functions(self) -> Functions:
        """fms-acceleration has a kernel of its own for them."""
        return Functions(partial(self.dequantised, kernel="fast_lora"), overwrites=False, ahead=True)

    def linear(self, r: Recorder, x: Tensor, layer: Layer) -> Tensor:
        """``QuantLinear.forward``: saves nothing of x, and dequantises the whole weight either way."""
        k, shape, dtype = x.shape[-1], x.shape, x.dtype
        name, n = layer.name, layer.n
        r.quantised(f"{name}.weight", (n, k), self)
        weight = self.dequantised(r, n, k, name)
        out = r.empty((*shape[:-1], n), dtype, name)
        del weight

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            weight = self.dequantised(r, n, k, name)
            grad_x = r.empty(shape, dtype, f"grad_{name}_input")
            del weight
            return [grad_x.view(*shape)]

        unpacked = work.Stream((0.5 + ITEMSIZE[self.dtype]) * n * k)
        product = work.linear(prod(shape[:-1]), n, k, dtype, needs_weight=False)
        done = product.after((unpacked,), (unpacked,))
        out.node = r.node((x,), (), backward, work=done)
        if not layer.bias:
            return out
        bias = r.parameter(f"{name}.bias", (n,), self.dtype)
        return ops.add(r, out, bias, f"{name}_with_bias")

    def adapted(self, r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
        """``GPTQLoraLinear.forward``: the adapter's output is added in place, unless ``casts``."""
        result = self.linear(r, x, layer)
        if self.casts:
            x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
            summed = ops.add(r, result, delta(r, x, layer, adapters), f"{layer.name}_with_lora")
            return ops.cast(r, summed, result.dtype, f"{layer.name}_lora_cast")
        converts = r.autocast is None
        if converts:
            x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
        output = unscaled(r, x, layer, adapters)
        if converts:
            output = ops.cast(r, output, result.dtype, f"{layer.name}_lora_cast")
        return ops.add_in_place(r, result, ops.scale(r, output, f"{layer.name}_lora_scaled"))


# -- int8 ----------------------------------------------------------------------------------------------


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
            r.empty((n, 1), "fp32", f"{name}_scales")
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
    outliers = r.in_turn(((rows, k), "fp16", f"{name}_input_sizes"), ((rows, k), "bool", f"{name}_outliers"))
    r.empty((), "bool", f"{name}_any_outlier")
    r.empty((), "uint8", f"{name}_nought")
    del outliers, half
    return made, scales


def _product(r: Recorder, rows: int, n: int, dtype: str, name: str) -> Tensor:
    """``int8_scaled_mm``: sums in int32, in fp16, and in the inputs' dtype."""
    sums = r.empty((rows, n), "int32", f"{name}_int32")
    out = r.empty((rows, n), "fp16", f"{name}_fp16")
    if dtype != "fp16":
        out = r.empty((rows, n), dtype, name)
    del sums
    return out


# -- awq -----------------------------------------------------------------------------------------------


WHOLE = 1024
"""Tokens of a micro-batch from which on forward makes the whole weight (``FP16_MATMUL_HEURISTIC_CONDITION``)."""
SPLIT = 8
"""Parts of a sum over inputs that the kernel for fewer tokens adds up (``split_k_iters``)."""


@dataclass(frozen=True, slots=True)
class Awq(Packed):
    """Weights in int32, eight of a row in each; whole weights are in fp16."""

    group: int
    """Inputs under one scale."""

    def packed(self, shape: Shape) -> tuple[int, ...]:
        """``qweight``, (k, n / 8), and ``qzeros``, (g, n / 8), both int32."""
        n, k = shape
        return n * k // 2, self._groups(k) * n // 2

    def beside(self, shape: Shape) -> Mapping[str, int]:
        n, k = shape
        return {"scales": rounded(size_of((self._groups(k), n), "fp16"))}

    def _groups(self, k: int) -> int:
        return k // self.group

    def dequantised(self, r: Recorder, n: int, k: int, name: str) -> Tensor:
        """``dequantize_weights_cuda``."""
        return r.empty((k, n), self.dtype, f"{name}_dequantised")

    def linear(self, r: Recorder, x: Tensor, layer: Layer) -> Tensor:
        """``WQLinearMMFunction``: keeps x, though nothing reads it; backward copies the whole weight for each sequence
        (``repeat``)."""
        k, shape, dtype, name, n = x.shape[-1], x.shape, x.dtype, layer.name, layer.n
        r.quantised(f"{name}.weight", (n, k), self)
        bias = r.parameter(f"{name}.bias", (n,), self.dtype) if layer.bias else None
        rows, sequences = prod(shape[:-1]), shape[0]
        out = self._product(r, rows, n, k, name).view(*shape[:-1], n)
        if bias is not None:
            out = r.empty(out.shape, dtype, f"{name}_with_bias")

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            weight = self.dequantised(r, n, k, name)
            repeated = r.empty((sequences, n, k), dtype, f"{name}_repeated")
            grad_x = r.empty(shape, dtype, f"grad_{name}_input")
            incoming(gradients)
            del repeated
            del weight
            return [grad_x]

        unpacked = work.Stream((0.5 + ITEMSIZE[self.dtype]) * n * k)
        copied = work.Stream((1 + sequences) * ITEMSIZE[dtype] * n * k)
        product = work.linear(rows, n, k, dtype, needs_weight=False)
        done = product.after((unpacked,), (unpacked, copied))
        out.node = r.node((x,), (x,), backward, work=done)
        return ops.copied_gradient(r, out, name) if layer.strided else out

    def _product(self, r: Recorder, rows: int, n: int, k: int, name: str) -> Tensor:
        """(rows, n)."""
        if rows >= WHOLE:
            weight = self.dequantised(r, n, k, name)
            out = r.empty((rows, n), self.dtype, name)
            del weight
            return out
        return r.in_turn(((SPLIT, rows, n), self.dtype, f"{name}_parts"), ((rows, n), self.dtype, name))

    def adapted(self, r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
        """``AwqLoraLinear.forward``."""
        result = self.linear(r, x, layer)
        x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
        output = ops.cast(r, unscaled(r, x, layer, adapters), result.dtype, f"{layer.name}_lora_cast")
        output = ops.scale(r, output, f"{layer.name}_lora_scaled")
        return ops.add(r, result, output, f"{layer.name}_with_lora")
