"""DistributedDataParallel's gradient buckets (``c10d/reducer.cpp``, ``nn/parallel/distributed.py``, torch 2.13).

Buckets are flat tensors that hold every gradient once, without alignment. The first ones follow the order of
``model.parameters()``; from the second iteration on (``should_rebuild_buckets``) they follow the order in which
gradients became ready in the first, unless unused parameters are looked for in every iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ...layers.autograd import ITEMSIZE
from ...layers.huggingface import LayerShape
from ...layers.module import Module, Options, Parameter
from ...plan.framework_sections import BUCKET_MB, Ddp
from ...tape.events import Category, Hold, Hook, cut, rounded
from ...values import replace
from ..plain.hooked import TIED, model_of

MIB = 2**20

FIRST_BUCKET = MIB
"""Bytes of the first bucket (``kDefaultFirstBucketBytes``) where ``bucket_cap_mb`` is not given."""

BUCKET = BUCKET_MB * MIB
"""Bytes of every further one."""


def limits(given: Ddp) -> tuple[int, int]:
    """Bytes at which the first bucket and every further one are closed (``_BucketCapacityConfig``)."""
    if given.bucket_cap_mb is None:
        return FIRST_BUCKET, BUCKET
    cap = int(given.bucket_cap_mb * MIB)
    return cap, cap


def bucket_sizes(gradients: Iterable[int], first: int = FIRST_BUCKET, cap: int = BUCKET) -> list[int]:
    """Bytes of each bucket for ``gradients`` in their order.

    ``compute_bucket_assignment_by_size``: a bucket is closed once it has reached its cap.
    """
    sizes, current, limit = [], 0, first
    for gradient in gradients:
        current += gradient
        if current >= limit:
            sizes.append(current)
            current, limit = 0, cap
    return [*sizes, current] if current else sizes


@lru_cache(maxsize=256)
def buckets(given: Ddp, shape: LayerShape, layers: int, recompute: bool) -> tuple[Hold, ...]:
    """An iteration's buckets once they have been rebuilt; those that gradients are views of hold the gradients."""
    registered, ready = parameters(shape, layers, recompute)
    rebuilt = given.static_graph or not given.find_unused_parameters
    sizes = [parameter.elements * ITEMSIZE[shape.dtype] for parameter in (ready if rebuilt else registered)]
    found = bucket_sizes(sizes, *limits(given))
    kept = Category.GRADIENTS if given.gradient_as_bucket_view else Category.COMMUNICATION_BUFFERS
    return tuple(Hold(0, rounded(size), kept, "ddp_bucket") for size in (found if rebuilt else found[::-1]))


def buckets_of(given: Ddp, ready: Sequence[Parameter], dtype: str) -> tuple[Hold, ...]:
    """As ``buckets`` of parameters whose gradients are ``ready`` in this order."""
    kept = Category.GRADIENTS if given.gradient_as_bucket_view else Category.COMMUNICATION_BUFFERS
    gradients = (one.elements * ITEMSIZE[one.dtype or dtype] for one in ready)
    return tuple(Hold(0, rounded(size), kept, "ddp_bucket") for size in bucket_sizes(gradients, *limits(given)))


def used_map(given: Ddp, tensors: int) -> tuple[Hold, ...]:
    """Which parameters were used, an int32 for each (``initialize_local_used_map``)."""
    if not (given.find_unused_parameters or given.static_graph):
        return ()
    return (Hold(0, rounded(4 * tensors), Category.COMMUNICATION_BUFFERS, "local_used_map", (tensors,), "int32"),)


def parameters(shape: LayerShape, layers: int, recompute: bool) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Every parameter once: as registered, and in the order in which gradients are ready, whatever the batch."""
    return _parameters(replace(shape, b=1, s=2), layers, recompute)


@lru_cache(maxsize=64)
def _parameters(shape: LayerShape, layers: int, recompute: bool) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    model = model_of(shape, layers, Options(consumes_gradients=True), recompute, True)
    order: list[int] = []
    waits = model.tied
    for instance in reversed(model.instances):
        for name in _ready(instance.hooked.module):
            if waits and name == TIED:
                waits = False  # the head's, which the embedding's is added to
                continue
            order.append(model.id_of(instance, name))
    return model.parameters, tuple(model.parameters[id] for id in order)


def ready_in(module: Module) -> list[Parameter]:
    """A module's parameters in the order in which their gradients are ready."""
    named = {one.name: one for one in module.parameters}
    return [named[name] for name in _ready(module)]


@lru_cache(maxsize=256)
def _ready(module: Module) -> tuple[str, ...]:
    """Names of a module's parameters in the order in which their gradients are ready."""
    seams = (seam for _, seam in cut(module.first.backward) if seam is not None)
    return tuple(seam.name for seam in seams if seam.hook is Hook.GRADIENT)


def broadcast_buffers(held: Sequence[Hold]) -> list[Hold]:
    """Flat copies of a model's buffers, one for each dtype that several have (``broadcast_coalesced``)."""
    by_dtype: dict[str, list[Hold]] = {}
    for hold in held:
        by_dtype.setdefault(hold.dtype, []).append(hold)
    result = []
    for dtype, own in by_dtype.items():
        size = sum(_bytes(hold) for hold in own)
        if len(own) > 1:
            result.append(Hold(0, rounded(size), Category.COMMUNICATION_BUFFERS, "buffers_flat", (), dtype))
    return result


def _bytes(hold: Hold) -> int:
    n = ITEMSIZE[hold.dtype]
    for dim in hold.shape:
        n *= dim
    return n
