"""What a rank does under DistributedDataParallel, with and without ``ZeroRedundancyOptimizer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache

from ...layers.edges import TIED_GRADIENT
from ...layers.module import Module, Options, Parameter, Tapes, hold_bytes
from ...optimizers import algorithms
from ...optimizers.base import State, full, optimizer_states, step_temporaries
from ...plan.plan import Optimizer, ResolvedPlan
from ...plan.tuning_checks import is_tuned
from ...schedules.one_chunk import one_chunk
from ...tape.events import Category, Drop, Hold, Hook, Scope, Seam, Stretch, Tape, cut, insert, renamed
from ...tape.program import Program, Span, drop_all, fold_program
from ...values import NamedTuple, replace
from ..plain import programs as plain
from ..plain.hooked import TIED
from ..plain.programs import buffers
from . import reducer as ddp

# -- zero ------------------------------------------------------------------------------------------------


def owners(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Parameters of each rank: the largest first, each to the rank that has the fewest elements
    (``_partition_parameters``)."""
    result: list[list[Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: one.elements, reverse=True):
        rank = sizes.index(min(sizes))
        result[rank].append(parameter)
        sizes[rank] += parameter.elements
    return result


def states(own: Sequence[Parameter], optimizer: Optimizer, dtype: str) -> tuple[Hold, ...]:
    """What the owner's optimizer keeps."""
    kinds = optimizer_states(optimizer, dtype, embeddings_32bit=optimizer.embeddings_32bit)
    holds = (state.hold(parameter, 0, dtype) for parameter in own for state in kinds)
    return tuple(hold for hold in holds if hold is not None)


def parameter_buckets(owned: Sequence[Sequence[Parameter]], dtype: str) -> tuple[Hold, ...]:
    """``_build_param_buckets``: one for each owner; without parameters a tensor of one number."""
    sizes = [sum(parameter.elements for parameter in own) for own in owned]
    return tuple(
        Hold(0, hold_bytes((size or 1,), dtype), Category.PARAMETERS, "parameter_bucket", (size or 1,), dtype)
        for size in sizes
    )


# -- programs --------------------------------------------------------------------------------------------

KEPT_TIED = Scope.GRADIENTS.id()
"""Id of a tied weight's gradient that waits for the micro-batch that reduces."""


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run; with ZeRO that of the rank that needs most."""
    made = _replicated(plan, options)
    return (_with_zero(plan, made)[1] if plan.layout.zero else made,)


def fullest_rank(plan: ResolvedPlan) -> int:
    """The rank that needs most of those that ZeRO tells apart."""
    return _with_zero(plan, _replicated(plan, Options()))[0]


def _replicated(plan: ResolvedPlan, options: Options) -> Program:
    """What ranks do that do not share optimizer states."""
    _check(plan)
    (made,) = plain.programs(plan, replace(options, seams=True))
    given, shape = plan.ddp, plain.layer_shape(plan)
    recompute = plan.recompute.mode == "full"
    tensors = made.parameter_tensors()
    if is_tuned(plan):
        tensors = [one for one in tensors if one.trained]
        found = ddp.buckets_of(given, tensors[::-1], plan.precision.dtype)
    elif plan.compile:
        found = ddp.buckets_of(given, ddp.ready_in(made.spans[0].module), plan.precision.stored)
    else:
        found = ddp.buckets(given, shape, plan.model.layers, recompute)
    extra = (*made.extra, *found, *ddp.used_map(given, len(tensors)))
    broadcast = tuple(ddp.broadcast_buffers(buffers(plan, 0))) if given.broadcast_buffers else ()
    logits = plan.loss.kind == "plain" and plan.trainer.kind.sequences == 1
    copies = given.find_unused_parameters and not given.static_graph and logits
    gradients, last = Gradients.VIEWS if given.gradient_as_bucket_view else Gradients.LEFT, made.last
    if given.gradient_as_bucket_view and not given.gradient_sync and made.microbatches > 1:
        gradients, last = Gradients.KEPT, with_hooks(made.spans, Gradients.ENDING, Around((), copies))
    spans = with_hooks(made.spans, gradients, Around(broadcast, copies))
    return replace(made, order=one_chunk(spans, made.microbatches, last=last), extra=extra)


def _check(plan: ResolvedPlan) -> None:
    given = plan.ddp
    for field in ("find_unused_parameters", "static_graph"):
        if plan.compile and getattr(given, field):
            raise plan.wrong(f"ddp.{field}", "must be false with torch.compile: not modelled")
    plan.refuse(
        (
            "ddp.bucket_cap_mb",
            plan.compile and min(ddp.limits(given)) < ddp.FIRST_BUCKET,
            "must be at least 1 with torch.compile, whose DDPOptimizer takes no less",
        ),
        (
            "ddp.parameters_as_bucket_view",
            given.parameters_as_bucket_view and not plan.layout.zero,
            "belongs to ZeroRedundancyOptimizer (layout.zero: 1)",
        ),
        (
            "layout.zero",
            is_tuned(plan) and plan.layout.zero,
            "must be 0 with adapters or frozen parameters: their distribution over ranks is not modelled",
        ),
        (
            "ddp.gradient_sync",
            is_tuned(plan) and given.gradient_as_bucket_view and not given.gradient_sync,
            "must be true with adapters or frozen parameters and ddp.gradient_as_bucket_view, or not modelled",
        ),
    )
    optimizer = plan.optimizer
    if plan.layout.zero and optimizer.algorithm.torch and optimizer.implementation in NOT_TORCH:
        raise plan.wrong(
            "optimizer.implementation",
            "must be PyTorch's (foreach, for-loop or fused) with ZeroRedundancyOptimizer (layout.zero: 1)",
        )
    if plan.layout.zero and not optimizer.algorithm.torch:
        known = ", ".join(one.name for one in algorithms() if one.torch)
        raise plan.wrong("optimizer.name", f"must be PyTorch's {known} with ZeroRedundancyOptimizer (layout.zero: 1)")
    if given.gradient_as_bucket_view and not given.gradient_sync and plan.loss.kind != "plain":
        raise plan.wrong(
            "ddp.gradient_sync",
            "must be true for losses other than plain with ddp.gradient_as_bucket_view, or not modelled",
        )


NOT_TORCH = ("bitsandbytes", "transformers", "apex")


# -- hooks ------------------------------------------------------------------------------------------


class Gradients(Enum):
    """What becomes of a micro-batch's gradients."""

    LEFT = "the first ones stay, others are added to them"
    VIEWS = "they are added to buckets, in the first micro-batch too"
    KEPT = "as LEFT; they wait for the micro-batch that reduces"
    ENDING = "they are added to those that wait, which end in their buckets"


class Around(NamedTuple):
    """What DDP does around a whole forward pass."""

    broadcast: tuple[Hold, ...] = ()
    """``_sync_buffers`` before it: rank 0's buffers, through flat copies."""
    copies_outputs: bool = False
    """``_DDPSink``, from which unused parameters are looked for, clones what the model returns: its logits."""


@lru_cache(maxsize=256)
def with_hooks(spans: tuple[Span, ...], gradients: Gradients, around: Around) -> tuple[Span, ...]:
    """``spans`` with the events of DDP's hooks in place of their seams."""
    embedding, head = spans[0].module, spans[-1].module
    if embedding is head:
        return (Span(_hooked(embedding, gradients, around, None), spans[0].names),)
    tied = None
    if gradients in (Gradients.KEPT, Gradients.ENDING) and _waits(embedding):
        tied = _arrived(head.first.backward).get(TIED)
    result = [_hooked(span.module, gradients, Around(), None) for span in spans[1:-1]]
    result.insert(0, _hooked(embedding, gradients, Around(around.broadcast), tied))
    result.append(_hooked(head, gradients, Around((), around.copies_outputs), tied))
    return tuple(Span(module, span.names) for module, span in zip(result, spans, strict=True))


def _waits(embedding: Module) -> bool:
    """The head's gradient waits for the embedding's (``layers.edges.with_waiting_gradient``)."""
    return any(isinstance(event, Drop) and event.tensor == TIED_GRADIENT for event in embedding.steady.backward)


def _arrived(backward: Tape) -> dict[str, Hold]:
    """Gradients by their parameters' names."""
    holds = {event.tensor: event for event in backward if isinstance(event, Hold)}
    seams = (seam for _, seam in cut(backward) if seam is not None and seam.hook is Hook.GRADIENT)
    return {seam.name: holds[seam.tensor] for seam in seams if seam.tensor in holds}


@lru_cache(maxsize=1024)
def _hooked(module: Module, gradients: Gradients, around: Around, tied: Hold | None) -> Module:
    """``tied``: the gradient of a head's weight that waits for the embedding's."""
    first, steady = module.first, module.steady
    arrived = _arrived(first.backward) if gradients in (Gradients.KEPT, Gradients.ENDING) else {}
    waiting = {one.name: module.largest_id + 1 + at for at, one in enumerate(module.parameters) if one.name in arrived}
    own = module.largest_id + 1 + len(waiting)
    if tied is not None and TIED in waiting:
        waiting[TIED] = KEPT_TIED
    match gradients:
        case Gradients.VIEWS:
            first = steady
        case Gradients.KEPT:
            known = {arrived[name].tensor: id for name, id in waiting.items()}
            first = replace(first, backward=renamed(first.backward, known))
        case Gradients.ENDING:
            first = steady = replace(steady, backward=_with_ends(module, waiting, tied))

    def at(seam: Seam) -> Tape:
        return drop_all(around.broadcast, own) if seam.hook is Hook.BEFORE_FORWARD else ()

    def tapes(one: Tapes) -> Tapes:
        forward = insert(one.forward, at)
        if around.copies_outputs:
            forward = _with_copy(forward, own)
        return replace(one, forward=forward, backward=insert(one.backward, lambda seam: ()))

    evaluation = insert(module.evaluation, lambda seam: ())
    return replace(module, first=tapes(first), steady=tapes(steady), evaluation=evaluation)


def _with_copy(tape: Tape, id: int) -> Tape:
    """The logits' copy begins before they end, and ends with the output."""
    at, end = max((i, one) for i, one in enumerate(tape) if isinstance(one, Drop) and one.category is Category.LOGITS)
    logits = next(one for one in tape if isinstance(one, Hold) and one.tensor == end.tensor)
    copy = logits._replace(tensor=id, name="logits_cloned")
    return (*tape[:at], copy, *tape[at:], copy.end)


def _with_ends(module: Module, waiting: Mapping[str, int], tied: Hold | None) -> Tape:
    """Each gradient is added to the one that waits under that id, which ends with it; a tied weight's at the end."""
    arrived = _arrived(module.steady.backward)
    taken: set[int] = set()

    def at(seam: Seam) -> Tape:
        if seam.hook is Hook.GRADIENT and waiting.get(seam.name, KEPT_TIED) != KEPT_TIED:
            own = arrived[seam.name]
            taken.add(own.tensor)
            return own.end, Drop(waiting[seam.name], own.bytes, Category.GRADIENTS)
        if seam.hook is Hook.AFTER_BACKWARD and tied is not None and TIED not in waiting:
            return (Drop(KEPT_TIED, tied.bytes, Category.GRADIENTS),)
        return ()

    return insert(module.steady.backward, at, taken)


# -- ZeroRedundancyOptimizer ------------------------------------------------------------------------


def _with_zero(plan: ResolvedPlan, made: Program) -> tuple[int, Program]:
    """The rank that needs most, with its own states; of two that differ in nothing else, the first."""
    optimizer, dtype = plan.optimizer, plan.precision.stored
    registered, _ = ddp.parameters(plain.layer_shape(plan), plan.model.layers, plan.recompute.mode == "full")
    whole: tuple[State, ...] = (full("parameter", Category.PARAMETERS, dtype),)
    if plan.ddp.parameters_as_bucket_view:
        flat = parameter_buckets(owners(registered, plan.layout.dp), dtype)
        made, whole = replace(made, extra=(*flat, *made.extra)), ()
    ranks = _fullest(registered, plan.layout.dp, optimizer, dtype)
    programs = [(rank, replace(made, states=whole, late_extra=states, step=step)) for rank, states, step in ranks]
    return max(programs, key=lambda one: fold_program(one[1]).peak)


@lru_cache(maxsize=64)
def _fullest(
    parameters: tuple[Parameter, ...], ranks: int, optimizer: Optimizer, dtype: str
) -> tuple[tuple[int, tuple[Hold, ...], Stretch], ...]:
    """Number, states and step of the rank that keeps most, and of the one that needs most in its step: the peak of
    either is the highest of all, since ranks differ in nothing else."""
    owned = owners(parameters, ranks)
    every = [
        (rank, states(own, optimizer, dtype), Stretch(drop_all(step_temporaries(optimizer, own, dtype), 1)))
        for rank, own in enumerate(owned)
    ]
    kept = [sum(hold.bytes for hold in states) for _, states, _ in every]
    needed = [size + step.excursion.peak for size, (*_, step) in zip(kept, every, strict=True)]
    return every[kept.index(max(kept))], every[needed.index(max(needed))]
