"""Seconds of kernels: products, linear layers, and memory-bound operators by the bytes that they read and write.

Bytes are counted from the code, forward and backward, for each element of what an operator works on: a kernel reads
every operand once and writes every result once. ``e`` is the size of an element of activations. Whose code it is
(``shape.Code``) decides how many kernels an operation is.

A product of (m, k) by (k, n) is cut into output tiles, which are dealt out to the multiprocessors; a tile at the edge
costs as much as a whole one, and the last wave as much as a full one (NVIDIA, Matrix Multiplication Background User's
Guide, sections 2.3 and 3: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/).
Tensor cores want 16 bytes' worth of elements in every row (section 2.2); other shapes run on ordinary cores, and so
does fp32, which PyTorch does not turn into TF32 unless told to (``torch.backends.cuda.matmul.allow_tf32``).
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

from .rates import Rates
from .shape import ITEMSIZE, Shape

LARGEST = 256 * 128
"""Elements of the most efficient output tile, of which a multiprocessor holds one; of smaller ones it holds several
at once, which share its tensor cores."""

TILES = tuple((rows, columns, rows * columns) for rows, columns in ((256, 128), (128, 256), (128, 128), (64, 64)))
"""Rows, columns and elements of output tiles (cuBLAS has more; the guide's section 2.3)."""

SKINNY = (*TILES, (256, 16, 4096), (16, 256, 4096))
"""For products with a side below the smallest tile's, such as an adapter's."""

MOST_SPLITS = 8
"""Parts of the inner dimension that a product with few tiles is cut into; their fp32 sums are written and read."""

ALIGNMENT = 8
"""Elements of 16 bits in 16 bytes."""

LAUNCH = 3.8e-6
"""Seconds between the starts of kernels in a stream: a shorter one ends no sooner
(https://developer.nvidia.com/blog/cuda-graphs/, overlapped launches)."""


@lru_cache(maxsize=1 << 16)
def matmul(rates: Rates, m: int, n: int, k: int, batch: int = 1, element: int = 2, written: int | None = None) -> float:
    """Seconds of ``batch`` products (m, k) x (k, n) of ``element`` bytes each; ``written`` bytes move for each
    element of the result, ``element`` unless said (a gradient that is added to in fp32: read and written, 8)."""
    if not (m and n and k and batch):
        return 0.0
    aligned = not (m % ALIGNMENT or n % ALIGNMENT or k % ALIGNMENT)
    sustained = rates.matrix if aligned and element == 2 else rates.ordinary
    work = 2.0 * k / (sustained / rates.processors)
    operands = batch * (m * k + k * n) * element / rates.memory
    result = batch * m * n * (element if written is None else written) / rates.memory
    partial = batch * m * n * 2 * 4 / rates.memory
    least = inf
    for rows, columns, area in TILES if min(m, n) >= 64 else SKINNY:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in {1, _spare(tiles, rates.processors)}:
            computed = work * _busiest(tiles, rates.processors, area) / split
            back = result + (split * partial if split > 1 else 0.0)
            moved = operands + back
            one = max(computed, moved) if rates.overlapped_epilogue else max(computed + back, moved)
            least = min(least, one)
    return max(least, LAUNCH)


def streamed(rates: Rates, moved: float, kernels: int = 1) -> float:
    """Seconds of ``kernels`` that read and write ``moved`` bytes together."""
    return max(moved / rates.memory, kernels * LAUNCH) if moved else 0.0


def _spare(tiles: int, processors: int) -> int:
    """Parts that sums can be cut into, where there are processors to spare."""
    return max(1, min(processors // tiles, MOST_SPLITS))


def _busiest(tiles: int, processors: int, area: int) -> int:
    """Elements that the busiest multiprocessor computes."""
    if tiles <= processors:
        return area
    at_once = LARGEST // area
    return -(-tiles // (processors * at_once)) * at_once * area


class Moved(NamedTuple):
    """Bytes per element, and kernels."""

    forward: float
    backward: float
    kernels: int = 1
    backward_kernels: int = 1


NOTHING = Moved(0.0, 0.0, 0, 0)

MASK = 1
"""Bytes of an element of a dropout mask."""


def norm(shape: Shape) -> Moved:
    """Per feature of a hidden state. A kernel that knows the operation reads and writes once; backward reads the
    gradient and the input for each of its two results."""
    e = shape.element
    if shape.spec.norm == "rmsnorm" and shape.code.norm_in_python:
        casts = 2 * (e + 4) if e < 4 else 0
        return Moved(casts + 20 + 2 * e, 2 * casts + 44 + 5 * e, 6, 12)
    return Moved(2 * e, 5 * e, 1, 2)


def residual(shape: Shape) -> Moved:
    """Dropout of a block's output and the sum with the residual; backward sums the two gradients that meet."""
    e, drops = shape.element, shape.spec.hidden_dropout > 0
    if shape.code.fused_residual:
        return Moved(3 * e + (MASK if drops else 0), 3 * e + (2 * e + MASK if drops else 0), 1, 2 if drops else 1)
    dropout = 2 * e + MASK if drops else 0
    return Moved(3 * e + dropout, 3 * e + dropout, 2 if drops else 1, 2 if drops else 1)


def activation(shape: Shape) -> Moved:
    """Per feature of the MLP's inner layer."""
    e, kind = shape.element, shape.spec.activation
    if shape.spec.gated:
        return Moved(3 * e, 5 * e) if shape.code.fused_activation else Moved(5 * e, 9 * e, 2, 3)
    if shape.code.fused_activation or kind in ("gelu", "relu"):
        return Moved(2 * e, 3 * e)
    return Moved(18 * e, 27 * e, 8, 10)


def rotary(shape: Shape) -> Moved:
    """Per feature of queries and keys."""
    e = shape.element
    if shape.spec.positions != "rotary":
        return NOTHING
    if shape.code.fused_rope:
        return Moved(2 * e, 2 * e)
    if shape.code.complex_rope:
        return Moved(2 * (e + 4) + 8, 2 * (e + 4) + 8, 3, 3)
    return Moved(10 * e, 10 * e, 5, 5)


def scores(shape: Shape) -> Moved:
    """Per score of attention that keeps them: scale, mask, softmax, dropout, without the two products."""
    e, drops = shape.element, shape.spec.attention_dropout > 0
    dropout = 2 * e + MASK if drops else 0
    # ``baddbmm`` copies its broadcast first argument into the result, which the product then reads.
    alibi = 2 * e if shape.spec.positions == "alibi" else 0
    if shape.code.fused_softmax:
        return Moved(2 * e + dropout + alibi, 3 * e + dropout, 2 if drops else 1, 2 if drops else 1)
    casts = 2 * (e + 4) if e < 4 else 0
    return Moved(4 * e + 8 + casts + dropout, 2 * e + 12 + casts + dropout, 5, 5)


def copies(shape: Shape) -> Moved:
    """Per feature of the attention's output: the context made contiguous, and its gradient."""
    e = shape.element
    if shape.code.packed_attention and shape.flash:
        return NOTHING
    return Moved(2 * e, 8 * e if shape.code.joined_gradients else 2 * e, 1, 2)


def bias_gradient(shape: Shape) -> Moved:
    """Per feature of a linear layer's output: a reduction reads the gradient once more."""
    return Moved(0.0, float(shape.element), 0, 1)


def cross_entropy(shape: Shape) -> Moved:
    """Per logit on a rank, without the products."""
    e = shape.element
    cast = e + 4 if e < 4 else 0
    if shape.loss in ("liger", "cut"):
        return Moved(3 * e, e) if shape.loss == "liger" else NOTHING
    if shape.code.fused_loss == "te":
        return Moved(3 * e, 2 * e)
    if shape.code.fused_loss == "native":
        return Moved(cast + 4 + 12, 8 + cast, 3, 2)
    if shape.code.parallel_loss or shape.loss == "vocab-parallel":
        # max; subtract; exp; sum; divide. Backward: copy of softmax, times the loss's gradient, cast.
        return Moved(cast + 4 + 8 + 8 + 4 + 8, 8 + 8 + cast, 6, 3)
    return Moved(cast + 8 + 8, 4 + 12 + 8 + cast, 3, 4)


class Seconds(NamedTuple):
    """Of one part of a layer."""

    forward: float = 0.0
    backward: float = 0.0
    forward_parallel: float = 0.0
    backward_parallel: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0

    def __add__(self, other: object) -> Seconds:
        assert isinstance(other, Seconds)
        return Seconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_parallel + other.forward_parallel,
            self.backward_parallel + other.backward_parallel,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
        )

    def times(self, count: int) -> Seconds:
        """The same ``count`` times."""
        return Seconds(
            count * self.forward,
            count * self.backward,
            count * self.forward_parallel,
            count * self.backward_parallel,
            count * self.forward_kernels,
            count * self.backward_kernels,
        )


def streams(rates: Rates, moved: Moved, elements: float) -> Seconds:
    """A memory-bound operator on so many elements."""
    forward = streamed(rates, moved.forward * elements, moved.kernels)
    backward = streamed(rates, moved.backward * elements, moved.backward_kernels)
    return Seconds(forward, backward, 0.0, 0.0, moved.kernels, moved.backward_kernels)


FOUR_BITS = 0.5
"""Bytes of a weight in 4 bits; its scales are a 32nd of that and left out."""

CASTS = 12
"""Bytes that autocast moves for each weight: fp32 read, 16 bits written, and the same for its gradient."""


def linear(
    shape: Shape,
    rates: Rates,
    inputs: int,
    outputs: int,
    name: str = "",
    bias: bool = False,
    tokens: int | None = None,
) -> Seconds:
    """A product with a weight; backward has two, for the gradients of input and weight, and adds up the latter. Beside
    LoRA's adapters no weight has a gradient; what is kept in 4 bits is turned into 16 for each pass."""
    m, e = shape.tokens if tokens is None else tokens, shape.element
    forward = matmul(rates, m, outputs, inputs, 1, e)
    backward = matmul(rates, m, inputs, outputs, 1, e)
    if shape.quantised and name:
        unpacked = streamed(rates, (FOUR_BITS + e) * inputs * outputs)
        forward, backward = forward + unpacked, backward + unpacked
    if shape.casts:
        backward += streamed(rates, float(CASTS * inputs * outputs), 2)
    if shape.rank:
        frozen = Seconds(forward, backward, 0.0, 0.0, 1, 1)
        return frozen + adapter(shape, rates, inputs, outputs, m) if name in shape.adapted else frozen
    backward += weight_gradient(shape, rates, inputs, outputs, m)
    sums = streams(rates, bias_gradient(shape), m * outputs) if bias else Seconds()
    return Seconds(forward, backward, 0.0, 0.0, 1, 2 if shape.code.fused_accumulation else 3) + sums


def weight_gradient(shape: Shape, rates: Rates, inputs: int, outputs: int, tokens: int) -> float:
    """The product, and the sum with what earlier micro-batches left."""
    e, kept = shape.element, ITEMSIZE[shape.gradients]
    if shape.code.fused_accumulation:
        return matmul(rates, outputs, inputs, tokens, 1, e, 2 * kept)
    product = matmul(rates, outputs, inputs, tokens, 1, e)
    sums = shape.accumulates or shape.gradients != shape.dtype
    return product + (streamed(rates, (e + 2 * kept) * inputs * outputs) if sums else 0.0)


def adapter(shape: Shape, rates: Rates, inputs: int, outputs: int, tokens: int) -> Seconds:
    """peft's LoRA layer: the input in the adapter's dtype, down to its rank and up again, scaled, added to the result
    and cast back (``tuners/lora/layer.py``, ``Linear.forward``); backward moves each of these twice."""
    e, a, r = shape.element, ITEMSIZE[shape.adapter], shape.rank
    cast = e + a if a != e else 0
    moved = float(tokens * (cast * inputs + (2 * a + e + 2 * a + cast) * outputs))
    forward = matmul(rates, tokens, r, inputs, 1, a) + matmul(rates, tokens, outputs, r, 1, a)
    backward = forward + matmul(rates, inputs, r, tokens, 1, a) + matmul(rates, r, outputs, tokens, 1, a)
    return Seconds(forward + streamed(rates, moved, 4), backward + streamed(rates, 2 * moved, 8), 0.0, 0.0, 6, 12)
