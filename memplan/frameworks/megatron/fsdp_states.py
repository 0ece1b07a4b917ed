"""What a rank keeps under Megatron-FSDP, and what its step takes.

``megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py``: ``_init_each_parameter_group_buffers``
(in which order buffers are made), ``update_main_grads``, ``copy_main_weights_to_model_weights``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import prod

from ...layers.autograd import ITEMSIZE
from ...layers.megatron_core.precision import Part
from ...tape.events import Category, Event, Hold, Stretch, drops, rounded
from ...tape.program import Kept
from .clipping import cast
from .fsdp import Bucket, Sharding, doubled
from .states import Piece, Rules, optimized

BATCH = 5 * 1024**3
"""Elements of buckets with block scaling, above which they are quantised before more are gathered."""


def keep(buckets: Sequence[Bucket], rules: Rules, sharding: Sharding, ahead: Sequence[Hold]) -> Kept:
    """All that the rank keeps whose states are largest. ``ahead``: parameters of units that the step gathers for the
    next iteration (``start_param_sync``)."""
    ids = count(1)
    construction: list[Event] = []
    parameters, whole = Category.PARAMETERS, sharding.strategy == "no_shard"
    fixed = doubled(buckets, sharding)

    def hold(elements: int, dtype: str, category: Category, name: str, stream: int = 0) -> Hold:
        size = rounded(elements * ITEMSIZE[dtype])
        made = Hold(next(ids), size, category, name, (elements,), dtype, stream)
        construction.append(made)
        return made

    def part(one: Part, category: Category, name: str = "") -> Hold:
        return hold(prod(one.shape), one.dtype, category, name or one.name)

    def originals(bucket: Bucket) -> list[Hold]:
        """Those that end: scales stay, and so do columns, unless hooks end them."""
        found = []
        for member in bucket.members:
            own, low = member.parameter, bucket.low
            for one in low.beside_rows(own.shape) if low is not None else ():
                part(one, Category.BUFFERS)
            found.append(hold(own.elements, bucket.dtype(rules.dtype), parameters, own.name))
            if bucket.two_buffers:
                found.append(hold(own.elements, bucket.dtype(rules.dtype), parameters, f"{own.name}_columns"))
        columns = [part(one, parameters, f"{own.name}_{one.name}") for own, one in bucket.columns()]
        return found + columns if sharding.ends_columns else found

    made = [] if sharding.meta else [originals(bucket) for bucket in buckets]
    for at, bucket in enumerate(buckets):
        ranks = sharding.of(bucket)
        temporary: list[Hold] = []
        names = () if whole else ("model_weight_buffer", "transpose_weight_buffer")[: 1 + bucket.two_buffers]
        for name in names:
            share = ranks if sharding.shards_parameters else 1
            dtype = bucket.dtype(rules.dtype)
            hold(bucket.elements // share, dtype, parameters, name, sharding.pool())
            if share > 1:
                stream = sharding.pool() if bucket.unit in fixed or sharding.persists else 0
                temporary.append(hold(bucket.elements, dtype, Category.GATHERED_PARAMETERS, "bucket", stream))
        share = 1 if whole else ranks * sharding.outer
        hold(bucket.elements // share, "fp32", Category.MAIN_PARAMETERS, "main_weight_buffer")
        if not whole:
            temporary += originals(bucket) if sharding.meta else made[at]
        construction += drops(temporary)
    gradients = sum(one.elements // (sharding.of(one) if sharding.shards_gradients else 1) for one in buckets)
    hold(gradients, rules.gradients, Category.GRADIENTS, "main_grad_buffer", sharding.pool())
    fullest = {
        experts: _fullest(own, sharding)
        for experts in (False, True)
        if (own := [bucket for bucket in buckets if bucket.experts is experts])
    }
    parts = [
        optimized(_pieces([one for one in buckets if one.experts is experts], of), rules, ids)
        for experts, of in fullest.items()
    ]
    construction += [event for part in parts for event in part.construction]
    carried = [event for part in parts for event in part.carried]
    gathered = [one._replace(tensor=next(ids)) for one in ahead]
    quantised = _quantised(buckets, sharding, fullest, ids)
    step = [*carried, *(event for part in parts for event in part.step), *quantised, *gathered]
    states = Stretch([event for part in parts for event in part.states])
    return Kept(Stretch(construction), states, Stretch(step), Stretch([*carried, *gathered]), Stretch())


def _fullest(buckets: Sequence[Bucket], sharding: Sharding) -> tuple[int, int]:
    """Ranks that share states of ``buckets``, and the one whose states are largest."""
    ranks = 1 if sharding.strategy == "no_shard" else sharding.of(buckets[0]) * sharding.outer

    held = [0] * ranks
    for bucket in buckets:
        share = bucket.elements // ranks
        for start, end in ((one.start, one.start + one.parameter.elements) for one in bucket.members):
            for rank in range(start // share, -(-end // share)):
                held[rank] += rounded(4 * (min(end, (rank + 1) * share) - max(start, rank * share)))
    return ranks, held.index(max(held))


def _pieces(buckets: Sequence[Bucket], of: tuple[int, int]) -> list[Piece]:
    """What that rank has of them."""
    shares = (one for bucket in buckets for one in bucket.shares(*of))
    return [Piece(elements, len(parameter.shape) > 1) for parameter, elements in shares]


def _quantised(
    buckets: Sequence[Bucket], sharding: Sharding, fullest: Mapping[bool, tuple[int, int]], ids: Iterator[int]
) -> Iterator[Event]:
    """Weights in 8 bits are made of main parameters (``copy_main_weights_to_model_weights``). With block scaling
    buckets are gathered for it, until they are a batch."""
    batch: list[Bucket] = []
    last = [bucket for bucket in buckets if bucket.low is not None][-1:]
    for bucket in buckets:
        if bucket.low is None:
            continue
        batch.append(bucket)
        blockwise = bucket.low.recipe == "blockwise"
        if bucket is not last[0] and not (blockwise and sum(one.elements for one in batch) > BATCH):
            continue
        gathered = batch if blockwise and sharding.shards_parameters else []
        holds = [
            Hold(next(ids), rounded(one.elements), Category.GATHERED_PARAMETERS, "bucket", (one.elements,), "uint8")
            for one in gathered
        ]
        yield from holds
        for experts, of in fullest.items():
            own = [one for one in batch if one.experts is experts]
            shards = [elements for bucket in own for _, elements in bucket.shares(*of)]
            weights = [member.parameter.shape for bucket in own for member in bucket.members]
            yield from cast(shards, bucket.low, weights, ids)
        yield from drops(holds)
        batch.clear()
