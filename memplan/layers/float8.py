"""torchao's ``Float8Linear``, operator by operator, as PyTorch runs it without ``torch.compile``.

torchao 0.18.0, ``torchao/float8``: ``float8_linear.py`` (``matmul_with_hp_or_float8_args``: input and weight are saved
in 16 bits, and cast for every product), ``float8_scaling_utils.py`` and ``float8_utils.py`` (``tensor_to_scale``),
``float8_training_tensor.py`` (``_ToFloat8ConstrFunc``: by fp32), ``float8_ops.py`` (``preprocess_addmm``: kernels read
rows of the first and columns of the second operand, others are copied; ``addmm_float8_unwrapped``).
Shapes: t tokens, k features in, n features out; a weight is (n, k).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ..tape.events import Drop, Hold, Seam
from ..values import dataclass
from .autograd import Gradients, Recorder, Tensor, incoming
from .low_linear import LowLinear, as_given
from .work import ITEMSIZE, Operator, Product, Shape, Stream

if TYPE_CHECKING:
    from .torchtitan import Policy

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""``Float8LinearRecipeName``."""
MULTIPLE = 16
"""Features that a converted layer has a multiple of, in and out (``module_filter_fn``)."""
CAST, SCALARS = 6, 5
"""Kernels that cast a tensor, and those that make its scale, beside three that round."""


