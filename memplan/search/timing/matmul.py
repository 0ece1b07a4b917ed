"""Seconds of a matrix product from its shape: tiles, waves, and the bytes that enter and leave.

A product of (m, k) by (k, n) is cut into output tiles, which are dealt out to the multiprocessors; a tile at the edge
costs as much as a whole one, and the last wave as much as a full one (NVIDIA, Matrix Multiplication Background User's
Guide, sections 2.3 and 3: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/).
Tensor cores want 16 bytes' worth of elements in every row (section 2.2); other shapes run on ordinary cores, and so
does fp32, which PyTorch does not turn into TF32 unless told to (``torch.backends.cuda.matmul.allow_tf32``).
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from .rates import Rates

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
