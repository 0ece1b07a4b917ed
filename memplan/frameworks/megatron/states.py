"""How Megatron-Core keeps parameters, gradients and optimizer states, and what its step adds.

``megatron/core/distributed/param_and_grad_buffer.py`` (``_ParamAndGradBuffer``),
``optimizer/param_layout.py``, ``optimizer/distrib_optimizer.py`` (``_compute_per_buffer_param_layout``,
``_build_model_and_main_param_groups``), ``optimizer/optimizer.py``
(``Float16OptimizerWithFloat16Params``), ``optimizer/clip_grads.py`` (``count_zeros_fp32``) and
Transformer Engine's ``pytorch/optimizers/fused_adam.py`` (``initialize_state``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from math import lcm, prod

from ...layers.autograd import ITEMSIZE, Shape, size_of
from ...layers.megatron_core.precision import Low
from ...layers.module import Parameter
from ...optimizers.base import step_temporaries
from ...plan.plan import Optimizer
from ...tape.events import OWN_POOL, Category, Event, Hold, Stretch, drops, rounded
from ...tape.program import Kept
from ...values import NamedTuple, dataclass, replace
from . import clipping
from .clipping import cast

REGISTERED = OWN_POOL
"""Stream of the first pool of NCCL's: what lies in it is not used by others."""

ALIGNMENT = 64
"""Elements to which the start of a parameter is aligned in the distributed optimizer's buffers."""

EMBEDDINGS = ("word.weight", "head.weight")
"""Of tokens, and the output layer."""

BUCKET_ALIGNMENT = 128
WIDE_ALIGNMENT = 1 << 16
"""Elements that, times the shards, a bucket's end is aligned to (their least common multiple)."""

STAYS = 0
"""Id of what is held for good: nobody ends it, so that all such tensors can have the same."""

