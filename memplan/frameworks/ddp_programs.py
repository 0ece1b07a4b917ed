"""PyTorch's DistributedDataParallel around a model of transformers: ``plain``'s program with what the reducer adds.

What becomes of gradients (``reducer.cpp``, ``mark_variable_ready_dense``, ``finalize_backward``):

* by default each is copied into its bucket and stays: buckets are a second copy;
* with ``gradient_as_bucket_view`` it is copied into its bucket and ends there, at the parameter's hook, and the next
  micro-batch adds to the bucket. ``zero_grad(set_to_none=True)`` makes it no view again, which costs a copy, no memory;
* micro-batches under ``no_sync`` run no hooks. What they leave is no view, and ends in the last micro-batch, parameter
  by parameter: until then gradients are there twice in spite of ``gradient_as_bucket_view``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..layers.module import SHARED, Module, Options, Parameter, Tapes
from ..layers.tied import TIED_GRADIENT
from ..plan.errors import PlanError
from ..plan.plan import Optimizer, Plan
from ..plan.tuning_checks import is_tuned
from ..program import Program, Span, drop_all, fold_program
from ..tape import Category, Drop, Event, Hold, Stretch, Tape
from . import ddp, ddp_zero, plain
from .fsdp_modules import largest_id, left_gradients
from .plain_buffers import buffers
from .states import State, full, step_temporaries

KEPT_TIED = SHARED - 7
"""Id of a tied weight's gradient that waits for the micro-batch that reduces."""


