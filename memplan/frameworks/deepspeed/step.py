"""What DeepSpeed's optimizer step takes, stage by stage, on one rank.

P parameters, S = padded P / dp the rank's share.

* Stage 0 (``runtime/fp16/fused_optimizer.py``, ``FP16_Optimizer``, with DeepSpeed's or apex's FusedAdam, for
  fp16 and bf16 alike): gradients are averaged in flat copies of up to 500,000,000 elements (2P), then each
  is cast to fp32 (4P), and all of them flattened (4P more) before the casts end.
  With PyTorch's optimizers (``unfused_optimizer.py``): the casts alone.
* Stages 1, 2 (``stage_1_and_2.py``, ``step``): norms in fp64, a tensor at a time; per group the gradients flattened
  (2S), cast to fp32 (4S), the copy dropped, then the gradients, then the update.
* Stage 3 (``stage3.py``, ``step``): norms in fp64, a shard at a time; per sub-group the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter
from ...optimizers.base import step_temporaries
from ...plan.plan import Optimizer
from ...tape.events import Category, Drop, Event, Hold, Scope, Tape, drops, fold, rounded
from ...values import dataclass
from ..plain.hooked import Model
from . import states as zero_states
from .buckets import ReducingBucket
from .config import Zero
from .states import Group, shard

TEMPORARIES, COMMUNICATION, GRADIENT = Category.TEMPORARIES, Category.COMMUNICATION_BUFFERS, Category.GRADIENTS

ALLREDUCE_BUCKET = 500_000_000
"""Elements after which stage 0's bucket is closed (``MEMORY_OPT_ALLREDUCE_SIZE``)."""


@dataclass(frozen=True)
class Step:
    """The step in two halves: the gradients that backward left end between them."""

    before: Tape
    after: Tape


BUCKET = Scope.BUCKETS.id()
"""Id of stage 1's bucket, which the first backward makes and the step ends with the gradients."""


class Ids:
    """Holds of the step, with ids of their own."""

    def __init__(self) -> None:
        self.last = 0

    def hold(self, name: str, elements: int, dtype: str, category: Category) -> Hold:
        self.last += 1
        size = 8 * elements if dtype == "fp64" else elements * ITEMSIZE[dtype]
        return Hold(self.last, rounded(size), category, name, (elements,), dtype)


def norms(ids: Ids, sizes: Iterable[int]) -> list[Event]:
    """``vector_norm(gradient.to(float64))``, one tensor at a time."""
    events: list[Event] = []
    for n in sizes:
        hold = ids.hold("norm_fp64", n, "fp64", TEMPORARIES)
        events += [hold, hold.end]
    return events


def update(ids: Ids, optimizer: Optimizer, name: str, elements: int) -> list[Event]:
    """The optimizer over one flat fp32 tensor."""
    return _updated(ids, optimizer, [Parameter(name, (elements,))])


def _updated(ids: Ids, optimizer: Optimizer, parameters: Sequence[Parameter]) -> list[Event]:
    """What the update takes at its peak; DeepSpeed's and bitsandbytes' kernels take nothing."""
    temporaries = step_temporaries(optimizer, parameters, "fp32")
    holds = [hold._replace(tensor=ids.last + 1 + at) for at, hold in enumerate(temporaries)]
    ids.last += len(holds)
    return [*holds, *drops(holds)]


def flattened(
    ids: Ids, name: str, elements: int, tensors: int, dtype: str
) -> tuple[list[Event], list[Event], Hold | None]:
    """``flatten(…).to(float32)``: events, events that end what is not the result, and the result that is held.

    ``flatten`` of one tensor is a view, and a cast to the same dtype is none.
    """
    flat = ids.hold(f"{name}/flat_gradients", elements, dtype, GRADIENT) if tensors > 1 else None
    if dtype == "fp32":
        return ([flat] if flat else []), [], flat
    wide = ids.hold(f"{name}/gradients_fp32", elements, "fp32", GRADIENT)
    return [*([flat] if flat else []), wide], ([flat.end] if flat else []), wide


def partitioned(
    model: Model, groups: Sequence[Group], rank: int, optimizer: Optimizer, accumulates: str, *, compact: bool
) -> Step:
    """Stages 1 and 2. ``compact``: the gradients are flat and fp32 already."""
    ids = Ids()
    before: list[Event] = norms(ids, (piece.elements for group in groups for piece in group.share_of(rank)))
    after: list[Event] = []
    for at, group in enumerate(groups):
        pieces = group.share_of(rank)
        padding = group.share - sum(piece.elements for piece in pieces)
        change = update(ids, optimizer, group.name, group.share)
        if compact:
            before += change
            continue
        events, ends, wide = flattened(ids, group.name, group.share, len(pieces) + (padding > 0), accumulates)
        held = [wide] if wide else []
        if at < len(groups) - 1:
            before += [*events, *ends, *change, *drops(held)]
        else:
            before += [*events, *ends, *drops(held)]
            after += [*held, *change, *drops(held)]
    return Step(tuple(before), tuple(after))