Chunk = tuple[tuple[tuple[Parameter, ...], int], ...]
"""A model chunk: the parameters of its modules in order, and how often each is repeated."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides how states are kept."""

    dtype: str
    """Of the parameters."""
    gradients: str
    """Of the gradient buffer."""
    distributed: bool
    """The distributed optimizer."""
    shards: int
    """Ranks among which the distributed optimizer's states are divided."""
    bucket: int | None
    """Elements of a bucket in the first chunk; ``None`` where gradients are one bucket."""
    optimizer: str
    precision_aware: bool
    main_parameters: str
    exp_avg: str
    exp_avg_sq: str
    counts_zeros: bool
    te: tuple[int, int] = (2, 18)
    """Version of Transformer Engine, whose FusedAdam a precision-aware optimizer is."""
    expert_shards: int = 1
    """Ranks among which the distributed optimizer's states of experts are divided."""
    sharded: bool = False
    """Megatron-FSDP's buffers hold the main parameters."""
    member: int | None = None
    """Of the ranks that whole parameters are dealt out to, the one that is meant; by default the one that has most."""
    low: Low | None = None
    """Precision of linear layers' products, if that is not ``dtype``."""
    fp8_recipe: str | None = None
    """Of products in 8 bits, or what the optimizer is told in its place (``OptimizerConfig.fp8_recipe``)."""
    alignment: int = BUCKET_ALIGNMENT
    """Elements to a multiple of which buckets are padded, beside that of ``shards`` (``bucket_end_divisor``)."""
    buckets: int | None = None
    """How many buckets gradients are cut into, in place of ``bucket``."""
    clips: bool = False
    """Weights of queries and keys are clipped behind the step (``clipping``)."""
    registers: bool = False
    """Buffers of parameters and gradients lie in memory pools of NCCL's (``nccl_allocator``), one for those of a
    dtype."""
    sums_in_fp32: bool = False
    """Gradients in 16 bits are received by every rank, and summed in fp32 (``gradients``)."""
    wide_gradients: tuple[str, ...] = ()
    """Patterns of names of parameters that accumulate in fp32 tensors of their own."""
    offload: float = 0.0
    """Fraction of the optimizer's states that the host keeps."""
    in_torch: Optimizer | None = None
    """What steps, where it is ``torch.optim``'s: neither Transformer Engine nor apex is installed
    (``megatron/core/optimizer/__init__.py``)."""

    @property
    def main_inside(self) -> bool:
        """FusedAdam keeps the main parameters: not those in fp32 beside products in 8 bits, but with delayed scaling
        (``use_precision_aware_optimizer_no_fp8_or_ds_fp8``), and never Megatron-FSDP's (``get_megatron_optimizer``)."""
        outside = self.fp8_recipe not in (None, "delayed") and self.main_parameters == "fp32"
        return self.precision_aware and not (outside or self.sharded)

    @property
    def mixed(self) -> bool:
        """Main parameters are kept beside 16-bit ones."""
        return self.dtype != "fp32"

    @property
    def main_size(self) -> int:
        """Bytes of one element of the main parameters, which a precision-aware FusedAdam keeps as an fp32
        number's lower 16 bits where parameters are bf16 (``store_param_remainders``, from 2.1)."""
        remainders = self.te >= (2, 1) and self.main_parameters == "fp32" and self.dtype == "bf16"
        if self.main_inside and remainders:
            return 2
        return ITEMSIZE[self.main_parameters if self.main_inside else "fp32"]

    @property
    def moments(self) -> tuple[tuple[str, str], ...]:
        """Name and dtype of each state besides the main parameters."""
        if self.optimizer == "sgd":
            return MOMENTUM
        return (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))

    @property
    def in_buffers(self) -> bool:
        """The distributed optimizer keeps parameters in one buffer, of which every rank has an equal stretch."""
        return self.distributed and self.optimizer != "muon"

    @property
    def dealt(self) -> bool:
        """Whole parameters are dealt out to ranks (``LayerWiseDistributedOptimizer``)."""
        return self.distributed and self.optimizer == "muon"

    @property
    def unscaled(self) -> tuple[str, ...]:
        """States that FusedAdam casts to fp32 while it steps a parameter group (``get_unscaled_state``); from
        2.13 two moments in bf16 are read by the kernel as they are (``fuse_unscale``)."""
        if not self.precision_aware:
            return ()
        fused = self.te >= (2, 13) and self.exp_avg == self.exp_avg_sq == "bf16"
        moments = tuple(name for name, dtype in self.moments if dtype != "fp32" and not fused)
        return (*moments, *(("master_param",) if self.main_parameters != "fp32" else ()))

    @property
    def saved_in_fp32(self) -> frozenset[str]:
        """States of which a checkpoint takes a copy in fp32."""
        if not self.precision_aware or self.offload:
            return frozenset()
        named = (*self.moments, ("master_param", self.main_parameters))
        return frozenset(name for name, dtype in named if dtype != "fp32")

    @property
    def copied_size(self) -> int:
        """Bytes of those copies for each element that the first step makes states for (``saved``)."""
        kept = {name for name, _ in self.moments} | ({"master_param"} if self.main_inside and self.mixed else set())
        return 4 * len(self.saved_in_fp32 & kept)

    @property
    def copies_gradients(self) -> bool:
        """16-bit gradients are copied to fp32 for the step, and end when the next iteration begins. A precision-aware
        FusedAdam beside Megatron-FSDP takes them as they are (``use_decoupled_grad``)."""
        decoupled = self.main_inside or (self.sharded and self.precision_aware)
        return self.mixed and self.gradients != "fp32" and not decoupled


MOMENTUM = (("momentum_buffer", "fp32"),)


class Piece(NamedTuple):
    """What one rank has of a parameter's states."""

    elements: int
    decays: bool
    """With weight decay: a matrix."""
    orthogonal: Shape | None = None
    """Shape of a matrix that Muon takes, which keeps a momentum alone."""