def programs(plan: Plan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run; with ZeRO that of the rank that needs most."""
    made = _replicated(plan, options)
    return (_with_zero(plan, made)[1] if plan.layout.zero else made,)


def fullest_rank(plan: Plan) -> int:
    """The rank that needs most of those that ZeRO tells apart."""
    return _with_zero(plan, _replicated(plan, Options()))[0]


def _replicated(plan: Plan, options: Options) -> Program:
    """What ranks do that do not share optimizer states."""
    _check(plan)
    (made,) = plain.programs(plan, options)
    given, shape = plan.ddp, plain.layer_shape(plan)
    recompute = plan.recompute.mode == "full"
    tensors = made.parameter_tensors()
    if is_tuned(plan):
        tensors = [one for one in tensors if one.trained]
        found = ddp.buckets_of_trained(given, tensors, plan.precision.dtype)
    else:
        found = ddp.buckets(given, shape, plan.model.layers, recompute)
    extra = (*made.extra, *found, *ddp.used_map(given, len(tensors)))
    spans, last = made.spans, made.last
    if given.gradient_as_bucket_view:
        spans = as_views(spans)
        if not given.gradient_sync and made.microbatches > 1:
            spans, last = unsynced(made.spans)
    if given.broadcast_buffers:
        spans = broadcasting(spans, tuple(ddp.broadcast_buffers(buffers(plan, 0))))
    if given.find_unused_parameters and not given.static_graph and plan.loss.kind == "plain":
        spans, last = copying_outputs(spans), copying_outputs(last) if last else ()
    return replace(made, spans=spans, last=last, streams=bool(last), extra=extra)


def _check(plan: Plan) -> None:
    given = plan.ddp
    if given.parameters_as_bucket_view and not plan.layout.zero:
        problem = "belongs to ZeroRedundancyOptimizer (layout.zero: 1)"
        raise PlanError("ddp.parameters_as_bucket_view", True, problem)
    if is_tuned(plan) and plan.layout.zero:
        problem = "must be 0 with adapters or frozen parameters: what each rank owns of them is not modelled"
        raise PlanError("layout.zero", plan.layout.zero, problem)
    if is_tuned(plan) and given.gradient_as_bucket_view and not given.gradient_sync:
        problem = "must be true with adapters or frozen parameters and ddp.gradient_as_bucket_view, or not modelled"
        raise PlanError("ddp.gradient_sync", False, problem)
    optimizer = plan.optimizer
    if plan.layout.zero and optimizer.name in ZERO_OPTIMIZERS and optimizer.implementation in NOT_TORCH:
        problem = "must be PyTorch's (foreach, for-loop or fused) with ZeroRedundancyOptimizer (layout.zero: 1)"
        raise PlanError("optimizer.implementation", optimizer.implementation, problem)
    if plan.layout.zero and optimizer.name not in ZERO_OPTIMIZERS:
        problem = f"must be PyTorch's {', '.join(ZERO_OPTIMIZERS)} with ZeroRedundancyOptimizer (layout.zero: 1)"
        raise PlanError("optimizer.name", optimizer.name, problem)
    if given.gradient_as_bucket_view and not given.gradient_sync and plan.loss.kind != "plain":
        problem = "must be true for losses other than plain with ddp.gradient_as_bucket_view, or not modelled"
        raise PlanError("ddp.gradient_sync", False, problem)


ZERO_OPTIMIZERS = ("sgd", "adam", "adamw", "adafactor")
NOT_TORCH = ("bitsandbytes", "transformers", "apex")


# -- gradients --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def as_views(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Gradients go where others are already, in the first micro-batch too."""
    return tuple(Span(_added(span.module), span.names) for span in spans)


@lru_cache(maxsize=1024)
def _added(module: Module) -> Module:
    return replace(module, first=module.steady)


@lru_cache(maxsize=256)
def unsynced(spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """All micro-batches but the last, which keep gradients; and the last, in which each ends in its bucket."""
    embedding, head = spans[0].module, spans[-1].module
    tied = any(one.name == "word.weight" for one in head.parameters) and _waits(embedding)
    kept = [_kept(span.module, tied and span is spans[-1]) for span in spans]
    last = [_ended(span.module, tied and span is spans[-1]) for span in spans]
    if tied:
        tape = last[0].steady
        (gradient,) = (hold for hold in left_gradients(head) if hold.shape == _word(head).shape)
        tape = replace(tape, backward=(*tape.backward, Drop(KEPT_TIED, gradient.bytes, gradient.category)))
        last[0] = replace(last[0], first=tape, steady=tape)
    return (
        tuple(Span(module, span.names) for module, span in zip(kept, spans, strict=True)),
        tuple(Span(module, span.names) for module, span in zip(last, spans, strict=True)),
    )


def _waits(embedding: Module) -> bool:
    """The head's gradient waits for the embedding's (``layers.tied.with_waiting_gradient``)."""
    return any(isinstance(event, Drop) and event.tensor == TIED_GRADIENT for event in embedding.steady.backward)


def _word(head: Module) -> Parameter:
    return next(one for one in head.parameters if one.name == "word.weight")


def _ids(module: Module, tied: bool) -> dict[int, int]:
    """Ids that a module's gradients have from one micro-batch to another, by their own."""
    base = largest_id(module)
    result = {hold.tensor: base + 1 + at for at, hold in enumerate(left_gradients(module))}
    if tied:
        word = _word(module).shape
        result |= {hold.tensor: KEPT_TIED for hold in left_gradients(module) if hold.shape == word}
    return result


@lru_cache(maxsize=1024)
def _kept(module: Module, tied: bool) -> Module:
    ids = _ids(module, tied)
    backward = tuple(
        event._replace(tensor=ids.get(event.tensor, event.tensor)) if isinstance(event, Hold | Drop) else event
        for event in module.first.backward
    )
    return replace(module, first=replace(module.first, backward=backward))


@lru_cache(maxsize=1024)
def _ended(module: Module, tied: bool) -> Module:
    """Each gradient is added to the one that was kept, which ends with it."""
    ids = _ids(module, tied)
    ends: dict[int, Drop] = {}
    for hold in left_gradients(module):
        if ids[hold.tensor] != KEPT_TIED:
            fresh = _same(module.first.backward, hold, module.steady.backward)
            ends[fresh.tensor] = Drop(ids[hold.tensor], hold.bytes, hold.category)
    events: list[Event] = []
    for event in module.steady.backward:
        events.append(event)
        if isinstance(event, Drop) and event.tensor in ends:
            events.append(ends.pop(event.tensor))
    assert not ends, "a gradient that never arrives"
    tapes = replace(module.steady, backward=tuple(events))
    return replace(module, first=tapes, steady=tapes)


def _same(tape: Tape, hold: Hold, other: Tape) -> Hold:
    """The tensor of ``other`` that is what ``hold`` is in ``tape``: as many of its name and shape before it."""

    def alike(tape: Tape) -> list[Hold]:
        return [e for e in tape if isinstance(e, Hold) and (e.name, e.shape) == (hold.name, hold.shape)]

    at = next(at for at, one in enumerate(alike(tape)) if one.tensor == hold.tensor)
    return alike(other)[at]


# -- buffers ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def broadcasting(spans: tuple[Span, ...], flat: tuple[Hold, ...]) -> tuple[Span, ...]:
    """``_sync_buffers`` before every forward: rank 0's, through flat copies."""
    if not flat:
        return spans
    module = spans[0].module
    own = drop_all(flat, largest_id(module) + len(left_gradients(module)) + 1)

    def after(tapes: Tapes) -> Tapes:
        return replace(tapes, forward=(*own, *tapes.forward))

    first, steady = after(module.first), after(module.steady)
    return (Span(replace(module, first=first, steady=steady), spans[0].names), *spans[1:])


# -- outputs ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def copying_outputs(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """``_DDPSink``, from which unused parameters are looked for, clones what the model returns: its logits."""
    head = spans[-1].module
    return (*spans[:-1], Span(_copying(head), spans[-1].names))


@lru_cache(maxsize=64)
def _copying(head: Module) -> Module:
    """The logits' copy begins before they end, and ends with the output."""

    def copied(tape: Tape) -> Tape:
        at = max(i for i, event in enumerate(tape) if isinstance(event, Drop) and event.category is Category.LOGITS)
        logits = next(event for event in tape if isinstance(event, Hold) and event.tensor == tape[at].tensor)  # type: ignore[union-attr]
        copy = logits._replace(tensor=largest_id(head) + len(left_gradients(head)) + 1, name="logits_cloned")
        return (*tape[:at], copy, *tape[at:], Drop(copy.tensor, copy.bytes, copy.category))

    tapes = replace(head.steady, forward=copied(head.steady.forward))
    return replace(head, first=replace(head.first, forward=copied(head.first.forward)), steady=tapes)


# -- ZeroRedundancyOptimizer ------------------------------------------------------------------------


def _with_zero(plan: Plan, made: Program) -> tuple[int, Program]:
    """The rank that needs most, with its own states; of two that differ in nothing else, the first."""
    optimizer, dtype = plan.optimizer, plan.precision.stored
    assert plan.layout.dp is not None
    registered, _ = ddp.parameters(plain.layer_shape(plan), plan.model.layers, plan.recompute.mode == "full")
    whole: tuple[State, ...] = (full("parameter", Category.PARAMETERS, dtype),)
    if plan.ddp.parameters_as_bucket_view:
        flat = ddp_zero.parameter_buckets(ddp_zero.owners(registered, plan.layout.dp), dtype)
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
    owned = ddp_zero.owners(parameters, ranks)
    every = [
        (rank, ddp_zero.states(own, optimizer, dtype), Stretch(drop_all(step_temporaries(optimizer, own, dtype), 1)))
        for rank, own in enumerate(owned)
    ]
    kept = [sum(hold.bytes for hold in states) for _, states, _ in every]
    needed = [size + step.excursion.peak for size, (*_, step) in zip(kept, every, strict=True)]
    return every[kept.index(max(kept))], every[needed.index(max(needed))]
