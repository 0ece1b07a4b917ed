"""AWQ's weights: packed to 4 bits, with a scale and a zero for every group of inputs.

autoawq 0.2.9: ``awq/modules/linear/gemm.py`` (``WQLinear_GEMM``, ``WQLinearMMFunction``); its kernels: autoawq_kernels,
``awq_ext/quantization/gemm_cuda_gen.cu`` (``gemm_forward_cuda``, ``dequantize_weights_cuda``), or
``awq/modules/triton/gemm.py``, which allocate the same. peft to 0.18: ``tuners/lora/awq.py``
(``AwqLoraLinear.forward``). Shapes: x (b, s, k), weight (n, k), g groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..tape.events import rounded
from ..values import dataclass
from . import ops, work
from .autograd import ITEMSIZE, Gradients, Recorder, Shape, Tensor, incoming, size_of
from .tuning import Adapters, Layer, Packed, unscaled

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
        parts = r.empty((SPLIT, rows, n), self.dtype, f"{name}_parts")
        out = r.empty((rows, n), self.dtype, name)
        del parts
        return out

    def adapted(self, r: Recorder, x: Tensor, layer: Layer, adapters: Adapters) -> Tensor:
        """``AwqLoraLinear.forward``."""
        result = self.linear(r, x, layer)
        x = ops.cast(r, x, adapters.dtype, f"{layer.name}_lora_input")
        output = ops.cast(r, unscaled(r, x, layer, adapters), result.dtype, f"{layer.name}_lora_cast")
        output = ops.scale(r, output, f"{layer.name}_lora_scaled")
        return ops.add(r, result, output, f"{layer.name}_with_lora")
