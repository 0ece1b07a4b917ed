"""DistributedDataParallel's gradient buckets (``torch/csrc/distributed/c10d/reducer.cpp``)."""

from __future__ import annotations

from collections.abc import Iterable

FIRST_BUCKET = 2**20
"""Bytes of the first bucket (``kDefaultFirstBucketBytes``)."""

BUCKET = 25 * 2**20
"""Bytes of every further one (``bucket_cap_mb``)."""


def bucket_sizes(gradients: Iterable[int]) -> list[int]:
    """Bytes of each bucket for ``gradients`` in the order in which they become ready.

    ``compute_bucket_assignment_by_size``: a bucket is closed once it has reached its cap. With
    ``gradient_as_bucket_view=False``, the default, buckets exist beside the gradients.
    """
    sizes, current, cap = [], 0, FIRST_BUCKET
    for gradient in gradients:
        current += gradient
        if current >= cap:
            sizes.append(current)
            current, cap = 0, BUCKET
    return [*sizes, current] if current else sizes
