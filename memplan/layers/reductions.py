"""What kernels allocate inside to add rows up: sums of gradients, and the gradient of an embedding's table.

How many blocks of threads share a sum depends on how many threads the GPU runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ..tape.events import Category
from .work import ITEMSIZE, Shape

if TYPE_CHECKING:
    from .autograd import Recorder, Tensor

WARP = 32
MOST_THREADS = 512
"""Of a block (``mnt_wrapper``)."""
LEAST_VALUES, MOST_VALUES = 16, 256
"""That a thread adds up where blocks share a sum (``min_values_per_thread``, ``max_values_per_thread``)."""
INT32 = (1 << 31) - 1
ROWS_PER_PARTIAL = 10
"""Rows of one token that are added up at a time (``NROWS_PER_THREAD``)."""
LONGEST_UNSORTED = 3072
"""Tokens up to which ``embedding_dense_backward_cuda`` needs nothing."""


def partial_sums(outputs: int, rows: int, threads: int) -> tuple[int, int]:
    """Bytes of the partial sums, and of the semaphores, with which blocks of threads share the sums of ``rows`` rows of
    ``outputs`` numbers each, on a GPU that runs ``threads`` at a time; 0 where each sum is one block's
    (``aten/src/ATen/native/cuda/Reduce.cuh`` of torch 2.13, ``setReduceConfig``, ``global_memory_size``).

    They add in fp32, whatever the dtype.
    """
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    most = MOST_THREADS // vector
    wide, high = (min(_last_power_of_2(size), most) for size in (outputs // vector, rows))
    height = min(high, most // min(wide, WARP))
    width = min(wide, most // height)
    values = rows
    if values < min(16 * height, MOST_VALUES):
        return 0, 0  # each warp has sums of its own
    values = -(-values // height)
    grid, wanted = -(-outputs // vector // width), threads // (width * height)
    if values < MOST_VALUES or grid > wanted:
        return 0, 0
    blocks = max(min(-(-wanted // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return (4 * outputs * blocks * width * vector, 4 * grid) if blocks > 1 else (0, 0)


def summed(r: Recorder, whole: Shape, kept: Shape, dtype: str, name: str) -> Tensor:
    """The sum of a tensor of the shape ``whole`` to its last dimensions ``kept``."""
    made = r.empty(kept, dtype, name)
    sum_inside(r, whole, kept, dtype)
    return made


def sum_inside(r: Recorder, whole: Shape, kept: Shape, dtype: str) -> None:
    """What the sum of a tensor of the shape ``whole`` to the last dimensions ``kept`` allocates, one after the other;
    sums over the last dimension are one block's, or of few numbers.

    A tensor whose offsets in bytes exceed 32 bits is halved until they do not (``with_32bit_indexing``); of one in 16
    bits the sums so far are kept in fp32 (``AccumulationBuffer``).
    """
    kept = kept[next((at for at, size in enumerate(kept) if size > 1), len(kept)) :]
    if not (r.kernel_workspaces and r.threads) or not kept or whole[-len(kept) :] != kept:
        return
    outputs = prod(kept)
    parts = list(_parts(prod(whole) // outputs, outputs * ITEMSIZE[dtype]))
    in_16_bits = len(parts) > 1 and ITEMSIZE[dtype] < 4
    so_far = r.empty(kept, "fp32", "sums_so_far", Category.WORKSPACES) if in_16_bits else None
    for rows in parts:
        sums, semaphores = partial_sums(outputs, rows, r.threads)
        if sums:
            partial = r.empty((sums,), "bool", "partial_sums", Category.WORKSPACES)
            r.empty((semaphores,), "bool", "semaphores", Category.WORKSPACES)
            del partial
    del so_far


def _parts(rows: int, row: int) -> Iterator[int]:
    """``rows`` of ``row`` bytes each, in parts."""
    if rows * row <= INT32 or rows < 2:
        yield rows
        return
    yield from _parts(rows // 2, row)
    yield from _parts(rows - rows // 2, row)


def _last_power_of_2(size: int) -> int:
    """The largest one up to ``size`` (``last_pow2``)."""
    return 1 << max(size.bit_length() - 1, 0)


def table_gradient(r: Recorder, table: Shape, dtype: str, n: int, name: str, *, copies: bool = False) -> Tensor:
    """The gradient of a table of the shape (v, h) of which ``n`` rows were looked up, and what
    ``embedding_dense_backward_cuda`` allocates inside; ``copies``: of a gradient that does not lie row by row, a copy.

    It sums the rows of one token in fp32, at most 10 at a time, unless n <= 3072
    (``aten/src/ATen/native/cuda/Embedding.cu``, ``EmbeddingBackwardKernel.cu``).
    """
    label, h = f"grad_{name}_weight", table[1]
    if not r.kernel_workspaces:
        return r.empty(table, dtype, label)
    inside = [r.empty((n, h), dtype, f"grad_{name}_contiguous", Category.WORKSPACES)] if copies else []
    if n <= LONGEST_UNSORTED:
        return r.empty(table, dtype, label)
    inside += [r.empty((n,), "int64", part, Category.WORKSPACES) for part in ("indices_sorted", "indices_original")]
    rows = r.empty((n,), "int64", "indices_range", Category.WORKSPACES)
    r.empty((2 * n,), "int64", "radix_sort_buffers", Category.WORKSPACES)
    del rows
    grad = r.empty(table, dtype, label)
    segments = min(n, table[0])
    parts = n // ROWS_PER_PARTIAL + segments
    offsets = ("segment_offsets", "partials_per_segment", "partials_per_segment_offset")
    inside += [r.empty((segments,), "int64", part, Category.WORKSPACES) for part in offsets]
    inside.append(r.empty((parts,), "int64", "partial_segment_offset", Category.WORKSPACES))
    inside.append(r.empty((parts, h), "fp32", "grad_weight_per_segment", Category.WORKSPACES))
    inside.clear()
    return grad
