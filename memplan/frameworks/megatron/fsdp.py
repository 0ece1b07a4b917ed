"""Megatron-FSDP: buckets of parameters that are sharded together, and what a rank keeps of them.

``megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py``: ``_get_parameter_groups`` (which
parameters make a bucket), ``build_data_parallel_buffer_index`` (where each lies in it), and
``ParamAndGradBuffer._init_each_parameter_group_buffers`` (which buffers are shards). ``mcore_fsdp_adapter.py``
(``FullyShardedDataParallelV1``): a transformer layer is a unit, what no layer has belongs to no unit.

A bucket has a buffer of parameters, one of main parameters, and a stretch of the one buffer that holds all gradients.

* ``no_shard``: parameters stay as they were made; main parameters and gradients are whole.
* ``optim``: main parameters and states are shards.
* ``optim_grads``: gradients are shards, too. A whole bucket of them is there from the first gradient of a unit until
  it has been reduced.
* ``optim_grads_params``: all are shards; parameters are gathered for the passes (``fsdp_hooks``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from math import lcm, prod

from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter
from ...plan.megatron_section import MegatronSharding
from ...tape.events import Category, Drop, Event, Hold, Stretch, rounded
from ...tape.program import Kept, Span
from ...values import dataclass
from .states import Piece, Rules, is_low, optimized

EXPERTS = ".experts."
"""In the names of parameters that have buckets of their own."""

UNIT = "layer."
"""Modules that are units begin so."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """What decides how parameters are sharded."""

    strategy: MegatronSharding
    ranks: int
    """Among which parameters are sharded,"""
    expert_ranks: int
    """and those of experts."""
    outer: int
    """Groups of such ranks that share optimizer states out; 1 where each group has all of them."""
    communication: str
    """dtype in which gradients are reduced."""
    bucket: int | None
    """Elements after which a bucket of no unit ends."""
    capacity: int | None
    """Elements that are gathered ahead and wait to be reduced; ``None``: Megatron-FSDP's own number."""
    double_buffer: bool
    meta: bool
    """Parameters are made module by module, not all at once."""
    stops: bool
    """The norm of parameters is taken behind the step."""
    fused: bool
    """Weight gradients are made in their buckets."""

    @property
    def shards_parameters(self) -> bool:
        return self.strategy == "optim_grads_params"

    @property
    def shards_gradients(self) -> bool:
        return self.strategy in ("optim_grads", "optim_grads_params")

    def of(self, bucket: Bucket) -> int:
        """Ranks that ``bucket`` is sharded among."""
        return self.expert_ranks if bucket.experts else self.ranks


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a bucket."""

    place: int
    """Of its module among all of the stage."""
    parameter: Parameter
    start: int
    """Elements in front of it."""


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """Parameters in one flat tensor. ``unit`` is the place of its layer, ``None`` where it belongs to no unit."""

    unit: int | None
    experts: bool
    members: tuple[Member, ...]
    elements: int
    """With the padding of its shards."""
    low: bool = False
    """Weights that are stored in 8 bits."""

    def dtype(self, other: str) -> str:
        """Of its parameters; ``other``: in 16 bits."""
        return "uint8" if self.low else other

    @property
    def first(self) -> int:
        """The first module that has one of its parameters,"""
        return min(member.place for member in self.members)

    @property
    def last(self) -> int:
        """and the last one."""
        return max(member.place for member in self.members)

    @property
    def kind(self) -> tuple[bool, int]:
        """What layers that can share double buffers have in common."""
        return self.experts, sum(member.parameter.elements for member in self.members)

    def shares(self, ranks: int, rank: int) -> Iterator[tuple[Parameter, int]]:
        """How many elements of which parameter ``rank`` of ``ranks`` has."""
        share = self.elements // ranks
        low, high = rank * share, (rank + 1) * share
        for member in self.members:
            elements = min(member.start + member.parameter.elements, high) - max(member.start, low)
            if elements > 0:
                yield member.parameter, elements


@lru_cache(maxsize=64)
def buckets_of(spans: tuple[Span, ...], sharding: Sharding) -> tuple[Bucket, ...]:
    """In the order in which the model registers them, what belongs to no unit first, as the embedding does."""
    groups: dict[tuple[int | None, bool, bool], list[tuple[int, Parameter]]] = {}
    modules = [(span.module, name) for span in spans for name in span.names]
    for place, (module, name) in enumerate(modules):
        unit = place if name.startswith(UNIT) else None
        for parameter in module.parameters:
            key = (unit, EXPERTS in f".{parameter.name}", is_low(parameter))
            groups.setdefault(key, []).append((place, parameter))
    found: list[Bucket] = []
    for (unit, experts, low), members in groups.items():
        parts = _cut(members, sharding.bucket if unit is None else None)
        found += [_bucket(unit, experts, part, sharding, low) for part in parts]
    return tuple(found)


def _cut(members: list[tuple[int, Parameter]], size: int | None) -> Iterator[list[tuple[int, Parameter]]]:
    """A bucket ends when it is full."""
    part: list[tuple[int, Parameter]] = []
    for member in members:
        part.append(member)
        if size is not None and sum(parameter.elements for _, parameter in part) >= size:
            yield part
            part = []
    if part:
        yield part


def _row(parameter: Parameter) -> int:
    """Elements that are never divided between ranks, but for those of vectors."""
    return prod(parameter.shape[1:])


def _bucket(
    unit: int | None, experts: bool, members: list[tuple[int, Parameter]], sharding: Sharding, low: bool
) -> Bucket:
    members = sorted(members, key=lambda member: -_row(member[1]))
    chunk = _row(members[0][1])
    for _, parameter in members:
        fits = chunk % _row(parameter) == 0 and parameter.elements % chunk == 0
        if not fits and parameter.elements >= chunk:
            chunk = lcm(chunk, _row(parameter))
    ranks = sharding.expert_ranks if experts else sharding.ranks
    starts, end = laid_out([parameter.elements for _, parameter in members], chunk)
    if sharding.strategy != "no_shard":
        multiple = ranks * sharding.outer * chunk
        end = -(-end // multiple) * multiple
    return Bucket(unit, experts, tuple(Member(*one, at) for one, at in zip(members, starts, strict=True)), end, low)


def laid_out(sizes: Sequence[int], chunk: int) -> tuple[list[int], int]:
    """Where tensors of ``sizes`` elements begin, and where the last one ends.

    Large ones begin at multiples of ``chunk``; one that leaves a remainder shares its last chunk with the end of
    another, and with tensors smaller than a chunk.
    """
    starts = [0] * len(sizes)
    large = [at for at, size in enumerate(sizes) if size >= chunk]
    small = [at for at, size in enumerate(sizes) if size < chunk]
    end = 0
    while large:
        at = large.pop(0)
        size, starts[at] = sizes[at], end
        if size % chunk == 0:
            end += size
            continue
        gap, space = end + size, chunk - size % chunk
        end += (size // chunk + 1) * chunk
        other = next((one for one in large if 0 < sizes[one] % chunk <= space), None)
        if other is not None:
            large.remove(other)
            rest = sizes[other] % chunk
            starts[other] = end - rest
            space -= rest
            end += sizes[other] - rest
        for one in list(small):
            if sizes[one] <= space:
                starts[one] = gap
                gap, space = gap + sizes[one], space - sizes[one]
                small.remove(one)
    for one in small:
        starts[one] = end
        end += sizes[one]
    return starts, end


# -- what is kept -------------------------------------------------------------------------------------


def keep(buckets: Sequence[Bucket], rules: Rules, sharding: Sharding, ahead: Sequence[Hold]) -> Kept:
    """All that the rank keeps whose states are largest. ``ahead``: parameters of units that the step gathers for the
    next iteration (``start_param_sync``)."""
    ids = count(1)
    construction: list[Event] = []
    parameters, whole = Category.PARAMETERS, sharding.strategy == "no_shard"

    def hold(elements: int, dtype: str, category: Category, name: str) -> Hold:
        made = Hold(next(ids), rounded(elements * ITEMSIZE[dtype]), category, name, (elements,), dtype)
        construction.append(made)
        return made

    def originals(bucket: Bucket) -> list[Hold]:
        dtype, members = bucket.dtype(rules.dtype), bucket.members
        if bucket.low:
            for _ in members:
                hold(1, "fp32", Category.BUFFERS, "scale_inverse")
        return [hold(one.parameter.elements, dtype, parameters, one.parameter.name) for one in members]

    made = [] if sharding.meta else [originals(bucket) for bucket in buckets]
    for at, bucket in enumerate(buckets):
        ranks = sharding.of(bucket)
        temporary: list[Hold] = []
        if not whole:
            share = ranks if sharding.shards_parameters else 1
            dtype = bucket.dtype(rules.dtype)
            hold(bucket.elements // share, dtype, parameters, "model_weight_buffer")
            if share > 1:
                temporary = [hold(bucket.elements, dtype, Category.GATHERED_PARAMETERS, "bucket")]
        share = 1 if whole else ranks * sharding.outer
        hold(bucket.elements // share, "fp32", Category.MAIN_PARAMETERS, "main_weight_buffer")
        if not whole:
            temporary += originals(bucket) if sharding.meta else made[at]
        construction += _ends(temporary)
    gradients = sum(one.elements // (sharding.of(one) if sharding.shards_gradients else 1) for one in buckets)
    hold(gradients, rules.gradients, Category.GRADIENTS, "main_grad_buffer")
    parts = [
        optimized(_pieces(own, sharding), rules, ids)
        for experts in (False, True)
        if (own := [bucket for bucket in buckets if bucket.experts is experts])
    ]
    construction += [event for part in parts for event in part.construction]
    carried = [event for part in parts for event in part.carried]
    gathered = [one._replace(tensor=next(ids)) for one in ahead]
    step = [*carried, *(event for part in parts for event in part.step), *gathered]
    states = Stretch([event for part in parts for event in part.states])
    return Kept(Stretch(construction), states, Stretch(step), Stretch([*carried, *gathered]), Stretch())


def _ends(holds: Sequence[Hold]) -> list[Drop]:
    return [Drop(hold.tensor, hold.bytes, hold.category) for hold in holds]


def _pieces(buckets: Sequence[Bucket], sharding: Sharding) -> list[Piece]:
    """Of the rank whose states are largest."""
    ranks = 1 if sharding.strategy == "no_shard" else sharding.of(buckets[0]) * sharding.outer
    found = [[one for bucket in buckets for one in bucket.shares(ranks, rank)] for rank in range(ranks)]
    most = max(found, key=lambda shares: sum(rounded(4 * elements) for _, elements in shares))
    return [Piece(elements, len(parameter.shape) > 1) for parameter, elements in most]
