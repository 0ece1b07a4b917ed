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

Weights in 8 bits (``mixed_precision.py``) have buckets of bytes, of their rows; those of MXFP8 have another one for
their columns. Scales lie beside them, whole on every rank. Columns that are made of rows stay, unless parameters are
shards. With ``--use-nccl-ub`` one memory pool of NCCL's holds buffers of parameters and gradients, and double buffers.

What a rank keeps, and what its step takes: ``param_and_grad_buffer.py``, ``_init_each_parameter_group_buffers``
(in which order buffers are made), ``update_main_grads``, ``copy_main_weights_to_model_weights``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from math import lcm, prod

from ...layers.autograd import ITEMSIZE
from ...layers.megatron_core import mtp
from ...layers.megatron_core.precision import Low, Part
from ...layers.module import Parameter
from ...plan.megatron_section import MegatronSharding
from ...tape.events import Category, Event, Hold, Stretch, drops, rounded
from ...tape.program import Kept, Span
from ...values import NamedTuple, dataclass
from .clipping import cast
from .states import REGISTERED, Piece, Rules, is_low, optimized

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
    keeps_columns: bool = False
    """Of weights in 8 bits, once they have been made (``keep_fp8_transpose_cache``)."""
    registers: bool = False
    """Buffers lie in a memory pool of NCCL's."""
    max_pool: bool = False
    """Double buffers are as large as any unit's, and all units share them."""
    persists: bool = False
    """Beside double buffers, every other bucket has a buffer of its own for good."""

    @property
    def shards_parameters(self) -> bool:
        return self.strategy == "optim_grads_params"

    @property
    def shards_gradients(self) -> bool:
        return self.strategy in ("optim_grads", "optim_grads_params")

    @property
    def ends_columns(self) -> bool:
        """Columns that are made of a weight's rows end behind each pass of its layer."""
        return self.shards_parameters and not self.keeps_columns

    def pool(self, at: int = 0) -> int:
        """The stream of buffers: number ``at`` of those that allocate in NCCL's pool."""
        return REGISTERED + at if self.registers else 0

    def of(self, bucket: Bucket) -> int:
        """Ranks that ``bucket`` is sharded among."""
        return self.expert_ranks if bucket.experts else self.ranks


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a bucket."""

    place: int
    """Of its site among all of the stage."""
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
    low: Low | None = None
    """How they are stored, if that is in 8 bits."""

    @property
    def two_buffers(self) -> bool:
        """There is a second one, of columns."""
        return self.low is not None and self.low.two_buffers

    def columns(self) -> Iterator[tuple[Parameter, Part]]:
        """What is made of each weight's rows."""
        if self.low is not None:
            yield from ((m.parameter, part) for m in self.members for part in self.low.made_of_rows(m.parameter.shape))

    def dtype(self, other: str) -> str:
        """Of its parameters; ``other``: in 16 bits."""
        return "uint8" if self.low else other

    @property
    def first(self) -> int:
        """The first site that has one of its parameters,"""
        return min(member.place for member in self.members)

    @property
    def last(self) -> int:
        """and the last one."""
        return max(member.place for member in self.members)

    @property
    def kind(self) -> tuple[bool, bool, int]:
        """What layers that can share double buffers have in common."""
        return self.experts, self.low is not None, sum(member.parameter.elements for member in self.members)

    def shares(self, ranks: int, rank: int) -> Iterator[tuple[Parameter, int]]:
        """How many elements of which parameter ``rank`` of ``ranks`` has."""
        share = self.elements // ranks
        low, high = rank * share, (rank + 1) * share
        for member in self.members:
            elements = min(member.start + member.parameter.elements, high) - max(member.start, low)
            if elements > 0:
                yield member.parameter, elements


class Site(NamedTuple):
    """A module that hooks run around: one of a stage's, or a unit within it."""

    module: int
    """Its number, or that of the module that it is in."""
    name: str
    """Of the module, or of the seams around a unit within."""
    unit: bool
    parameters: tuple[Parameter, ...]


@lru_cache(maxsize=64)
def sites_of(spans: tuple[Span, ...]) -> tuple[Site, ...]:
    """In the order of their forward passes; units within a module come behind it."""
    found: list[Site] = []
    for at, (module, name) in enumerate((span.module, name) for span in spans for name in span.names):
        inner: dict[str | None, list[Parameter]] = {None: []}
        for parameter in module.parameters:
            inner.setdefault(mtp.layer_of(parameter.name), []).append(parameter)
        found.append(Site(at, name, name.startswith(UNIT), tuple(inner.pop(None))))
        found += [Site(at, within or "", True, tuple(parameters)) for within, parameters in inner.items()]
    return tuple(found)


@lru_cache(maxsize=64)
def buckets_of(spans: tuple[Span, ...], sharding: Sharding) -> tuple[Bucket, ...]:
    """In the order in which the model registers them, what belongs to no unit first, as the embedding does."""
    groups: dict[tuple[int | None, bool, Low | None], list[tuple[int, Parameter]]] = {}
    for place, site in enumerate(sites_of(spans)):
        unit = place if site.unit else None
        for parameter in site.parameters:
            low = parameter.low if is_low(parameter) else None
            groups.setdefault((unit, EXPERTS in f".{parameter.name}", low), []).append((place, parameter))
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
    unit: int | None, experts: bool, members: list[tuple[int, Parameter]], sharding: Sharding, low: Low | None
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


def doubled(buckets: Sequence[Bucket], sharding: Sharding) -> frozenset[int]:
    """Units that share double buffers: those of the kind that most are of (``FixedPoolAllocator``), or all
    (``MaxPoolAllocator``)."""
    units: dict[int, tuple[tuple[bool, bool, int], ...]] = {}
    for bucket in buckets:
        if bucket.unit is not None:
            units[bucket.unit] = (*units.get(bucket.unit, ()), bucket.kind)
    if not units or not sharding.double_buffer:
        return frozenset()
    if sharding.max_pool:
        return frozenset(units)
    kind, _ = Counter(units.values()).most_common(1)[0]
    return frozenset(unit for unit, own in units.items() if own == kind)


# -- what a rank keeps -----------------------------------------------------------------------------------


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