def bucket_size(ranks: int) -> int:
    """Elements of a bucket unless the plan says otherwise, with so many ranks that gradients are summed over
    (``DistributedDataParallel.__init__``)."""
    return max(40_000_000, 1_000_000 * ranks)


@lru_cache(maxsize=4096)
def keep(chunks: tuple[Chunk, ...], rules: Rules, tied: bool) -> Kept:
    """All that one rank keeps for ``chunks``.

    Of the distributed optimizer's shards the one that is largest, each tensor rounded, is taken.
    ``tied``: the word table is a copy that the first and the last stage hold.
    """
    tensors = _trained(chunks)
    ids = iter(range(1, 1 << 40))
    construction: list[Event] = []
    originals: list[list[Hold]] = []
    for whole in chunks:
        moved: list[Hold] = []
        for parameters, n in whole:  # frozen parameters stay where they are (``DistributedDataParallel.__init__``)
            made = [(one, kept or not p.trained) for p in parameters for one, kept in _made(p, rules)]
            holds = [Hold(STAYS, *one) for one, _ in made]
            moving = [(at, one) for at, (one, kept) in enumerate(made) if rules.in_buffers and not kept]
            for _ in range(n):
                for at, one in moving:
                    holds[at] = Hold(next(ids), *one)
                construction += holds
                moved += [holds[at] for at, _ in moving]
        originals.append(moved)
    optimizers = _optimizers(tensors, rules)
    bucket = _largest_bucket(tensors, rules)
    pools = count(REGISTERED)
    pieces: list[list[Piece]] = [[] for _ in optimizers]
    shards: list[list[int]] = [[] for _ in optimizers]
    for at, chunk in enumerate(tensors):
        for which, shared, members, buckets in _buffers(chunk, bucket if at == 0 else None, rules, optimizers, tied):
            elements = sum(bucket.end for bucket in buckets)
            dtype, size = _stored(members[0], elements, rules)
            pool = next(pools) if rules.registers else 0
            if rules.in_buffers and size:
                category = Category.PARAMETERS
                construction.append(Hold(STAYS, rounded(size), category, "param_data", (elements,), dtype, pool))
            size = rounded(elements * ITEMSIZE[rules.gradients])
            held = Hold(STAYS, size, Category.GRADIENTS, "grad_data", (elements,), rules.gradients, pool)
            construction.append(held)
            own = [] if rules.dealt else _pieces(buckets, members, shared)
            pieces[which] += own
            shards[which] += [piece.elements for piece in own if is_low(members[0])]
        construction += drops(originals[at])
    if rules.dealt:
        pieces = [
            _dealt([p for chunk in tensors for p in chunk if p.expert is experts], one) for experts, one in optimizers
        ]
    if rules.offload:
        full = [parameter.elements for chunk in tensors for parameter in chunk]
        first = sum(n for n, goes in zip(full, offloaded(full, rules.offload), strict=True) if not goes)
        construction += _passing(ids, 4 * first, "main_param_of_all")  # made anew of the rank's own shards
    parts = [optimized(own, rules, ids) for own in pieces]
    construction += [event for part in parts for event in part.construction]
    states = [event for part in parts for event in part.states]
    copies = [event for part in parts for event in part.carried]
    step = list[Event](copies)
    for part, (experts, _), cut in zip(parts, optimizers, shards, strict=True):
        weights = [one for chunk in tensors for one in chunk if one.expert is experts and is_low(one)]
        step += [*part.step, *(_cast(cut, weights, ids) if not rules.main_inside else ())]
    step += _passing(ids, clipping.largest((one for chunk in tensors for one in chunk), rules), "weight_clipped")
    host = sum(part.host for part in parts)
    return Kept(Stretch(construction), Stretch(states), Stretch(step), Stretch(copies), Stretch(), host)


def is_low(parameter: Parameter) -> bool:
    """Stored in 8 or 4 bits."""
    return parameter.low is not None and parameter.low.parameters


