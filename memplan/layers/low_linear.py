"""Linear layers whose products are in fewer than 16 bits: what torchao's formats share in torchtitan, and its MXFP8 and
NVFP4, operator by operator, as PyTorch runs them without ``torch.compile``.

Shapes: t tokens, or rows of experts with padding, k features in, n features out; a weight is (n, k), of e experts
(e, n, k).

torchao's main branch of August 2026 (commit 36027d8), ``torchao/prototype``. MXFP8: ``moe_training/mxfp8_linear.py``
(``mx_mm``: input and weight are saved in 16 bits, and cast for every product), ``mx_formats/kernels.py``
(``triton_to_mxfp8_dim0``, ``mxfp8_quantize_cuda``: a cast is one kernel), ``mx_formats/utils.py`` (``to_blocked``:
scales are copied into the order that tensor cores read), ``mx_formats/mx_tensor.py`` (``_addmm_mx_dispatch``).
torchtitan converts layers in ``components/quantization/mx.py``.

NVFP4: ``moe_training/nvfp4_training/nvfp4_linear.py`` (``nvfp4_mm_triton``: input and weight are saved in 4 bits,
turned and transposed for the products of backward). torchtitan converts layers in
``components/quantization/nvfp4.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ..tape.events import Category, Hold
from ..values import dataclass, replace
from .autograd import Gradients, Recorder, Tensor, incoming
from .experts import grouped_product
from .module import hold_bytes
from .work import ITEMSIZE, Operator, Product, Shape, Stream

if TYPE_CHECKING:
    from typing_extensions import Self

    from .torchtitan import Policy


class LowLinear(ABC):
    """Linear layers whose products are in fewer than 16 bits."""

    __slots__ = ()
    skips: frozenset[str]
    """Layers that stay, by their names here."""
    rows: int
    """Each expert's rows are padded to a multiple of this; 0: products of experts stay in 16 bits."""
    gathered: bool = False
    """Weights arrive in 8 bits."""
    is_kept: ClassVar[bool] = True
    """Selective recompute may keep a product."""

    @abstractmethod
    def takes(self, name: str, n: int, k: int) -> bool:
        """Whether a layer (n, k) is one of them."""

    def leaving(self, skips: frozenset[str]) -> Self:
        """The same where ``skips`` stay."""
        return replace(self, skips=skips)  # type: ignore[type-var]

    def product(
        self,
        r: Recorder,
        x: Tensor,
        weight: Tensor,
        name: str,
        policy: Policy,
        category: Category = Category.TEMPORARIES,
    ) -> Tensor:
        """x (…, k) times the transposed ``weight`` (n, k), without bias. Selective recompute counts the product among
        those that it keeps every second of, unless the format says otherwise (``is_kept``)."""
        shape, dtype, (n, k) = x.shape, x.dtype, weight.shape
        t, full = prod(shape[:-1]), (*shape[:-1], n)
        held, saved = self.operands(r, x, weight, name, policy)
        kept = self.is_kept and policy.counted()
        made = not (kept and policy.keeps and policy.again)
        held += self.scales(r, t, n, k, name) if made else []

        def multiplied(r: Recorder) -> Tensor:
            return r.empty(full, dtype, name, category)

        out = policy.run(r, multiplied) if kept else multiplied(r)
        held.clear()

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            return self.gradients(r, shape, n, incoming(gradients).dtype, f"grad_{name}")

        return out.by(r.node((x, weight), saved, backward, work=self.work(t, n, k, dtype, made=made)))

    @abstractmethod
    def operands(
        self, r: Recorder, x: Tensor, weight: Tensor, name: str, policy: Policy
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Both operands cast for the product: what ends with it, last first, and what is saved for backward."""

    @abstractmethod
    def scales(self, r: Recorder, t: int, n: int, k: int, name: str) -> list[Tensor]:
        """Those that a product (t, k) by (k, n) makes itself."""

    @abstractmethod
    def gradients(self, r: Recorder, shape: Shape, n: int, dtype: str, name: str) -> Sequence[Tensor | None]:
        """Of an input of ``shape`` and of the weight, of an incoming gradient in ``dtype``."""

    @abstractmethod
    def work(self, t: int, n: int, k: int, dtype: str, *, made: bool) -> Operator:
        """``made``: the product runs, whose result is not kept from before."""

    def grouped(self, r: Recorder, x: Tensor, weight: Tensor, offsets: Tensor, name: str) -> Tensor:
        """Rows (L, k) of experts times their transposed weights (e, n, k): in 16 bits."""
        return grouped_product(r, x, weight, offsets, name)

    def beside(self, count: int) -> tuple[Hold, ...]:
        """What a rank with ``count`` such layers keeps beside their weights: nothing, but the scales that gathered
        weights bring."""
        return ()


@dataclass(frozen=True, slots=True)
class Blocks(LowLinear):
    """Layers whose operands have a scale for each block of a row or column."""

    skips: frozenset[str] = frozenset()
    rows: int = 0
    multiple: ClassVar[int]
    """Tokens, and features in and out, that kernels have a multiple of; others raise an error."""

    def takes(self, name: str, n: int, k: int) -> bool:
        """All but those that stay, whatever their sizes: torchtitan looks at names alone."""
        return name not in self.skips


def as_given(r: Recorder, made: Tensor, shape: Shape) -> Tensor:
    """The gradient of an input (…, k) that a product made as (t, k)."""
    return made.view(*shape) if len(shape) != 2 and r.views_products else Tensor(made.storage, shape, made.dtype)


# -- MXFP8 -----------------------------------------------------------------------------------------------


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


# -- NVFP4 -----------------------------------------------------------------------------------------------


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
