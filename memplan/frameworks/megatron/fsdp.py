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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm, prod

from ...layers.megatron_core import mtp
from ...layers.megatron_core.precision import Low, Part
from ...layers.module import Parameter
from ...plan.megatron_section import MegatronSharding
from ...tape.program import Span
from ...values import NamedTuple, dataclass
from .states import REGISTERED, is_low

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