@dataclass(frozen=True, slots=True)
class Float8(LowLinear):
    """Which linear layers are converted, and how."""

    recipe: str
    skips: frozenset[str] = frozenset()
    """Layers that stay, by their names here."""
    auto: bool = False
    """Small ones stay, too (``auto_filter_small_kn``)."""
    gathered: bool = False
    """Weights arrive in 8 bits (``enable_fsdp_float8_all_gather``)."""
    rows: int = 0
    """Each expert's rows are padded to a multiple of this; 0: products of experts stay in 16 bits."""

    def takes(self, name: str, n: int, k: int) -> bool:
        """Whether a layer (n, k) is converted (torchtitan's ``module_filter_fn``; torchao's
        ``_auto_filter_for_tensorwise`` and ``_auto_filter_for_rowwise``)."""
        if name in self.skips or n % MULTIPLE or k % MULTIPLE:
            return False
        if not self.auto:
            return True
        if self.recipe == "tensorwise":
            return k > 4096 or n > 1024
        return n > 2048 and k > 1024 and (n > 4096 or k > 2048)

    def gathers(self, weight: str) -> bool:
        """Whether a parameter called so arrives in 8 bits."""
        name = weight.removesuffix(".weight")
        return self.gathered and name not in self.skips and not name.endswith("norm")

    @property
    def by_rows(self) -> bool:
        """A scale for every row of what is multiplied; else one for a whole tensor."""
        return self.recipe != "tensorwise"

    @property
    def weight_gradient(self) -> bool:
        """The product for gradients of weights is in 8 bits, too."""
        return self.recipe != "rowwise_with_gw_hp"

    def operands(
        self, r: Recorder, x: Tensor, weight: Tensor, name: str, policy: Policy
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """``Float8Linear.forward``."""
        shape, dtype, rows = x.shape, x.dtype, self.by_rows
        held = [scaled(r, shape, dtype, self, len(shape) - 1 if rows else None, f"{name}_input", policy)]
        if not self.gathered:
            along = 0 if rows else None
            held.append(scaled(r, weight.shape[::-1], dtype, self, along, f"{name}_weight", policy))
        return held, (x, weight)

    def scales(self, r: Recorder, t: int, n: int, k: int, name: str) -> list[Tensor]:
        return [r.empty((size,) if self.by_rows else (), "fp32", f"{name}_scale_inverse") for size in (t, n)]

    def gradients(self, r: Recorder, shape: Shape, n: int, dtype: str, name: str) -> Sequence[Tensor | None]:
        k, t, rows = shape[-1], prod(shape[:-1]), self.by_rows
        gradient = scaled(r, (t, n), dtype, self, 1 if rows else None, name)
        weights = None
        if not self.gathered:
            along = 1 if rows and self.weight_gradient else None
            weights = scaled(r, (k, n), dtype, self, along, f"{name}_weight")
        turned = r.empty((k, n), "fp8", f"{name}_weight_contiguous")
        repeated = None if self.weight_gradient else r.empty((k,), "fp32", f"{name}_weight_scales")
        made = _product(r, (t, k), self, dtype, f"{name}_input")
        del repeated, turned
        of_input = as_given(r, made, shape)
        del made
        if not self.weight_gradient:
            return [of_input, r.empty((n, k), dtype, f"{name}_weight")]
        columns = scaled(r, (t, n), dtype, self, 0 if rows else None, f"{name}_columns")
        inputs = scaled(r, (t, k), dtype, self, 0 if rows else None, f"{name}_input_columns")
        turned = r.empty((n, t), "fp8", f"{name}_contiguous")
        inputs_turned = r.empty((k, t), "fp8", f"{name}_input_contiguous")
        of_weight = _product(r, (n, k), self, dtype, f"{name}_weight")
        del turned, inputs_turned, gradient, weights, columns, inputs
        return [of_input, of_weight]

    def work(self, t: int, n: int, k: int, dtype: str, *, made: bool) -> Operator:
        inputs, weights, gradients = t * k, 0 if self.gathered else n * k, t * n
        e, launches = ITEMSIZE[dtype], CAST + SCALARS + (3 if self.by_rows else 0)

        def cast(elements: int) -> list[Stream]:
            moved = 3 * e + (e + 4 if e < 4 else 0) + 8 + 8 + 4 + 1
            return [Stream(elements * moved, launches)] if elements else []

        def product(m: int, columns: int, inner: int, turned: int) -> list[Stream | Product]:
            after = [Stream(m * columns * (4 + 4 + 2 * e), 2)] if self.by_rows else []
            return [Stream(2 * turned, 2), Product(m, columns, inner, 1, 1, e), *after]

        forward: list[Stream | Product] = [*cast(inputs), *cast(weights)]
        forward += [Product(t, n, k, 1, 1, e)] if made else []
        backward = [*cast(gradients), *cast(weights), *product(t, k, n, n * k)]
        if not self.weight_gradient:
            return Operator(forward, [*backward, Product(n, k, t, 1, e)])
        return Operator(forward, [*backward, *cast(gradients), *cast(inputs), *product(n, k, t, t * (n + k))])

    def grouped(self, r: Recorder, x: Tensor, weight: Tensor, offsets: Tensor, name: str) -> Tensor:
        """Rows (L, k) of experts times their transposed weights (e, n, k), with a scale for every row
        (``prototype/moe_training/fp8_grouped_mm.py``, ``_Float8GroupedMM``): a cast is one kernel."""
        (t, k), (e, n, _), dtype = x.shape, weight.shape, x.dtype
        taken, weights = _cast_rows(r, (t, k), t, f"{name}_input"), _cast_rows(r, (e, n, k), e * n, f"{name}_weight")
        out = _grouped_product(r, (t, n), dtype, (t, e * n), name)
        del taken, weights

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            return _grouped_backward(r, t, (e, n, k), incoming(gradients).dtype, f"grad_{name}")

        work = _grouped_work(t, e, n, k, dtype)
        return out.by(r.node((x, weight), (x, weight, offsets), backward, work=work))


def scaled(
    r: Recorder, shape: Shape, dtype: str, of: Float8, along: int | None, name: str, policy: Policy | None = None
) -> list[Tensor]:
    """``hp_tensor_to_float8_dynamic`` of a tensor: its scale and elements (``Float8TrainingTensor``); ``along`` one
    dimension its maxima are of, or of all."""
    scales = () if along is None else (*shape[:along], 1, *shape[along + 1 :])
    magnitudes = r.empty(shape, dtype, f"{name}_abs")
    largest = _largest(r, scales, dtype, f"{name}_amax", policy if along is None else None)
    del magnitudes
    scale = _scale(r, scales, of, name)
    del largest
    return [scale, eight_bits(r, shape, dtype, name)]


def _largest(r: Recorder, shape: Shape, dtype: str, name: str, policy: Policy | None) -> Tensor:
    """Selective recompute keeps what ``max`` gives, and not what ``amax`` does, of one dimension."""
    return policy.run(r, lambda r: r.empty(shape, dtype, name)) if policy is not None else r.empty(shape, dtype, name)


def _scale(r: Recorder, shape: Shape, of: Float8, name: str) -> Tensor:
    """``amax_to_scale``: in fp64, and by rows the next power of 2 below."""
    largest = r.empty(shape, "fp64", f"{name}_amax_fp64")
    clamped = r.empty(shape, "fp64", f"{name}_amax_clamped")
    inverse = r.empty(shape, "fp64", f"{name}_amax_inverse")
    wide = r.empty(shape, "fp64", f"{name}_scale_fp64")
    del inverse, clamped
    scale = r.empty(shape, "fp32", f"{name}_scale")
    del wide
    if of.by_rows:
        power = r.in_turn(
            (shape, "fp32", f"{name}_scale_log2"),
            (shape, "fp32", f"{name}_scale_floor"),
            (shape, "fp32", f"{name}_scale_power"),
        )
        scale = power
    del largest
    return scale


def eight_bits(r: Recorder, shape: Shape, dtype: str, name: str) -> Tensor:
    """``_ToFloat8ConstrFunc.forward``: a product in fp32, which lives until its elements have 8 bits."""
    wide = r.empty(shape, "fp32", f"{name}_fp32") if dtype != "fp32" else None
    product = r.empty(shape, "fp32", f"{name}_scaled")
    del wide
    clamped = r.empty(shape, "fp32", f"{name}_clamped")
    data = r.empty(shape, "fp8", f"{name}_fp8")
    del clamped, product
    return data


@lru_cache(maxsize=64)
def cast_shard(elements: int, dtype: str, *, scaled_before: bool) -> tuple[tuple[Hold | Drop, ...], int, int]:
    """``WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather`` (``fsdp_utils.py``): what it holds and drops, and which
    tensors it gives: a shard's elements in 8 bits, and their scale (0 if it is there, ``scaled_before``)."""
    r, shape, scale = Recorder(), (elements,), None
    if not scaled_before:
        reduced = r.in_turn((shape, dtype, "shard_abs"), ((), dtype, "shard_amax"), ((), dtype, "shard_amax_reduced"))
        scale = _scale(r, (), Float8("tensorwise"), "shard")
        del reduced
    data = eight_bits(r, shape, dtype, "shard")
    events = tuple(one for one in r.events if not isinstance(one, Seam))
    return events, r.hand_over(data), r.hand_over(scale) if scale is not None else 0


def _product(r: Recorder, shape: Shape, of: Float8, dtype: str, name: str) -> Tensor:
    """A product in backward: without fast accumulation scales of rows and columns are multiplied in afterwards, by an
    fp32 tensor as large as the product."""
    if not of.by_rows:
        inverse = [r.empty((), "fp32", f"{name}_scale_inverse") for _ in range(2)]
        out = r.empty(shape, dtype, name)
        del inverse
        return out
    by_row, by_column = (r.empty((size,), "fp32", f"{name}_scale_inverse") for size in shape)
    both = r.empty(shape, "fp32", f"{name}_scales")
    one = r.empty((), "fp32", f"{name}_one")
    del by_row
    other = r.empty((), "fp32", f"{name}_one")
    del by_column
    out = r.empty(shape, dtype, name)
    del one, other, both
    return out


def _cast_rows(r: Recorder, shape: Shape, scales: int, name: str) -> list[Tensor]:
    return [r.empty(shape, "fp8", f"{name}_fp8"), r.empty((scales,), "fp32", f"{name}_scale")]


def _grouped_product(r: Recorder, shape: Shape, dtype: str, scales: tuple[int, int], name: str) -> Tensor:
    """With the inverse of ``scales`` numbers of each operand."""
    inverse = [r.empty((count,), "fp32", f"{name}_scale_inverse") for count in scales]
    out = r.empty(shape, dtype, name)
    del inverse
    return out


def _grouped_backward(
    r: Recorder, t: int, weight: tuple[int, int, int], dtype: str, name: str
) -> Sequence[Tensor | None]:
    """Operands of the second product have a scale for every column of each expert's rows."""
    e, n, k = weight
    rows, weights = _cast_rows(r, (t, n), t, f"{name}_rows"), _cast_rows(r, weight, e * k, f"{name}_weight")
    of_input = _grouped_product(r, (t, k), dtype, (t, e * k), f"{name}_input")
    columns = _cast_rows(r, (t, n), e * n, f"{name}_columns")
    inputs = _cast_rows(r, (t, k), e * k, f"{name}_input_columns")
    of_weight = _grouped_product(r, weight, dtype, (e * n, e * k), f"{name}_weight")
    del rows, weights, columns, inputs
    return [of_input, of_weight]


def _grouped_work(t: int, e: int, n: int, k: int, dtype: str) -> Operator:
    """A cast reads a tensor twice, for its maxima and its elements, and writes 8 bits of each."""
    size, rows = ITEMSIZE[dtype], -(-t // e)

    def cast(elements: int, scales: int) -> Stream:
        return Stream(elements * (2 * size + 1) + 12 * scales, 2)

    forward: list[Stream | Product] = [cast(t * k, t), cast(e * n * k, e * n), Product(rows, n, k, e, 1)]
    of_input: list[Stream | Product] = [cast(t * n, t), cast(e * n * k, e * k), Product(rows, k, n, e, 1)]
    return Operator(forward, [*of_input, cast(t * n, e * n), cast(t * k, e * k), Product(n, k, rows, e, 1)])
