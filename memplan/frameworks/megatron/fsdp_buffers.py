"""Buffers of Megatron-FSDP beside its shards: gathered buckets, and those that stay for good.

``megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py``: ``StorageResizeBasedBucketAllocator``,
``FixedPoolAllocator`` (double buffers of layers that are alike), ``MaxPoolAllocator`` (of all layers), and their
``fallback_to_persistent_buffer``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...layers.autograd import ITEMSIZE, size_of
from ...tape.events import Category, Hold, rounded
from .fsdp import Bucket, Sharding, doubled

BUFFERS = 2
"""Of each kind, with double buffers."""


def gathered(bucket: Bucket, dtype: str) -> Hold:
    own = bucket.dtype(dtype)
    size = rounded(bucket.elements * ITEMSIZE[own])
    return Hold(0, size, Category.GATHERED_PARAMETERS, "parameter_bucket", (bucket.elements,), own)


def columns_of(bucket: Bucket) -> Iterator[Hold]:
    for own, part in bucket.columns():
        name = f"{own.name}_{part.name}"
        yield Hold(
            0, rounded(size_of(part.shape, part.dtype)), Category.GATHERED_PARAMETERS, name, part.shape, part.dtype
        )


def persistent(buckets: Sequence[Bucket], sharding: Sharding, dtype: str) -> list[Hold]:
    """Gathered buckets of no unit, with columns, and double buffers, which the first iteration makes. Units take these
    in turn, in the order of the pass that first needs them (those of MXFP8 in orders of their own, so that both are as
    large as any); construction uses the first one alone."""
    fixed, persists = doubled(buckets, sharding), sharding.persists and sharding.double_buffer
    units = sorted(fixed)
    holds: list[Hold] = []
    apart = [bucket for bucket in buckets if bucket.unit not in fixed]
    if sharding.shards_parameters:
        outside = [bucket for bucket in apart if bucket.unit is None or persists]
        pool = sharding.pool(1) if persists else 0
        holds += [gathered(one, dtype)._replace(stream=pool) for one in outside for _ in range(1 + one.two_buffers)]
        if sharding.ends_columns:
            holds += [one for bucket in outside if bucket.unit is None for one in columns_of(bucket)]
        second = units if any(bucket.two_buffers for bucket in buckets) else units[1::2]
        for at, turn in enumerate((units, second)):
            for one in _largest(buckets, turn, dtype):
                holds += [gathered(one, dtype)._replace(stream=sharding.pool(at))] * (1 + one.two_buffers)
    if sharding.shards_gradients:
        own = [one for turn in (units[::-2], units[-2::-2]) for one in _largest(buckets, turn, None)]
        holds += [_gradients(one, sharding) for one in (*own, *(apart if persists else ()))]
    return holds


def _largest(buckets: Sequence[Bucket], units: Sequence[int], dtype: str | None) -> Iterator[Bucket]:
    """The bucket that each buffer is as large as: of those that are alike, with ``dtype`` for 16 bits or all, the
    largest one of all ``units``, the second one, and so on."""
    found: dict[tuple[str, int], Bucket] = {}
    for unit in units:
        seen: Counter[str] = Counter()
        for bucket in sorted((one for one in buckets if one.unit == unit), key=lambda one: -one.elements):
            kind = bucket.dtype(dtype) if dtype is not None else ""
            place = kind, seen[kind]
            seen[kind] += 1
            if place not in found or bucket.elements > found[place].elements:
                found[place] = bucket
    yield from found.values()


def _gradients(bucket: Bucket, sharding: Sharding) -> Hold:
    dtype, name = sharding.communication, "gradient_buffer"
    size, shape = rounded(bucket.elements * ITEMSIZE[dtype]), (bucket.elements,)
    return Hold(0, size, Category.COMMUNICATION_BUFFERS, name, shape, dtype, sharding.pool(BUFFERS))
