"""torchao's MXFP8 linear layers, operator by operator, as PyTorch runs them without ``torch.compile``.

torchao's main branch of August 2026 (commit 36027d8), ``torchao/prototype``: ``moe_training/mxfp8_linear.py``
(``mx_mm``: input and weight are saved in 16 bits, and cast for every product), ``mx_formats/kernels.py``
(``triton_to_mxfp8_dim0``, ``mxfp8_quantize_cuda``: a cast is one kernel), ``mx_formats/utils.py`` (``to_blocked``:
scales are copied into the order that tensor cores read), ``mx_formats/mx_tensor.py`` (``_addmm_mx_dispatch``).
torchtitan converts layers in ``components/quantization/mx.py``. Shapes as in ``low_linear.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from .autograd import Gradients, Recorder, Tensor, incoming
from .low_linear import Blocks, as_given
from .work import ITEMSIZE, Operator, Product, Shape, Stream

if TYPE_CHECKING:
    from .torchtitan import Policy


class MXFP8(Blocks):
    """``MXFP8Linear``: 32 elements share a scale of 8 bits."""

    multiple = 32

    def operands(
        self, r: Recorder, x: Tensor, weight: Tensor, name: str, policy: Policy
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """``mx_mm.forward``."""
        taken = _eight_bits(r, (prod(x.shape[:-1]), x.shape[-1]), f"{name}_input")
        return [*_eight_bits(r, weight.shape, f"{name}_weight"), *taken], (x, weight)

    def scales(self, r: Recorder, t: int, n: int, k: int, name: str) -> list[Tensor]:
        return [_ordered(r, (size, k), f"{name}_scales") for size in (t, n)]

    def gradients(self, r: Recorder, shape: Shape, n: int, dtype: str, name: str) -> Sequence[Tensor | None]:
        """``mx_mm.backward``: every operand is cast again along the dimension that its product sums over."""
        k, t = shape[-1], prod(shape[:-1])
        rows, weights = _eight_bits(r, (t, n), f"{name}_rows"), _eight_bits(r, (n, k), f"{name}_weight")
        scales = [_ordered(r, (size, n), f"{name}_scales") for size in (t, k)]
        of_input = as_given(r, r.empty((t, k), dtype, f"{name}_input"), shape)
        del scales
        columns, inputs = _eight_bits(r, (t, n), f"{name}_columns"), _eight_bits(r, (t, k), f"{name}_input_columns")
        scales = [_ordered(r, (size, t), f"{name}_scales") for size in (n, k)]
        of_weight = r.empty((n, k), dtype, f"{name}_weight")
        del scales, columns, inputs, rows, weights
        return [of_input, of_weight]

    def work(self, t: int, n: int, k: int, dtype: str, *, made: bool) -> Operator:
        """A cast reads 16 bits of an element and writes 8, and scales; scales are copied twice before a product."""
        e, part = ITEMSIZE[dtype], 1 / MXFP8.multiple

        def cast(elements: int) -> Stream:
            return Stream(elements * (e + 1 + part), 1)

        def product(m: int, columns: int, inner: int) -> list[Stream | Product]:
            return [Stream(4 * part * inner * (m + columns), 4), Product(m, columns, inner, 1, 1)]

        forward = [cast(t * k), cast(n * k), *(product(t, n, k) if made else [])]
        of_input = [cast(t * n), cast(n * k), *product(t, k, n)]
        return Operator(forward, [*of_input, cast(t * n), cast(t * k), *product(n, k, t)])

    def grouped(self, r: Recorder, x: Tensor, weight: Tensor, offsets: Tensor, name: str) -> Tensor:
        """``_MXFP8GroupedMM.forward`` (``moe_training/mxfp8_grouped_mm.py``, ``_compute_fwd_sm100``)."""
        (t, k), (e, n, _), dtype = x.shape, weight.shape, x.dtype
        taken = _ordered_rows(r, t, k, f"{name}_input")
        weights = _eight_bits(r, (e, n, k), f"{name}_weight")
        weights.append(r.empty((e, _up(n, 128) * _up(k // 32, 4)), "uint8", f"{name}_weight_scales"))
        out = r.empty((t, n), dtype, name)
        del taken, weights

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            of = incoming(gradients).dtype
            return [_of_rows(r, t, (e, n, k), of, f"grad_{name}"), _of_experts(r, t, (e, n, k), of, f"grad_{name}")]

        work = _work_of_experts(t, e, n, k, dtype)
        return out.by(r.node((x, weight), (x, weight, offsets), backward, work=work))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _ordered_rows(r: Recorder, rows: int, columns: int, name: str) -> list[Tensor]:
    """``mxfp8_quantize_2d_1x32_cutedsl``: scales come in the order that tensor cores read."""
    scales = _up(rows, 128) * _up(columns // MXFP8.multiple, 4)
    return [r.empty((rows, columns), "fp8", f"{name}_fp8"), r.empty((scales,), "uint8", f"{name}_scale")]


def _of_rows(r: Recorder, t: int, weight: tuple[int, int, int], dtype: str, name: str) -> Tensor:
    """``_compute_dgrad_sm100``."""
    e, n, k = weight
    rows = _ordered_rows(r, t, n, f"{name}_rows")
    weights = [r.empty(weight, "fp8", f"{name}_weight_fp8")]
    weights.append(r.empty((e, _up(k, 128) * _up(n // MXFP8.multiple, 4)), "uint8", f"{name}_weight_scale"))
    made = r.empty((t, k), dtype, f"{name}_input")
    del rows, weights
    return made


def _of_experts(r: Recorder, t: int, weight: tuple[int, int, int], dtype: str, name: str) -> Tensor:
    """``_compute_wgrad_sm100``: both operands are cast along rows, and scales copied with room for each expert's
    last tile (``triton_mx_block_rearrange_2d_K_groups``)."""
    e, n, k = weight
    columns, inputs = _eight_bits(r, (t, n), f"{name}_columns"), _eight_bits(r, (t, k), f"{name}_input_columns")
    places = r.empty((e,), "int32", f"{name}_scale_offsets")
    width = t // MXFP8.multiple + 4 * e
    scales = [r.empty((_up(size, 128), width), "uint8", f"{name}_scales") for size in (n, k)]
    made = r.empty(weight, dtype, f"{name}_weight")
    del scales, places, inputs, columns
    return made


def _work_of_experts(t: int, e: int, n: int, k: int, dtype: str) -> Operator:
    """As of a linear layer, with kernels that write scales in order, but for weights and gradients of weights."""
    size, part, rows = ITEMSIZE[dtype], 1 / MXFP8.multiple, -(-t // e)

    def cast(elements: int, ordered: int = 0) -> Stream:
        return Stream(elements * (size + 1 + part) + 2 * ordered * part, 1 + (ordered > 0))

    forward: list[Stream | Product] = [cast(t * k), cast(e * n * k, e * n * k), Product(rows, n, k, e, 1)]
    of_input: list[Stream | Product] = [cast(t * n), cast(e * n * k), Product(rows, k, n, e, 1)]
    return Operator(forward, [*of_input, cast(t * n, t * n), cast(t * k, t * k), Product(n, k, rows, e, 1)])


def _eight_bits(r: Recorder, shape: Shape, name: str) -> list[Tensor]:
    """A tensor's elements, and a scale of every 32 of a row or column."""
    scales = prod(shape) // MXFP8.multiple
    return [r.empty(shape, "fp8", f"{name}_fp8"), r.empty((scales,), "uint8", f"{name}_scale")]


def _ordered(r: Recorder, shape: Shape, name: str) -> Tensor:
    """``to_blocked`` of the scales of rows: in tiles of 128 by 4, which are filled up with zeros. Where tiles lie
    beside and below each other the first ``reshape`` copies; the second always does."""
    rows, columns = shape[0], shape[1] // MXFP8.multiple
    down, across = -(-rows // 128), -(-columns // 4)
    size = (512 * down * across,)
    padded = r.empty(size, "uint8", f"{name}_padded") if (rows, columns) != (128 * down, 4 * across) else None
    tiles = r.empty(size, "uint8", f"{name}_tiles") if down > 1 and across > 1 else None
    ordered = r.empty(size, "uint8", name)
    del tiles, padded
    return ordered
