"""A stage of ``torch.distributed.pipelining`` under ``fully_shard``: hooks over all micro-batches of an iteration.

``stage.py`` of torch 2.13: every backward runs without gradient sync and without resharding
(``backward_maybe_with_nosync``), so a unit's gradients stay whole, in the reduction's dtype, and so do its parameters
where ``reshard_after_forward`` is false, as torchtitan has it. Behind the last backward
``perform_reduce_grad`` runs every unit's post-backward in the order of ``named_modules()``. The interleaved
schedule gathers all units of a stage at once, ahead of its first pass (``FSDPModule.unshard(async_op=True)``, on the
default stream), and waits for them when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ..layers.module import GRAD_OUTPUT, Module, Tapes
from ..pipeline.torch_schedules import What
from ..program import Span
from ..tape import Category, Drop, Hold, Tape
from ..timeline import Part, Segment, named_hold
from .fsdp_hooks import Gradient, Hooks, Role, pass_through
from .fsdp_modules import compact_ids, events_around, hooked, owned, renamed_ids
from .fsdp_units import Sharding, Unit


class _Stage(Hooks):
    """One stage's hooks from the first micro-batch to the reduction."""

    def reshard(self, at: int, *, forward: bool) -> None:
        if forward or self.role.reduces:
            super().reshard(at, forward=forward)

    def next_microbatch(self) -> None:
        self.role = Role.KEPT
        for state in self.states:
            state.ran = False

    def gather(self, at: int) -> None:
        """``unshard(async_op=True)``, whose output waits on the default stream."""
        state = self.states[at]
        begun = len(self.events)
        self.unshard(at)
        if state.gathered is None:
            return
        known = {state.gathered.tensor: self.id("gathered", at)}
        for place in range(begun, len(self.events)):
            event = self.events[place]
            if isinstance(event, Hold):
                self.events[place] = event._replace(stream=0, tensor=known.get(event.tensor, event.tensor))
        state.gathered = state.gathered._replace(stream=0, tensor=self.id("gathered", at))

    def wait(self, at: int) -> None:
        """``UnshardHandle.wait``."""
        self.wait_for_unshard(at, forward=False)

    def free(self, at: int) -> None:
        """``FSDPModule.reshard``."""
        super().reshard(at, forward=False)

    def reduce(self, at: int) -> None:
        """``post_backward`` of the gradients that were kept."""
        self.role = Role.FIRST
        self.post_backward(at)

    def keep(self) -> None:
        """From now on ``gradients`` are those that micro-batches have accumulated."""
        if self.sharding.reduce != self.sharding.compute:
            self.gradients = [[self._copied(one) for one in own] for own in self.gradients]

    def _copied(self, one: Gradient) -> Gradient:
        return replace(one, end=self._kept(one)[1])


@lru_cache(maxsize=256)
def part(
    spans: tuple[Span, ...], loss: Module | None, units: tuple[Unit, ...], sharding: Sharding, ahead: bool
) -> Part:
    """A stage of ``spans``, whose parameters the schedule gathers ``ahead`` or its first forward does."""
    own = owned(spans, units, sharding)
    count = len(own.modules)
    hooks = _Stage(units, sharding, own.gradients, Role.KEPT_FIRST)
    outside: dict[What, list[tuple[int, Tape]]] = {}

    def each(what: What) -> list[tuple[int, Tape]]:
        """What the hooks of every unit do, by place."""
        do: dict[What, Callable[[int], None]] = {
            "unshard": hooks.gather,
            "wait": hooks.wait,
            "reshard": hooks.free,
            "reduce": hooks.reduce,
        }
        found = []
        for at, unit in enumerate(units):
            do[what](at)
            found.append((unit.first, hooks.take()))
        return found

    if ahead:
        outside = {"unshard": each("unshard"), "wait": each("wait"), "reshard": each("reshard")}
        each("unshard")
        each("wait")
    opening = pass_through(hooks, count, count - 1)
    hooks.next_microbatch()
    later = pass_through(hooks, count, count - 1)
    hooks.keep()
    outside["reduce"] = each("reduce")
    hooks.finalise()
    outside["reduce"].append((0, hooks.take()))

    adds = False, sharding.reduce == sharding.compute
    result: list[Span] = []
    segments: dict[What, list[Segment]] = {what: [] for what in outside}
    for place, (module, name) in enumerate(own.modules):
        arounds = events_around(opening, place), events_around(later, place)
        result.append(Span(hooked(module, own.renamed[place], arounds, adds), (name,)))
    for what, found in outside.items():
        for place, events in found:
            module, name = own.modules[place]
            arounds = events_around(opening, place), events_around(later, place)
            ids = compact_ids(module, own.renamed[place], arounds)
            segments[what].append(Segment(place, name, renamed_ids(events, ids)))
    losses: tuple[Span, ...] = ()
    if loss is not None:
        losses = (Span(_kept_loss(loss), ("loss",)),)
        *before, head = result
        result = [*before, Span(_given_logits(head.module), head.names)]
    return Part(tuple(result), losses, {what: tuple(found) for what, found in segments.items()})


@lru_cache(maxsize=64)
def _kept_loss(module: Module) -> Module:
    """The loss, which the schedule keeps (``_internal_losses``), and its gradient, which ``torch.autograd.backward``
    does (``_make_grads``)."""
    tapes = module.first
    ids = {named_hold(tapes.forward, "loss").tensor, named_hold(tapes.backward, "grad_loss").tensor}

    def kept(tapes: Tapes) -> Tapes:
        rest = tuple(event for event in tapes.backward if not (isinstance(event, Drop) and event.tensor in ids))
        return replace(tapes, backward=rest)

    return replace(module, first=kept(module.first), steady=kept(module.steady))


@lru_cache(maxsize=64)
def _given_logits(head: Module) -> Module:
    """The head, whose output's gradient the loss has held as logits."""

    def given(tapes: Tapes) -> Tapes:
        backward = tuple(
            event._replace(category=Category.LOGITS)
            if isinstance(event, Drop) and event.tensor == GRAD_OUTPUT
            else event
            for event in tapes.backward
        )
        return replace(tapes, backward=backward)

    return replace(head, first=given(head.first), steady=given(head.steady))


def stage_units(names: Sequence[str], *, first: bool, last: bool, ends_apart: bool) -> list[Unit]:
    """What ``fully_shard`` manages together in one stage whose layers are ``names`` (``apply_fsdp``,
    ``apply_fsdp_to_decoder``): nothing is resharded after forward. Modules: embedding, layers, norm, head."""
    begin = int(first)
    units = [Unit(name, (), at, at, False) for at, name in enumerate(names, begin)]
    end = begin + len(names) + (2 if last else 0) - 1
    if not ends_apart:
        return [Unit("model", (), 0, end, False, not first), *units] if first or last else units
    embedding = [Unit("embedding", (), 0, 0, False, False)] if first else []
    return [*embedding, *units, *([Unit("ends", (), end - 1, end, False)] if last else [])]