def _cast(shards: Sequence[int], weights: Sequence[Parameter], ids: Iterator[int]) -> list[Event]:
    """``DistributedOptimizer._copy_main_params_to_model_params``. MXFP8 is received in 16 bits, in the gradients'
    buffer, which main parameters are copied into (``_copy_main_params_to_param_buffer``)."""
    low = weights[0].low if weights else None
    if low is None or low.two_buffers:
        return []
    return cast(shards, low, [one.shape for one in weights], ids)


def _alike(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Parameters that share a buffer, by how they are stored (``group_params_for_buffers``)."""
    found: dict[bool, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(is_low(parameter), []).append(parameter)
    return list(found.values())


def _made(parameter: Parameter, rules: Rules) -> Iterator[tuple[tuple[int, Category, str, Shape, str], bool]]:
    """What a module makes for a parameter, and whether that stays when parameters move into one buffer: of a weight in
    8 bits the rows' data moves (``replace_raw_data``), other copies and scales stay; one in MXFP8 stays whole, for
    which the gradients' buffer receives (``--reuse-grad-buf-for-mxfp8-param-ag``)."""
    own = Category.PARAMETERS
    if parameter.low is None or not parameter.low.parameters:
        yield (parameter.bytes(rules.dtype), own, parameter.name, parameter.shape, rules.dtype), False
        return
    for at, part in enumerate(parameter.low.kept_of_weight(parameter.shape)):
        name = f"{parameter.name}_{part.name}"
        stays = at > 0 or parameter.low.recipe == "mxfp8"
        yield (rounded(size_of(part.shape, part.dtype)), own, name, part.shape, part.dtype), stays


def _stored(parameter: Parameter, elements: int, rules: Rules) -> tuple[str, int]:
    """dtype and bytes of a buffer for parameters such as this one."""
    if parameter.low is None or not parameter.low.parameters:
        return rules.dtype, elements * ITEMSIZE[rules.dtype]
    size = 0 if parameter.low.recipe == "mxfp8" else int(elements * parameter.low.element)
    return "uint8", size


def _optimizers(chunks: Sequence[Sequence[Parameter]], rules: Rules) -> list[tuple[bool, Rules]]:
    """An optimizer for the layers, and one for experts that other ranks share (``get_megatron_optimizer``), each with
    the rules of its buffers."""
    has_experts = any(parameter.expert for chunk in chunks for parameter in chunk)
    return [(False, rules), *([(True, replace(rules, shards=rules.expert_shards))] if has_experts else [])]


def optimized(pieces: list[Piece], rules: Rules, ids: Iterator[int]) -> Kept:
    """What one optimizer keeps for its ``pieces`` of parameters, and what its step takes, beside the copies of
    gradients (``carried``)."""
    if rules.offload:
        return _hybrid(pieces, rules, ids)
    pieces = sorted(pieces, key=lambda piece: not piece.decays)  # matrices first, then what has no weight decay
    sizes = [piece.elements for piece in pieces]
    construction: list[Event] = []
    small = Category.BUFFERS
    if rules.mixed and not rules.main_inside and not rules.sharded:
        cloned = {n: _main(n, rules, ids) for n in dict.fromkeys(sizes)}
        construction += [event for n in sizes for event in cloned[n]]
    construction += [Hold(STAYS, rounded(4), small, name, (1,), "fp32") for name in _numbers(rules)]
    stepped = {piece: _states(piece, rules) for piece in dict.fromkeys(pieces)}
    states = [event for piece in pieces for event in stepped[piece]]
    copies: list[Hold] = []
    if rules.copies_gradients:
        copies = [Hold(next(ids), rounded(n * 4), Category.GRADIENTS, "main_grad_fp32", (n,), "fp32") for n in sizes]
    step: list[Event] = []
    if rules.counts_zeros and sizes:
        mask = Hold(next(ids), rounded(max(sizes)), Category.TEMPORARIES, "nonzero_mask", (max(sizes),), "bool")
        step += [mask, mask.end]
    for decays in (True, False):  # parameter groups: matrices, and what has no weight decay
        group = [piece.elements for piece in pieces if piece.decays is decays]
        casts = [
            Hold(next(ids), rounded(4 * n), Category.TEMPORARIES, f"{name}_unscaled", (n,), "fp32")
            for n in group
            for name in rules.unscaled
        ]
        if rules.in_torch is not None:
            given = [Parameter("", (n,)) for n in group]
            casts += [hold._replace(tensor=next(ids)) for hold in step_temporaries(rules.in_torch, given, "fp32")]
        step += [*casts, *(hold.end for hold in casts)]
    matrices: list[Shape] = [piece.orthogonal for piece in pieces if piece.orthogonal]
    if matrices:
        m, n = sorted(max(matrices, key=prod))
        made = [("orthogonal_update", (m, n))] * 2 + [("gram_matrix", (m, m)), ("gram_update", (m, m))]
        temporary = Category.TEMPORARIES
        rounds = [Hold(next(ids), rounded(4 * a * b), temporary, name, (a, b), "fp32") for name, (a, b) in made]
        step += [*rounds, *(hold.end for hold in rounds)]
    return Kept(Stretch(construction), Stretch(states), Stretch(step), Stretch(copies), Stretch())


def _main(n: int, rules: Rules, ids: Iterator[int]) -> list[Event]:
    """``param.detach().clone().float()`` of n elements (``optimizer.py``; ``distrib_optimizer.py`` of a shard)."""
    clone, end = _passing(ids, n * ITEMSIZE[rules.dtype], "param_cloned")
    main = Hold(STAYS, rounded(n * 4), Category.MAIN_PARAMETERS, "main_param", (n,), "fp32")
    return [clone, main, end]


def _states(piece: Piece, rules: Rules) -> list[Event]:
    """What the first step makes for a piece."""
    n, _, orthogonal = piece
    states: list[Event] = [
        Hold(STAYS, rounded(n * ITEMSIZE[dtype]), Category.OPTIMIZER_STATES, name, (n,), dtype)
        for name, dtype in (MOMENTUM if orthogonal else rules.moments)
    ]
    if rules.main_inside and rules.mixed:
        size = rounded(n * rules.main_size)
        states.append(Hold(STAYS, size, Category.MAIN_PARAMETERS, "master_param", (n,)))
    if rules.precision_aware and rules.mixed:
        kinds = [dtype for _, dtype in rules.moments] + [rules.main_parameters]
        scales = sum(4 if dtype == "fp8" else dtype != "fp32" for dtype in kinds)  # fp8: with a quantizer's three
        states += [Hold(STAYS, rounded(4), Category.BUFFERS, "state_scale", (1,), "fp32")] * scales
    return states


ON_HOST = 4 + 4 + 4 + 4
"""Bytes of an element whose states the host keeps: main parameter, gradient and both moments in fp32."""


def _hybrid(pieces: list[Piece], rules: Rules, ids: Iterator[int]) -> Kept:
    """``cpu_offloading/hybrid_optimizer.py`` (``HybridDeviceOptimizer``): the first parameters, up to a fraction of all
    elements, have a copy on the host, which is stepped there; the others one in fp32 on the device.

    Gradients that are not in fp32 are cast on the device: those of the host's parameters one by one on their way there
    (``copy_``), the others into copies that stay until the next step. Building clones each parameter.
    """
    pieces = sorted(pieces, key=lambda piece: not piece.decays)
    sizes = [piece.elements for piece in pieces]
    goes = offloaded(sizes, rules.offload)
    rest = [piece for piece, away in zip(pieces, goes, strict=True) if not away]
    own = replace(rules, offload=0.0, precision_aware=False, counts_zeros=False)
    stays = optimized(rest, own, ids)
    away = [n for n, moves in zip(sizes, goes, strict=True) if moves]
    building = _passing(ids, max(sizes, default=0) * ITEMSIZE[rules.dtype], "parameter_cloned")
    step = _passing(ids, max(sizes, default=0), "nonzero_mask") if rules.counts_zeros else []
    step += _passing(ids, 4 * max(away, default=0), "grad_to_host") if own.copies_gradients else []
    return Kept(
        Stretch([*building, *stays.construction]),
        Stretch([*stays.states, *stays.carried]),
        Stretch([*step, *stays.step]),
        Stretch(),
        Stretch(),
        sum(away) * ON_HOST,
    )


def offloaded(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Which parameters of these elements, in order, go to the host."""
    limit, before, found = sum(sizes) * fraction, 0, list[bool]()
    for size in sizes:
        found.append(before < limit)
        before += size if before < limit else 0
    return found


def _passing(ids: Iterator[int], size: int, name: str) -> list[Event]:
    """A tensor that ends at once; none of no bytes."""
    hold = Hold(next(ids), rounded(size), Category.TEMPORARIES, name)
    return [hold, hold.end] if size else []


def saved(kept: Kept, rules: Rules) -> int:
    """Bytes of the copies that a checkpoint of the distributed optimizer holds at once: every state that is no fp32
    is cast for the state dictionary (``_get_main_param_and_optimizer_states``, FusedAdam's ``get_unscaled_state``), to
    save it, and to load into it."""
    casts = rules.saved_in_fp32
    if not casts:
        return 0
    return sum(rounded(4 * prod(one.shape)) for one in kept.states if isinstance(one, Hold) and one.name in casts)


def _dealt(parameters: Sequence[Parameter], rules: Rules) -> list[Piece]:
    """What one rank has of parameters that are dealt out to and fro, from small to large
    (``_shard_params_ping_pong``)."""
    hands: list[list[Piece]] = [[] for _ in range(rules.shards)]
    order = [*range(rules.shards), *reversed(range(rules.shards))]
    for at, parameter in enumerate(sorted(parameters, key=lambda one: one.elements)):
        hands[order[at % len(order)]].append(_whole(parameter, rules))
    if rules.member is not None:
        return hands[rules.member]
    return max(hands, key=lambda hand: sum(piece.elements * (4 if piece.orthogonal else 8) for piece in hand))


def _whole(parameter: Parameter, rules: Rules) -> Piece:
    """A whole parameter. Muon takes matrices, but for the embedding and the output layer
    (``emerging_optimizers.py``, ``_is_nonlinear_or_embedding``)."""
    muon = rules.optimizer == "muon" and len(parameter.shape) == 2 and parameter.name not in EMBEDDINGS
    return Piece(parameter.elements, len(parameter.shape) > 1, parameter.shape if muon else None)


def _numbers(rules: Rules) -> tuple[str, ...]:
    """Single numbers on the device: ``optimizer.py`` (``FP32Optimizer``, and ``MixedPrecisionOptimizer``, which the
    distributed optimizer is in fp32, too), ``grad_scaler.py`` (``DynamicGradScaler``)."""
    if rules.dtype == "fp16":
        return ("found_inf", "overflow", "scale", "min_scale", "growth_factor", "backoff_factor")
    if rules.dtype == "bf16":
        return ("scale_one",)
    return ("overflow", "scale_one") if rules.distributed else ("scale",)


# -- buffers ----------------------------------------------------------------------------------------

Buffer = tuple[int, Rules, Sequence[Parameter], "Sequence[Bucket]"]
"""The number of its optimizer, the rules, parameters, and buckets of a buffer."""


def buffers_of(chunks: tuple[Chunk, ...], rules: Rules, tied: bool) -> Iterator[Buffer]:
    """Every buffer of gradients of ``chunks``."""
    tensors = _trained(chunks)
    optimizers, size = _optimizers(tensors, rules), _largest_bucket(tensors, rules)
    for at, chunk in enumerate(tensors):
        yield from _buffers(chunk, size if at == 0 else None, rules, optimizers, tied)


def _trained(chunks: Sequence[Chunk]) -> list[list[Parameter]]:
    """Parameters of each chunk that have gradients, one by one."""
    return [[p for own, n in chunk for p in [one for one in own if one.trained] * n] for chunk in chunks]


def _buffers(
    chunk: Sequence[Parameter],
    size: int | None,
    rules: Rules,
    optimizers: Sequence[tuple[bool, Rules]],
    tied: bool,
) -> Iterator[Buffer]:
    for which, (experts, shared) in enumerate(optimizers):
        for members in _alike([parameter for parameter in chunk if parameter.expert is experts]):
            yield which, shared, members, _buckets(members, size, shared, tied)


def _largest_bucket(tensors: Sequence[Sequence[Parameter]], rules: Rules) -> int | None:
    """Elements with which a bucket is full (``resolve_ddp_bucket_size``)."""
    if rules.buckets is None:
        return rules.bucket
    return sum(parameter.elements for chunk in tensors for parameter in chunk) // rules.buckets


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of a buffer. ``end`` is its padded size in elements, ``starts`` where its parameters lie in it."""

    parameters: tuple[Parameter, ...]
    starts: tuple[int, ...]
    end: int


def _buckets(parameters: Sequence[Parameter], size: int | None, rules: Rules, tied: bool) -> list[Bucket]:
    """Parameters from last to first (the order of backward), cut where a bucket is full.

    Without the distributed optimizer nothing is padded, and where a bucket ends does not matter.
    """
    found: list[Bucket] = []
    members: list[Parameter] = []
    starts: list[int] = []
    at = 0

    def close() -> None:
        nonlocal at
        end = _padded(at, lcm(rules.shards, rules.alignment)) if rules.in_buffers else at
        found.append(Bucket(tuple(members), tuple(starts), end))
        members.clear()
        starts.clear()
        at = 0

    for parameter in reversed(parameters):
        at = _padded(at, ALIGNMENT) if rules.in_buffers else at
        alone = rules.in_buffers and tied and parameter.name == "word.weight"
        if alone and members:
            close()
        members.append(parameter)
        starts.append(at)
        at += parameter.elements
        if alone or (size is not None and at >= size):
            close()
    if members:
        close()
    return found


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pieces(buckets: Sequence[Bucket], parameters: Sequence[Parameter], rules: Rules) -> list[Piece]:
    """What the rank keeps states for of each parameter."""
    if not rules.distributed:
        return [_whole(parameter, rules) for parameter in parameters]
    held = [0] * rules.shards
    for bucket in buckets:
        share = bucket.end // rules.shards
        whole = rounded(share * 4)
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=True):
            end = start + parameter.elements
            first, last = start // share, (end - 1) // share
            if first == last:
                held[first] += rounded(parameter.elements * 4)
                continue
            held[first] += rounded(((first + 1) * share - start) * 4)
            held[last] += rounded((end - last * share) * 4)
            for rank in range(first + 1, last):
                held[rank] += whole
    most = held.index(max(held))
    return [
        Piece(elements, len(parameter.shape) > 1)
        for bucket in buckets
        for parameter, elements in _held(bucket, rules.shards, most)
    ]


def _held(bucket: Bucket, shards: int, rank: int) -> Iterator[tuple[Parameter, int]]:
    """How many elements of which parameter ``rank`` holds: every rank has an equal stretch of the bucket."""
    share = bucket.end // shards
    low, high = rank * share, (rank + 1) * share
    for parameter, start in zip(bucket.parameters, bucket.starts, strict=True):
        elements = min(start + parameter.elements, high) - max(start, low)
        if elements > 0:
            yield parameter, elements
