"""torchao's NVFP4 linear layers, operator by operator, as PyTorch runs them without ``torch.compile``.

torchao's main branch of August 2026 (commit 36027d8), ``torchao/prototype/moe_training/nvfp4_training``:
``nvfp4_linear.py`` (``nvfp4_mm_triton``: input and weight are saved in 4 bits, turned and transposed for the products
of backward). torchtitan converts layers in ``components/quantization/nvfp4.py``. Shapes as in ``low_linear.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..tape.events import Category, Hold
from .autograd import Recorder, Tensor
from .low_linear import Blocks, as_given
from .module import hold_bytes
from .work import ITEMSIZE, Operator, Product, Shape, Stream

if TYPE_CHECKING:
    from .torchtitan import Policy


class NVFP4(Blocks):
    """``NVFP4Linear``: 16 elements share a scale of 8 bits, and a tensor one of 32."""

    multiple = 128
    is_kept = False
    """``aten._scaled_mm_v2`` is not among ``compute_intensive_ops``."""

    def operands(
        self, r: Recorder, x: Tensor, weight: Tensor, name: str, policy: Policy
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """``nvfp4_mm_triton.forward``."""
        t, (n, k) = prod(x.shape[:-1]), weight.shape
        turned_largest, largest = _numbers(r, f"{name}_input_amax", 2)
        turned = _four_bits(r, t, k, f"{name}_input_turned")
        taken = _four_bits(r, t, k, f"{name}_input")
        (of_weight,) = _numbers(r, f"{name}_weight_amax", 1)
        weights = _four_bits(r, n, k, f"{name}_weight")
        transposed = _four_bits(r, n, k, f"{name}_weight_transposed")
        return [largest, *taken, *weights], (*turned, turned_largest, *transposed, of_weight)

    def scales(self, r: Recorder, t: int, n: int, k: int, name: str) -> list[Tensor]:
        return _numbers(r, f"{name}_scale", 2)

    def gradients(self, r: Recorder, shape: Shape, n: int, dtype: str, name: str) -> Sequence[Tensor | None]:
        """``nvfp4_mm_triton.backward``: the gradient is cast with stochastic rounding, once for each product."""
        k, t = shape[-1], prod(shape[:-1])
        largest = _numbers(r, f"{name}_amax", 2)
        noise = _numbers(r, f"{name}_rng", 3, "int64")
        columns, rows = _four_bits(r, t, n, f"{name}_turned"), _four_bits(r, t, n, name)
        del noise
        scales = _numbers(r, f"{name}_scale", 2)
        of_input = as_given(r, r.empty((t, k), dtype, f"{name}_input"), shape)
        scales += _numbers(r, f"{name}_scale", 2)
        of_weight = r.empty((n, k), dtype, f"{name}_weight")
        del scales, rows, columns, largest
        return [of_input, of_weight]

    def work(self, t: int, n: int, k: int, dtype: str, *, made: bool) -> Operator:
        """A tensor is read once for its maximum and once more to be cast, twice over: 4 bits of each element, and
        scales. Casts of weights fill their results with zeros before (``triton_weight_quantize_2d``)."""
        e, written = ITEMSIZE[dtype], 2 * (1 / 2 + 1 / 16)
        inputs, weights = Stream(t * k * (2 * e + written), 4), Stream(n * k * (2 * e + written + 1), 5)
        gradients, scalars = Stream(t * n * (2 * e + written), 4), Stream(16, 2)
        return Operator(
            [inputs, weights, scalars, Product(t, n, k, 1, 0.5)],
            [gradients, Stream(24, 3), scalars, Product(t, k, n, 1, 0.5), scalars, Product(n, k, t, 1, 0.5)],
        )

    def beside(self, count: int) -> tuple[Hold, ...]:
        """Of each layer a seed of its stochastic rounding, and the signs of the Hadamard transform; once in a process a
        workspace of Triton's descriptors (``prepare_for_cuda_graph``), and the transform (``get_rht_matrix``)."""
        of_layer = (_buffer("nvfp4_seed", (1,), "int64"), _buffer("nvfp4_signs", (16,), "uint8"))
        of_process = (_buffer("nvfp4_workspace", (131072,), "uint8"), _buffer("nvfp4_hadamard", (16, 16), "bf16"))
        return (*of_layer * count, *of_process) if count else ()


def _numbers(r: Recorder, name: str, count: int, dtype: str = "fp32") -> list[Tensor]:
    return [r.empty((), dtype, name) for _ in range(count)]


def _four_bits(r: Recorder, rows: int, columns: int, name: str) -> list[Tensor]:
    """A tensor's elements, two in a byte, and a scale of every 16."""
    size = rows * columns
    return [r.empty((size // 2,), "uint8", f"{name}_fp4"), r.empty((size // 16,), "fp8", f"{name}_scales")]


def _buffer(name: str, shape: Shape, dtype: str) -> Hold:
    return Hold(0, hold_bytes(shape, dtype), Category.BUFFERS, name, shape, dtype)
