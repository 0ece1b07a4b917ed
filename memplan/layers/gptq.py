"""GPTQ's weights: packed to 4 bits, with a scale and a zero for every group of inputs.

auto_gptq 0.7, and its copy in fms-acceleration: ``nn_modules/qlinear/qlinear_tritonv2.py`` (``QuantLinear``),
``nn_modules/triton_utils/dequant.py`` (``dequant248``, ``QuantLinearFunction``). peft: ``tuners/lora/gptq.py``
(``GPTQLoraLinear.forward``). Shapes: x (…, k), weight (n, k), g groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ..tape.events import rounded
from ..values import dataclass
from . import ops, work
from .autograd import ITEMSIZE, Gradients, Recorder, Shape, Tensor, size_of
from .fused_lora import Functions
from .tuning import Packed, delta, unscaled

if TYPE_CHECKING:
    from .tuning import Adapters, Layer


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