def reduction(model: Model, bucket: ReducingBucket) -> Tape:
    """Stage 1: gradients are reduced behind the last backward, in the order of the groups (``reduce_gradients``).

    They end as they are copied into the bucket, which exists already.
    """
    events: list[Event] = []
    for group in bucket.groups:
        for id, size in zip(group.ids, group.sizes, strict=True):
            before, stays = bucket.arrived(id, size, model.bytes(id))
            events += before
            if not stays:
                events.append(Drop(Scope.GRADIENTS.id(id), model.bytes(id), GRADIENT))
    return (*events, *bucket.finished())


def behind_reduction(model: Model, zero: Zero, groups: Sequence[Group], rank: int, step: Step) -> Step:
    """Stage 1's step, which begins with the reduction.

    The first half is what the reduction takes at most beyond the gradients and the bucket that it finds; behind
    it this rank's reduced gradients are held, until the step's own first half has read them.
    """
    bucket = ReducingBucket(zero, groups, rank, model.dtype, clears=False)
    bucket.buffers = [Hold(BUCKET, 0, COMMUNICATION)]
    most = fold(reduction(model, bucket)).peak
    ids = Ids()
    ids.last = 1 << 20
    taken = ids.hold("gradient_reduction", 0, model.dtype, COMMUNICATION)._replace(bytes=most)
    kept = [hold._replace(tensor=taken.tensor + 1 + at) for at, hold in enumerate(bucket.partition.values())]
    before = (taken, taken.end) if most else ()
    return Step(before, (*kept, *step.before, *drops(kept), *step.after))


def with_sums(model: Model, groups: Sequence[Group], optimizer: Optimizer, dtype: str) -> Step:
    """``BF16_Optimizer`` (``runtime/bf16_optimizer.py``): behind every backward each gradient is cast to fp32 and added
    to a static one; at the last one that goes through a 16-bit copy to be averaged. Gradients end with the step."""
    ids = Ids()
    before: list[Event] = []
    for parameter in map(model.parameters.__getitem__, model.trained):
        cast = ids.hold(f"{parameter.name}/grad_fp32", parameter.elements, "fp32", GRADIENT)
        before += [cast, cast.end]
    for group in groups:
        copy = ids.hold(f"{group.name}/allreduce", group.padded, dtype, COMMUNICATION)
        before += [copy, copy.end]
    for group in groups:
        before += update(ids, optimizer, group.name, group.share)
    return Step(tuple(before), ())


def sharded(
    model: Model, dp: int, sub_groups: Sequence[Sequence[int]], optimizer: Optimizer, accumulates: str, dtype: str
) -> Step:
    """Stage 3, without offload."""
    ids = Ids()
    events: list[Event] = []
    shards = {id: shard(model.parameters[id].elements, dp) for group in sub_groups for id in group}
    if dtype == "fp16":
        total = sum(shards.values())
        absolute = ids.hold("absolute", total, accumulates, TEMPORARIES)
        found = ids.hold("is_inf", total, "bool", TEMPORARIES)
        events += [absolute, found, *drops([absolute, found])]
        found = ids.hold("is_nan", total, "bool", TEMPORARIES)
        events += [found, found.end]
    for group in sub_groups:
        events += norms(ids, (shards[id] for id in group))
    for at, group in enumerate(sub_groups):
        size = sum(shards[id] for id in group)
        name = f"sub_group.{at}"
        made, ends, wide = flattened(ids, name, size, len(group), accumulates)
        events += [*made, *ends, *update(ids, optimizer, name, size), *(drops([wide]) if wide else [])]
    return Step((), tuple(events))


def unpartitioned(model: Model, groups: Sequence[Group], optimizer: Optimizer, dtype: str) -> Step:
    """Stage 0."""
    ids = Ids()
    before: list[Event] = []
    trained = [model.parameters[id] for id in model.trained]
    for size in _allreduced([model.parameters[id].elements for id in model.trained]):
        hold = ids.hold("allreduce_flat", size, dtype, COMMUNICATION)
        before += [hold, hold.end]
    if dtype == "fp32":
        return Step((*before, *_updated(ids, optimizer, trained)), ())
    casts = {
        id: ids.hold(f"{parameter.name}/grad_fp32", parameter.elements, "fp32", GRADIENT)
        for id, parameter in zip(model.trained, trained, strict=True)
    }
    if not zero_states.is_fused_adam(optimizer):
        for cast in casts.values():
            before += [cast, cast.end]  # the overflow check, one at a time
        held = list(casts.values())
        return Step((*before, *held, *_updated(ids, optimizer, trained), *drops(held)), ())
    flats: list[Hold] = []
    for group in groups:
        flat = ids.hold(f"{group.name}/flat_gradients_fp32", sum(group.sizes), "fp32", GRADIENT)
        copied = [casts[id] for id in group.ids]
        before += [*copied, flat, *drops(copied)]
        flats.append(flat)
    return Step((*before, *drops(flats)), (*flats, *drops(flats)))


def _allreduced(sizes: Sequence[int]) -> list[int]:
    """Elements of each flat copy: a bucket is closed by the tensor that takes it beyond the limit."""
    result, current = [], 0
    for size in sizes:
        current += size
        if current > ALLREDUCE_BUCKET:
            result.append(current)
            current = 0
    return [*result, current] if current else result
