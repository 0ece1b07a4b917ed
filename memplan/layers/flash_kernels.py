"""What flash-attention's backward kernels allocate inside, release by release.

2: ``csrc/flash_attn/flash_api.cpp``, ``mha_bwd``, which PyTorch has, too; 3: ``hopper/flash_api.cpp``, ``mha_bwd``; 4:
``flash_attn/cute/interface.py``, ``_flash_attn_bwd`` (August 2026). Each sums the gradient of the queries in fp32 in
rows and columns that fill whole blocks. Where several heads of queries share keys, 2 makes dk and dv of every head of
queries, and 3 and 4 sum those of the keys in fp32.

Shapes: b micro-batch, a heads, s sequence, d features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .autograd import Shape

Tensors = Iterator[tuple[str, Shape, str]]
"""Name, shape and dtype of each."""


class Release(NamedTuple):
    """Of flash-attention."""

    number: int = 2
    major: int = 9
    """Compute capability of the GPU that 4 is compiled for, whose blocks depend on it: 9 Hopper, 10 Blackwell, 12 its
    smaller ones."""


class Call(NamedTuple):
    """One backward pass."""

    shape: Shape
    """(b, a, s, d) of the queries."""
    heads: int
    """Of keys and values, whose sequences are as long."""
    dtype: str
    causal: bool = True
    deterministic: bool = False


def inside(release: Release, call: Call) -> Tensors:
    """In the order in which they are made."""
    return {2: _second, 3: _third, 4: _fourth}[release.number](call, release.major)


def _second(call: Call, major: int) -> Tensors:
    b, a, s, d = call.shape
    rows, columns = _filled(s, 128), _filled(d, 32) if d <= 192 else 256
    yield "softmax_d", (b, a, rows), "fp32"
    yield "dq_accum", (b, a, rows, columns), "fp32"
    for name in ("dk", "dv") if call.heads < a else ():
        yield f"{name}_expanded", call.shape, call.dtype


def _third(call: Call, major: int) -> Tensors:
    """On sm90."""
    b, a, s, d = call.shape
    columns = next(size for size in (64, 96, 128, 192, 256) if size >= d)
    of_queries = _hopper_queries(columns, call.causal)
    of_keys = 128 if columns <= 128 else 96 if columns == 192 else 80
    rows, key_rows = _filled(s, of_queries), _filled(s, of_keys)
    grouped = call.heads < a
    for name in ("softmax_d", "softmax_lse_log2"):
        yield name, (b, a, rows), "fp32"
    yield "dq_accum", (b, a, rows, columns), "fp32"
    for name in ("dk_accum", "dv_accum") if grouped else ():
        yield name, (b, call.heads, key_rows, columns), "fp32"
    yield "dq_semaphore", (rows // of_queries, b, a), "int32"
    for name in ("dk_semaphore", "dv_semaphore") if grouped and call.deterministic else ():
        yield name, (key_rows // of_keys, b, call.heads), "int32"


def _fourth(call: Call, major: int) -> Tensors:
    """Heads of 256 features have a kernel of their own on Blackwell, which adds up nothing outside."""
    b, a, s, d = call.shape
    columns, grouped = _filled(d, 32), call.heads < a
    of_queries, of_keys, together = 128, 128, 2 if d >= 128 else 1  # thread blocks of a cluster
    if major == 9:
        of_queries, of_keys, together = _hopper_queries(d, call.causal), 128 if d <= 128 else 96 if d <= 192 else 64, 1
    elif major == 12:
        of_queries, of_keys, together = 64, 64, 1
    rows, key_rows = _filled(s, of_queries), _filled(s, of_keys * together)
    alone = major in (10, 11) and d == 256
    if not alone:
        yield "dq_accum", (b, a, rows, columns), "fp32"
    for name in ("dpsum", "lse_log2"):
        yield name, (b, a, rows), "fp32"
    for name in ("dk_accum", "dv_accum") if grouped and not alone else ():
        yield name, (b, call.heads, key_rows, columns), "fp32"
    if call.deterministic:
        yield "dq_semaphore", (b, a, rows // of_queries, together), "int32"
    for name in ("dk_semaphore", "dv_semaphore") if grouped and call.deterministic else ():
        yield name, (b, call.heads, key_rows // of_keys, 2), "int32"


def _hopper_queries(d: int, causal: bool) -> int:
    """Rows of a block of queries (``kBlockM_sm90``, ``_tile_size_bwd_sm90``)."""
    if d <= 64:
        return 128
    return 80 if 96 < d <= 128 and not causal else 64


def _filled(size: int, block: int) -> int:
    return -(-size // block) * block
